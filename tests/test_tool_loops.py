"""Agent loops: the next prompt is prefilled while tools run, and no tool notices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware, wrap_model_call, wrap_tool_call
from langchain.tools import ToolRuntime, tool
from langchain_core.messages import HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from langgraph_pingpong import ChatPingPong, streaming_tool
from langgraph_pingpong.edges import tool_results
from langgraph_pingpong.errors import ConfigError, EngineDead
from langgraph_pingpong.trace import Event
from tests.conftest import leases_on, wait_until
from tests.graph_gallery.agents import call, tool_user

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

QUESTION = {"messages": [HumanMessage("Tell me of the sea. " * 20)]}
RESULT = "Low tide is at four o'clock, and the crabs come out. " * 8
PROMPT = "You are the researcher. Look things up."
BOTH = call("tide", place="Oslo") + "\n" + call("moon", place="Lima")
LATER_S = 0.15
"""How long a slow tool takes, in seconds: enough for a plan and some appends on a busy machine."""


def models(lab: Lab, *says: str, engines: int = 2) -> tuple[ChatPingPong, Recorder, ChatPingPong]:
    """One with edges on, what happens on it, and one with edges off; they answer with tool calls first."""
    made = []
    for overlap in ("off", "on"):
        reply = tool_user(*says, role="Tell me of the sea")
        made.append(lab.model([lab.engine(f"fake:{i}", reply=reply) for i in range(engines)], overlap=overlap))
    return made[1], lab.record(made[1]), made[0]


def said(result: dict[str, Any]) -> list[Any]:
    """What a run's messages say, without the ids that differ from run to run."""
    calls = [[(each["name"], each["args"]) for each in getattr(m, "tool_calls", ())] for m in result["messages"]]
    return [(m.type, m.text, made) for m, made in zip(result["messages"], calls, strict=True)]


def last(record: Recorder, node: str = "model") -> dict[str, Any]:
    """The certificate of the last call, which must be of the whole prompt."""
    certificate = record.certificate(node)
    assert certificate["ids_equal"]
    return certificate


def before_result(record: Recorder, result: str = RESULT) -> int:
    """Tokens of the last prompt before the first result: one a byte here."""
    certificate = record.named("finish")[-1].data["certificate"]
    return int(certificate["prompt_tokens"]) - len(result.encode())


def sleepy(name: str, result: str = RESULT, seconds: float = LATER_S, effects: list[str] | None = None) -> Any:
    """A tool that takes a while."""

    @tool(name)
    def run(place: str) -> str:
        """Look something up."""
        time.sleep(seconds)
        if effects is not None:
            effects.append(f"{name} {place}")
        return result

    return run


def hand_made(model: ChatPingPong, tools: list[Any], node: Any = None) -> Any:
    """`bind_tools`, a node that runs tools, and `tools_condition`."""
    with_tools = model.bind_tools(tools)
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [with_tools.invoke(state["messages"])]})
    builder.add_node("tools", node or ToolNode(tools, handle_tool_errors=True))
    builder.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    return builder.compile()


class TestAnswersBegunAhead:
    def test_are_those_of_calls_that_read_results(self, lab: Lab) -> None:
        """The first call of each run must call a tool, and is limited; the next one is asked in another way."""

        @wrap_model_call
        def force(request: Any, handler: Any) -> Any:
            if isinstance(request.messages[-1], ToolMessage):
                return handler(request.override(model_settings={"max_tokens": 40}))
            return handler(request.override(tool_choice="tide"))

        on, record, off = models(lab, call("tide", place="Oslo"), "It is low.")
        agents = [create_agent(model, [sleepy("tide")], middleware=[force]) for model in (on, off)]
        for _ in range(2):  # what the second call asks for is known from the first run on
            record.events.clear()
            assert said(agents[0].invoke(QUESTION)) == said(agents[1].invoke(QUESTION))
        assert [event.data["ended"] for event in record.named("speculation.started")] == [True]
        assert not record.named("speculation.dropped")


class TestWhileToolsRun:
    @pytest.mark.parametrize("way", ["invoke", "ainvoke"])
    @pytest.mark.parametrize("engines", [1, 2])
    def test_the_prompt_before_the_result_is_prefilled_in_the_first_run(self, lab: Lab, way: str, engines: int) -> None:
        effects: list[str] = []
        on, record, off = models(lab, call("tide", place="Oslo"), engines=engines)
        results = []
        for model in (on, off):
            agent = create_agent(model, [sleepy("tide", effects=effects)], system_prompt=PROMPT)
            results.append(agent.invoke(QUESTION) if way == "invoke" else asyncio.run(agent.ainvoke(QUESTION)))
        assert said(results[0]) == said(results[1])
        assert effects == ["tide Oslo"] * 2
        certificate = last(record)
        assert (certificate["upstream"], certificate["source"], certificate["wasted"]) == ("model", "tools", 0)
        assert record.first("append.complete") < record.first("tool.complete")
        block = lab.engines[0].block_size
        appended = record.named("append.complete")[0].data["tokens"]
        assert before_result(record) - 2 * block - 80 < appended <= before_result(record)
        assert {event.device for event in record.events} == {"fake:0"}  # where the conversation is cached

    def test_results_are_appended_in_the_order_of_the_prompt(self, lab: Lab) -> None:
        on, record, off = models(lab, BOTH)
        tools = [sleepy("tide", "First. " * 40, seconds=3 * LATER_S), sleepy("moon", "Second. " * 40, seconds=0.0)]
        results = [create_agent(model, tools, system_prompt=PROMPT).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        moon, tide = record.named("tool.complete")
        assert (moon.data["tool"], tide.data["tool"]) == ("moon", "tide")
        assert not [e for e in record.named("append.started") if moon.t < e.t < tide.t and e.data["tokens"] > 1200]
        assert last(record)["wasted"] == 0

    def test_the_first_result_is_prefilled_while_the_second_tool_runs(self, lab: Lab) -> None:
        on, record, _ = models(lab, BOTH)
        tools = [sleepy("tide", seconds=LATER_S), sleepy("moon", "New moon.", seconds=4 * LATER_S)]
        create_agent(on, tools, system_prompt=PROMPT).invoke(QUESTION)
        tide, moon = record.named("tool.complete")
        between = [e for e in record.named("append.complete") if tide.t < e.t < moon.t]
        assert between[-1].data["tokens"] > last(record)["prompt_tokens"] - 200

    def test_a_result_is_prefilled_in_small_pieces_beside_another_answer(self, lab: Lab) -> None:
        """What other answers on the device would wait for is no larger than a decode step carries along."""
        reply = tool_user(BOTH, role="Tell me of the sea")
        engine = lab.engine("fake:0", reply=reply, piece_tokens=64, decode_speed=100.0)
        model = lab.model([engine])
        record = lab.record(model)
        others: list[threading.Thread] = []

        @tool
        def tide(place: str) -> str:
            """Look something up."""
            others.append(threading.Thread(target=model.invoke, args=("Say something else.",)))
            others[0].start()
            wait_until(lambda: len(record.named("first_token")) == 2, 5.0, "answer beside the tools")
            return "Low tide. " * 200

        create_agent(model, [tide, sleepy("moon", "New.", 4 * LATER_S)], system_prompt=PROMPT).invoke(QUESTION)
        others[0].join()
        began, ended = record.named("tool.complete")[0].t, record.named("finish")[1].t
        sizes = [event.data["tokens"] for event in record.named("append.started") if began < event.t < ended]
        assert len(sizes) > 3
        assert max(after - before for before, after in pairwise(sizes)) <= 64
        assert last(record)["wasted"] == 0

    @pytest.mark.parametrize("engines", [1, 2])
    def test_a_tool_that_fails_ends_as_without_edges(self, lab: Lab, engines: int) -> None:
        @tool
        def tide(place: str) -> str:
            """Look something up."""
            raise ValueError(f"nothing known of {place}")

        on, record, off = models(lab, call("tide", place="Oslo"), engines=engines)
        results = [hand_made(model, [tide]).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert "nothing known of Oslo" in results[0]["messages"][-2].text
        assert last(record)["wasted"] == 0

    def test_nothing_is_prefilled_or_reserved_where_the_only_engine_is_down(self, lab: Lab) -> None:
        """It fails as its answer ends, and takes no more while its process is replaced."""
        model, record, _ = models(lab, call("tide", place="Oslo"), "It is low.", engines=1)
        engine = lab.engines[0]

        def fail(event: Event) -> None:
            if event.name == "finish" and len(record.named("finish")) == 1:
                engine.stopped, engine.fail_restart = True, OSError("no memory")
                model.pool.health.failed(0, EngineDead("killed"))

        model.trace.subscribe(fail)
        with pytest.raises(EngineDead):
            hand_made(model, [sleepy("tide", RESULT)]).invoke(QUESTION)
        assert record.named("edge.quiet") and not record.named("plan.failed")
        assert leases_on(model.pool) == 0
        model.pool.close()

    def test_a_first_token_is_counted_from_the_failure_of_a_tool(self, lab: Lab) -> None:
        @tool
        def tide(place: str) -> str:
            """Look something up."""
            time.sleep(LATER_S)
            raise ValueError(place)

        on, record, off = models(lab, call("tide", place="Oslo"))
        records = record, lab.record(off)
        for model, each in zip((on, off), records, strict=True):
            hand_made(model, [tide]).invoke(QUESTION)
            assert last(each)["ttft_ms"] < LATER_S * 1000

    def test_a_tool_that_is_run_again_is_heard_again(self, lab: Lab) -> None:
        tries: list[str] = []

        @tool
        def tide(place: str) -> str:
            """Look something up."""
            tries.append(place)
            time.sleep(LATER_S)
            if len(tries) % 2:
                raise ConnectionError(place)
            return RESULT

        on, record, off = models(lab, call("tide", place="Oslo"))
        retry = ToolRetryMiddleware(initial_delay=0.0)
        results = [
            create_agent(m, [tide], system_prompt=PROMPT, middleware=[retry]).invoke(QUESTION) for m in (on, off)
        ]
        assert said(results[0]) == said(results[1])
        assert [event.data["tool"] for event in record.named("tool.complete")] == ["tide"]
        assert last(record)["ttft_ms"] < LATER_S * 1000
        assert last(record)["wasted"] == 0

    def test_what_stands_before_a_result_that_is_no_text_stays_prefilled(self, lab: Lab) -> None:
        @tool
        def tide(place: str) -> dict[str, int]:
            """Look something up."""
            time.sleep(LATER_S)
            return {"hour": 4}

        def by_hand(state: MessagesState) -> dict[str, Any]:
            calls = state["messages"][-1].tool_calls
            return {"messages": [ToolMessage(str(tide.invoke(c["args"])), tool_call_id=c["id"]) for c in calls]}

        on, record, off = models(lab, call("tide", place="Oslo"))
        results = [hand_made(model, [tide], by_hand).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert (last(record)["source"], last(record)["wasted"]) == ("tools", 0)
        assert last(record)["static"] > 0

    def test_a_result_that_middleware_changes_is_answered_as_it_is_and_counted(self, lab: Lab) -> None:
        @wrap_tool_call
        def shout(request: Any, handler: Any) -> Any:
            message = handler(request)
            return ToolMessage(message.text.upper(), tool_call_id=message.tool_call_id)

        on, record, off = models(lab, call("tide", place="Oslo"))
        agents = [create_agent(m, [sleepy("tide")], system_prompt=PROMPT, middleware=[shout]) for m in (on, off)]
        results = [agent.invoke(QUESTION) for agent in agents]
        assert said(results[0]) == said(results[1])
        assert last(record)["source"] == "tools"

    def test_a_command_with_the_message_is_heard(self, lab: Lab) -> None:
        @tool
        def tide(place: str, runtime: ToolRuntime) -> Command[Any]:
            """Look something up."""
            time.sleep(LATER_S)
            return Command(update={"messages": [ToolMessage(RESULT, tool_call_id=runtime.tool_call_id)]})

        on, record, off = models(lab, call("tide", place="Oslo"))
        results = [create_agent(model, [tide], system_prompt=PROMPT).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert record.named("tool.complete")

    def test_a_result_of_text_blocks_is_appended(self, lab: Lab) -> None:
        """As tools of MCP servers return it."""

        @tool
        def tide(place: str) -> list[dict[str, Any]]:
            """Look something up."""
            time.sleep(LATER_S)
            return [{"type": "text", "text": RESULT}, {"type": "text", "text": "So it is."}]

        on, record, off = models(lab, BOTH)
        tools = [tide, sleepy("moon", "New moon.", seconds=4 * LATER_S)]
        results = [create_agent(model, tools, system_prompt=PROMPT).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert not record.named("edge.dropped")
        first, second = record.named("tool.complete")
        between = [e for e in record.named("append.complete") if first.t < e.t < second.t]
        assert between[-1].data["tokens"] > last(record)["prompt_tokens"] - 200
        assert last(record)["wasted"] == 0

    @pytest.mark.filterwarnings(
        "ignore::langchain_core._api.beta_decorator.LangChainBetaWarning"
    )  # version 3 of events
    @pytest.mark.parametrize("how", ["output_version", "events"])
    def test_messages_of_content_blocks_are_known_in_every_run(self, lab: Lab, how: str) -> None:
        on, record, off = models(lab, call("tide", place="Oslo"), call("tide", place="Lima"))
        version = "v1" if how == "output_version" else None
        models_ = [model.model_copy(update={"output_version": version}) for model in (on, off)]
        agents = [create_agent(model, [sleepy("tide")], system_prompt=PROMPT) for model in models_]

        def run(agent: Any) -> Any:
            return agent.invoke(QUESTION) if version else agent.stream_events(QUESTION, version="v3").output

        for _ in range(3):
            record.events.clear()
            assert said(run(agents[0])) == said(run(agents[1]))
            finished = [event.data["certificate"] for event in record.named("finish")]
            assert [each["source"] for each in finished] == [None, "tools", "tools"]
            assert sum(each["wasted"] for each in finished) == 0

    def test_nothing_is_prefilled_with_overlap_off(self, lab: Lab) -> None:
        _, _, off = models(lab, call("tide", place="Oslo"))
        record = lab.record(off)
        create_agent(off, [sleepy("tide")], system_prompt=PROMPT).invoke(QUESTION)
        assert not record.named("append.started")
        assert last(record)["ttft_ms"] < LATER_S * 1000  # it counts from the end of the tool, edges on or off


class TestHandMade:
    def test_a_tool_node_in_a_loop(self, lab: Lab) -> None:
        on, record, off = models(lab, call("tide", place="Oslo"), call("tide", place="Lima"))
        results = [hand_made(model, [sleepy("tide")]).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        finished = [event.data["certificate"] for event in record.named("finish")]
        assert [each["source"] for each in finished] == [None, "tools", "tools"]
        assert all(each["wasted"] == 0 for each in finished)

    def test_a_node_that_runs_tools_by_hand(self, lab: Lab) -> None:
        tide = sleepy("tide")

        def by_hand(state: MessagesState) -> dict[str, Any]:
            found = []
            for made in state["messages"][-1].tool_calls:
                found.append(ToolMessage(tide.invoke(made["args"]), tool_call_id=made["id"], name=made["name"]))
            time.sleep(LATER_S)
            return {"messages": found}

        on, record, off = models(lab, call("tide", place="Oslo"))
        results = [hand_made(model, [tide], by_hand).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert last(record)["streamed"] > len(RESULT) - 64

    def test_another_model_node_reads_the_results_from_the_second_run_on(self, lab: Lab) -> None:
        def graph(model: ChatPingPong) -> Any:
            tools = [sleepy("tide")]
            caller = model.bind_tools(tools)
            builder = StateGraph(MessagesState).add_node("tools", ToolNode(tools))
            builder.add_node("asks", lambda state: {"messages": [caller.invoke(state["messages"])]})

            def tells(state: MessagesState) -> dict[str, Any]:
                return {"messages": [model.invoke([("system", "You tell. " * 30), *state["messages"], ("human", "?")])]}

            builder.add_node("tells", tells)
            for one, two in ((START, "asks"), ("asks", "tools"), ("tools", "tells"), ("tells", END)):
                builder.add_edge(one, two)
            return builder.compile()

        on, record, off = models(lab, call("tide", place="Oslo"))
        with_edges, without = graph(on), graph(off)
        expected = said(without.invoke(QUESTION))
        assert said(with_edges.invoke(QUESTION)) == expected
        assert record.certificate("tells")["source"] is None
        assert said(with_edges.invoke(QUESTION)) == expected
        certificate = last(record, "tells")
        assert (certificate["source"], certificate["wasted"]) == ("tools", 0)
        assert certificate["static"] > before_result(record) - 100

    def test_a_handoff_is_learned_by_the_tools_that_were_called(self, lab: Lab) -> None:
        @tool
        def hand_over(place: str, runtime: ToolRuntime) -> Command[Any]:
            """Let the critic go on."""
            done = ToolMessage(f"over, from {place}", tool_call_id=runtime.tool_call_id)
            return Command(goto="critic", graph=Command.PARENT, update={"messages": [*runtime.state["messages"], done]})

        on, record, _ = models(lab, call("hand_over", place="Oslo"))
        builder = StateGraph(MessagesState)
        builder.add_node("agent", create_agent(on, [hand_over], system_prompt=PROMPT))
        builder.add_node("critic", lambda state: {"messages": [on.invoke([("system", "Judge."), *state["messages"]])]})
        graph = builder.add_edge(START, "agent").compile()
        first, second = graph.invoke(QUESTION), graph.invoke(QUESTION)
        assert said(first) == said(second)
        assert record.named("edge.dropped", "model")[0].data["reason"] == "run ended"  # it was taken for a loop once
        assert len(record.named("edge.dropped", "model")) == 1
        assert last(record, "critic")["source"] == "tools"


def in_pieces(effects: list[str]) -> Any:
    """A tool that yields its result."""

    @tool
    @streaming_tool
    def tide(place: str) -> Iterator[str]:
        """Look something up."""
        effects.append(place)
        for number in range(10):
            time.sleep(LATER_S / 5)
            yield f"At {number} the water stands {number} feet high. "

    return tide


class TestPieces:
    def test_a_streaming_tool_is_appended_as_it_yields(self, lab: Lab) -> None:
        effects: list[str] = []
        on, record, off = models(lab, call("tide", place="Oslo"))
        tide = in_pieces(effects)
        results = [create_agent(model, [tide], system_prompt=PROMPT).invoke(QUESTION) for model in (on, off)]
        assert said(results[0]) == said(results[1])
        assert effects == ["Oslo"] * 2
        assert tide.args == {"place": {"title": "Place", "type": "string"}}
        grown = [e for e in record.named("append.complete") if e.t < record.named("tool.complete")[0].t]
        assert len({event.data["tokens"] for event in grown}) > 4
        assert last(record)["wasted"] == 0

    def test_an_async_streaming_tool(self, lab: Lab) -> None:
        @tool
        @streaming_tool
        async def tide(place: str) -> AsyncIterator[str]:
            """Look something up."""
            for _ in range(5):
                await asyncio.sleep(LATER_S / 3)
                yield "The water falls and falls. "

        on, record, off = models(lab, call("tide", place="Oslo"))
        agents = [create_agent(model, [tide], system_prompt=PROMPT) for model in (on, off)]
        results = [asyncio.run(agent.ainvoke(QUESTION)) for agent in agents]
        assert said(results[0]) == said(results[1])
        assert len(record.named("append.complete")) > 3

    @pytest.mark.parametrize("how", ["writer", "delta"])
    def test_what_a_tool_writes_counts_once_its_results_began_so(self, lab: Lab, how: str) -> None:
        @tool(f"tide_{how}")
        def tide(place: str, runtime: ToolRuntime) -> str:
            """Look something up."""
            write = get_stream_writer() if how == "writer" else runtime.emit_output_delta
            pieces = [f"At {number} it is {number} feet. " for number in range(8)]
            for piece in pieces:
                time.sleep(LATER_S / 4)
                write(piece)
            return "".join(pieces)

        mode = "custom" if how == "writer" else "tools"
        on, record, off = models(lab, call(f"tide_{how}", place="Oslo"))
        agents = [create_agent(model, [tide], system_prompt=PROMPT) for model in (on, off)]
        seen = []
        for agent in (agents[0], agents[0], agents[1]):
            chunks = list(agent.stream(QUESTION, stream_mode=["values", mode]))
            written = [chunk for kind, chunk in chunks if kind == mode]
            if how == "delta":
                written = [chunk["delta"] for chunk in written if chunk["event"] == "tool-output-delta"]
            seen.append((said(chunks[-1][1] if chunks[-1][0] == "values" else {}), written))
        assert seen[0] == seen[1] == seen[2]
        first, second = record.named("tool.complete")
        appends, times = record.named("append.complete"), ((0, first.t), (first.t, second.t))
        early = [[event for event in appends if after < event.t < before] for after, before in times]
        assert len(early[0]) <= 1
        assert len(early[1]) > 4
        assert last(record)["wasted"] == 0

    def test_what_else_a_tool_writes_is_never_taken_for_its_result(self, lab: Lab) -> None:
        @tool
        def chatty(place: str) -> str:
            """Look something up."""
            write = get_stream_writer()
            for number in range(5):
                write(f"{number} done")
            write({"progress": 1.0})
            return RESULT

        on, record, _ = models(lab, call("chatty", place="Oslo"))
        agent = create_agent(on, [chatty], system_prompt=PROMPT)
        for _ in range(3):
            agent.invoke(QUESTION)
            assert last(record)["wasted"] == 0

    def test_a_tool_that_returns_something_else_than_it_said_is_told_of(self) -> None:
        told: list[Any] = []
        waiting = tool_results.Waiting("1", "fickle", {}, lambda *what: told.append(what))
        waiting.piece("High")
        waiting.returned("Low")
        assert told == [("1", "High", False), ("1", None, True)]

    def test_only_functions_that_yield_can_stream(self) -> None:
        with pytest.raises(ConfigError, match="yields texts"):
            streaming_tool(len)


class TestEnds:
    def nothing_waits(self, lab: Lab) -> None:
        wait_until(lambda: not tool_results._WAITING, 3.0, "end of waiting")
        wait_until(lambda: all(not e.num_unfinished for e in lab.engines), 3.0, "idle engines")

    def test_nothing_waits_after_a_run(self, lab: Lab) -> None:
        on, _, _ = models(lab, call("tide", place="Oslo"))
        create_agent(on, [sleepy("tide")], system_prompt=PROMPT).invoke(QUESTION)
        self.nothing_waits(lab)
        assert on.pool is not None
        wait_until(lambda: repr(on.pool).count("=0") == 2, 3.0, "leases given back")

    def test_a_run_that_is_interrupted_in_a_tool(self, lab: Lab) -> None:
        @tool
        def tide(place: str) -> str:
            """Look something up."""
            return f"{place}: {interrupt('really?')}"

        on, record, off = models(lab, call("tide", place="Oslo"))
        results = []
        for model in (on, off):
            agent = create_agent(model, [tide], system_prompt=PROMPT, checkpointer=InMemorySaver())
            config: Any = {"configurable": {"thread_id": "1"}}
            agent.invoke(QUESTION, config)
            self.nothing_waits(lab)
            results.append(agent.invoke(Command(resume="yes"), config))
        assert said(results[0]) == said(results[1])
        assert record.named("edge.dropped", "model")[0].data["reason"] == "run ended"

    def test_a_run_that_is_cancelled_in_a_tool(self, lab: Lab) -> None:
        begun = threading.Event()

        @tool
        async def tide(place: str) -> str:
            """Look something up."""
            begun.set()
            await asyncio.sleep(30)
            return place

        on, _, _ = models(lab, call("tide", place="Oslo"))
        agent = create_agent(on, [tide], system_prompt=PROMPT)

        async def cancelled() -> None:
            task = asyncio.create_task(agent.ainvoke(QUESTION))
            await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        self.nothing_waits(lab)

    def test_a_run_that_is_cancelled_before_its_answer_calls_a_tool(self, lab: Lab) -> None:
        """The node is synchronous: it cannot be interrupted, and its answer comes all the same."""
        on, record, _ = models(lab, call("tide", place="Oslo"))
        graph = hand_made(on, [sleepy("tide")])

        async def cancelled() -> None:
            task = asyncio.create_task(graph.ainvoke(QUESTION))
            await asyncio.to_thread(record.wait_for, "generate.started")
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(cancelled())
        assert record.named("finish")
        self.nothing_waits(lab)

    def test_many_runs_at_once_hear_their_own_tools(self, lab: Lab) -> None:
        @tool
        def tide(place: str, runtime: ToolRuntime) -> str:
            """Look something up."""
            time.sleep(LATER_S)
            return f"Of {runtime.state['messages'][0].text}: " + RESULT

        on, record, off = models(lab, call("tide", place="Oslo"))

        async def run(model: ChatPingPong) -> list[Any]:
            agent = create_agent(model, [tide], system_prompt=PROMPT)
            asked = [{"messages": [HumanMessage(f"Tell me of the sea {n}.")]} for n in range(8)]
            return [said(result) for result in await asyncio.gather(*map(agent.ainvoke, asked))]

        assert asyncio.run(run(on)) == asyncio.run(run(off))
        certificates = [event.data["certificate"] for event in record.named("finish")]
        assert sum(each["wasted"] for each in certificates) == 0
        assert all(each["ids_equal"] for each in certificates)
