"""Where prompts are foreseen from: declared nodes, dry runs, learned edges; on modelled engines."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_store
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node, streaming_edges
from langgraph_pingpong.edges.book import _walk
from langgraph_pingpong.edges.tool_results import listen
from langgraph_pingpong.errors import ConfigError
from tests.attentive import attentive
from tests.conftest import wait_until
from tests.growing_prompts import is_probe

RULES = "Say it in short words and leave nothing out. " * 6


class State(TypedDict, total=False):
    task: str
    plan: str
    report: str
    a: str
    b: str
    c: str
    drafts: Annotated[list[str], operator.add]


@pytest.fixture
def model() -> Iterator[ChatPingPong]:
    """Two modelled engines that end no answer before plans are made and appends are through."""
    with ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=160) as model:
        yield attentive(model)


def run(model: ChatPingPong, graph: Any, given: Any, config: Any = None) -> tuple[Any, dict[str, dict[str, Any]]]:
    """A cold run; returns its result and the certificates by node, the last of each."""
    model.reset_prefix_cache()
    certificates: dict[str, dict[str, Any]] = {}

    def note(event: Any) -> None:
        if event.name == "finish":
            certificates[event.node] = event.data["certificate"]

    with model.trace.subscribed(note):
        result = graph.invoke(given, config)
    assert all(certificate["ids_equal"] for certificate in certificates.values())
    return result, certificates


def wasted_by_run(model: ChatPingPong, graph: Any, given: Any) -> int:
    """Tokens that a cold run prefilled for nothing, those for calls that never came included."""
    wasted: list[int] = []

    def note(event: Any) -> None:
        if event.name in ("finalize", "edge.dropped"):
            wasted.append(event.data["wasted"])

    with model.trace.subscribed(note):
        run(model, graph, given)
        wait_until(
            lambda: not any(session._edges for session in model._serving().pool.runs.values()), 5, "end of edges"
        )
    return sum(wasted)


def ask(model: Runnable[Any, AIMessage], system: str, human: str) -> str:
    return model.invoke([SystemMessage(f"{system} {RULES}"), HumanMessage(human)]).text


def chain(model: ChatPingPong, writer: Callable[[State], Any] | None = None, **compile_args: Any) -> Any:
    """planner -> writer, both ordinary functions."""

    def planner(state: State) -> Any:
        return {"plan": ask(model, "You plan.", state["task"])}

    def write(state: State) -> Any:
        return {"report": ask(model, "You write.", f"Task: {state['task']}\nPlan:\n{state['plan']}\nGo.")}

    builder = StateGraph(State)
    builder.add_node("planner", planner)
    builder.add_node("writer", writer or write)
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "writer")
    builder.add_edge("writer", END)
    return builder.compile(**compile_args)


def given(number: int) -> State:
    return {"task": f"Describe tide pool number {number} to a child."}


def prefilled(certificate: dict[str, Any]) -> float:
    """The share of the prompt that was prefilled before the node's turn."""
    return float((certificate["static"] + certificate["streamed"]) / certificate["prompt_tokens"])


class TestLearned:
    def test_streams_from_the_second_run_on(self, model: ChatPingPong) -> None:
        graph = chain(model)
        seen = [run(model, graph, given(number))[1]["writer"] for number in range(4)]
        assert [c["source"] for c in seen] == [None, "learned", "learned", "learned"]
        assert seen[0]["appends"] == 0
        assert all(prefilled(c) > 0.85 and c["wasted"] == 0 for c in seen[1:])
        assert all(c["static"] > len(RULES) and c["streamed"] > 100 for c in seen[1:])

    def test_values_of_the_state_are_not_asked_for_what_they_hold(self, model: ChatPingPong) -> None:
        """An object that loads itself when it is first looked at is loaded by the nodes alone."""
        asked: list[str] = []

        class Late(dict[str, Any]):
            @property
            def __class__(self) -> Any:
                asked.append("class")
                return Late

            def items(self) -> Any:
                asked.append("items")
                return super().items()

            def __iter__(self) -> Any:
                asked.append("iter")
                return super().__iter__()

        run(model, chain(model), {**given(1), "a": Late(text="It is there."), "drafts": []})
        assert asked == []

    def test_a_state_full_of_numbers_is_not_gone_through(self, model: ChatPingPong) -> None:
        table: Any = [[0.5] * 1000 for _ in range(1000)]
        took = []
        for _ in range(3):  # at any time garbage may be collected
            started = time.process_time()
            found = list(_walk("state", {"a": table, "task": "It is there."}))
            took.append(time.process_time() - started)
            assert found == [(("state", "task"), "It is there.")]
        assert min(took) < 0.5

    def test_an_answer_in_one_piece_is_learned_from(self, model: ChatPingPong) -> None:
        for engine in model._serving().pool.engines:
            engine.reply = lambda prompt: "y" if "You judge" in prompt else "The pools fill twice a day. " * 5  # type: ignore[attr-defined]
        times = iter(range(100))

        def judge(state: State) -> Any:
            return {"report": ask(model, "You judge.", f"At {next(times)}: {state['plan']}\nAnswer y or n.")}

        graph = chain(model, judge)
        seen = [run(model, graph, given(number))[1]["writer"] for number in range(5)]
        assert [certificate["source"] for certificate in seen] == [None, "learned", "learned", "learned", "learned"]
        assert all(certificate["static"] > len(RULES) for certificate in seen[1:])
        assert [certificate["wasted"] for certificate in seen[2:]] == [0, 0, 0]

    def test_nothing_is_kept_of_a_run_that_is_over(self, model: ChatPingPong) -> None:
        graph = chain(model)
        for number in range(3):
            run(model, graph, given(number))
        planner = model._serving().pool.planner
        wait_until(lambda: not planner._books, 5, "end of runs")

    def test_result_is_that_of_the_plain_graph(self, model: ChatPingPong) -> None:
        plain = chain(model.model_copy(update={"overlap": "off"}))
        graph = chain(model)
        for number in range(3):
            assert run(model, graph, given(number))[0] == plain.invoke(given(number))

    def test_second_observation_withdraws_what_was_chance(self, model: ChatPingPong) -> None:
        stamps = iter(range(1000, 9999, 7))

        def writer(state: State) -> Any:
            return {"report": ask(model, "You write.", f"Stamp {next(stamps)}. Plan: {state['plan']}")}

        graph = chain(model, writer)
        seen = [run(model, graph, given(number))[1]["writer"] for number in range(3)]
        assert seen[1]["wasted"] > 100  # one observation cannot tell a stamp from a literal
        assert seen[2]["wasted"] == 0
        assert seen[2]["static"] > len(RULES)
        assert seen[2]["streamed"] == 0

    @pytest.mark.parametrize("use", [str.upper, lambda text: text.split()[0], repr])
    def test_text_that_is_not_used_as_it_is_is_not_streamed(
        self, model: ChatPingPong, use: Callable[[str], str]
    ) -> None:
        def writer(state: State) -> Any:
            return {"report": ask(model, "You write.", f"About: {use(state['plan'])}. Go.")}

        graph = chain(model, writer)
        third = [run(model, graph, given(number))[1]["writer"] for number in range(3)][2]
        assert third["wasted"] == 0
        assert third["static"] > len(RULES)

    def test_message_lists_of_any_length(self, model: ChatPingPong) -> None:
        def speaker(name: str) -> Callable[[MessagesState], Any]:
            return lambda state: {
                "messages": [model.invoke([SystemMessage(f"You are {name}. {RULES}"), *state["messages"]])]
            }

        builder = StateGraph(MessagesState)
        builder.add_node("first", speaker("first"))
        builder.add_node("second", speaker("second"))
        builder.add_edge(START, "first")
        builder.add_edge("first", "second")
        builder.add_edge("second", END)
        graph = builder.compile()
        for turns in range(3):
            messages = [("user", f"Question number {turns}, please."), ("ai", "An earlier answer.")] * turns
            _, seen = run(model, graph, {"messages": [*messages, ("user", f"And now question {turns}.")]})
            if turns:
                assert seen["second"]["source"] == "learned"
                assert prefilled(seen["second"]) > 0.85
                assert seen["second"]["wasted"] == 0

    def test_several_calls_in_one_node(self, model: ChatPingPong) -> None:
        def thinker(state: State) -> Any:
            draft = ask(model, "Draft it.", state["task"])
            return {"plan": ask(model, "Mend it.", f"The draft was:\n{draft}\nMend it.")}

        builder = StateGraph(State)
        builder.add_node("thinker", thinker)
        builder.add_edge(START, "thinker")
        builder.add_edge("thinker", END)
        graph = builder.compile()
        run(model, graph, given(1))
        _, seen = run(model, graph, given(2))
        assert (seen["thinker"]["source"], seen["thinker"]["upstream"]) == ("learned", "thinker")
        assert prefilled(seen["thinker"]) > 0.85

    def test_a_formatter_between_two_agents(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node("planner", lambda s: {"plan": ask(model, "You plan.", s["task"])})
        builder.add_node("format", lambda s: {"report": f"=== PLAN ===\n{s['plan']}\n=== END ==="})
        builder.add_node("writer", lambda s: {"report": ask(model, "You write.", s["report"])})
        for edge in ((START, "planner"), ("planner", "format"), ("format", "writer"), ("writer", END)):
            builder.add_edge(*edge)
        graph = builder.compile()
        run(model, graph, given(1))
        _, seen = run(model, graph, given(2))
        assert seen["writer"]["source"] == "learned"
        assert prefilled(seen["writer"]) > 0.85

    def test_a_fan_in_streams_its_upstreams_in_prompt_order(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        for engine in model._serving().pool.engines:
            engine.time_scale = 0.03  # type: ignore[attr-defined]
        for name, tokens in zip("abc", (40, 100, 160), strict=True):  # each is appended while the next one speaks
            speaker = model.bind(max_tokens=tokens)
            builder.add_node(f"say_{name}", lambda s, n=name, m=speaker: {n: ask(m, f"You are {n}.", s["task"])})
            builder.add_edge(START, f"say_{name}")
        builder.add_node(
            "join", lambda s: {"report": model.invoke(f"{RULES}\nA: {s['a']}\nB: {s['b']}\nC: {s['c']}\nJoin.").text}
        )
        builder.add_edge(["say_a", "say_b", "say_c"], "join")
        builder.add_edge("join", END)
        graph = builder.compile()
        seen = [run(model, graph, given(number))[1]["join"] for number in range(4)]
        assert all(c["source"] == "learned" and c["wasted"] == 0 for c in seen[1:])
        assert max(prefilled(c) for c in seen[1:]) > 0.8

    def test_a_fan_out_by_send_prefills_every_worker(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node("planner", lambda s: {"plan": ask(model, "You plan.", s["task"])})
        builder.add_node("worker", lambda s: {"drafts": [ask(model, "You work.", f"{s['plan']}\nPart {s['part']}.")]})
        builder.add_edge(START, "planner")
        builder.add_conditional_edges(
            "planner", lambda s: [Send("worker", {"plan": s["plan"], "part": n}) for n in range(3)], ["worker"]
        )
        graph = builder.compile()
        run(model, graph, given(1))
        finished: list[dict[str, Any]] = []
        with model.trace.subscribed(
            lambda e: finished.append(e.data["certificate"]) if e.name == "finish" and e.node == "worker" else None
        ):
            run(model, graph, given(2))
        assert len(finished) == 3
        assert all(c["source"] == "learned" and prefilled(c) > 0.8 and c["wasted"] == 0 for c in finished)

    def test_a_router_prefills_only_what_is_certain(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node("planner", lambda s: {"plan": ask(model, "You plan.", s["task"])})
        builder.add_node("poet", lambda s: {"report": ask(model, "You write poems.", s["plan"])})
        builder.add_node("lawyer", lambda s: {"report": ask(model, "You write laws.", s["plan"])})
        builder.add_edge(START, "planner")
        builder.add_conditional_edges("planner", lambda s: s["task"].split()[-1], ["poet", "lawyer"])
        graph = builder.compile()
        for target in ("poet", "lawyer"):
            run(model, graph, {"task": f"Ask for the {target}"})
        _, seen = run(model, graph, {"task": "Ask for the poet"})
        assert seen["poet"]["source"] == "learned"
        assert (seen["poet"]["streamed"], seen["poet"]["wasted"]) == (0, 0)
        assert seen["poet"]["static"] > len(RULES)

    def test_a_loop_between_two_agents(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node("writer", lambda s: {"plan": ask(model, "You write.", f"{s['task']} {s.get('report', '')}")})
        builder.add_node(
            "critic",
            lambda s: {"report": ask(model, "You judge.", s["plan"]), "drafts": ["x"]},
        )
        builder.add_edge(START, "writer")
        builder.add_edge("writer", "critic")
        builder.add_conditional_edges("critic", lambda s: END if len(s["drafts"]) > 2 else "writer", ["writer", END])
        graph = builder.compile()
        _, seen = run(model, graph, given(1))
        assert seen["critic"]["source"] == "learned"  # within the first run, from the second round on
        assert seen["critic"]["wasted"] == 0

    def test_the_end_of_a_loop_is_learned(self, model: ChatPingPong) -> None:
        """Rounds are told apart: those that come are streamed, and after the last nothing is prefilled."""
        builder = StateGraph(State)
        builder.add_node("writer", lambda s: {"plan": ask(model, "You write.", f"{s['task']} {s.get('report', '')}")})
        builder.add_node("critic", lambda s: {"report": ask(model, "You judge.", s["plan"]), "drafts": ["x"]})
        builder.add_edge(START, "writer")
        builder.add_edge("writer", "critic")
        builder.add_conditional_edges("critic", lambda s: END if len(s["drafts"]) > 3 else "writer", ["writer", END])
        graph = builder.compile()
        seen = [wasted_by_run(model, graph, given(number)) for number in range(4)]
        assert seen[0] > len(RULES)  # the fourth round was followed by none: that could not be known
        assert seen[1:] == [0, 0, 0]
        _, certificates = run(model, graph, given(5))
        assert min(prefilled(certificates[node]) for node in ("writer", "critic")) > 0.85

    def test_calls_that_come_no_more_are_forgotten(self, model: ChatPingPong) -> None:
        def thinker(state: State) -> Any:
            text = state["task"]
            for number in range(state.get("a") or 1):
                text = ask(model, f"{number} times was it mended: do so again.", text)
            return {"plan": text}

        builder = StateGraph(State)
        builder.add_node("thinker", thinker)
        builder.add_edge(START, "thinker")
        graph = builder.compile()
        run(model, graph, {**given(0), "a": 5})
        seen = [wasted_by_run(model, graph, given(number)) for number in range(1, 5)]
        assert seen[0] > seen[1] > seen[2] == seen[3] == 0

    def test_functional_api(self, model: ChatPingPong) -> None:
        @task
        def plan(text: str) -> str:
            return ask(model, "You plan.", text)

        @task
        def write(text: str) -> str:
            return ask(model, "You write.", f"Plan: {text}")

        @entrypoint()
        def flow(text: str) -> str:
            return write(plan(text).result()).result()

        run(model, flow, "Describe pool one.")
        _, seen = run(model, flow, "Describe pool two.")
        assert seen["write"]["source"] == "learned"
        assert prefilled(seen["write"]) > 0.85

    def test_subgraphs(self, model: ChatPingPong) -> None:
        inner = chain(model)
        builder = StateGraph(State)
        builder.add_node("inner", inner)
        builder.add_node("judge", lambda s: {"a": ask(model, "You judge.", s["report"])})
        builder.add_edge(START, "inner")
        builder.add_edge("inner", "judge")
        builder.add_edge("judge", END)
        graph = builder.compile()
        run(model, graph, given(1))
        _, seen = run(model, graph, given(2))
        assert {seen[node]["source"] for node in ("writer", "judge")} == {"learned"}
        assert prefilled(seen["writer"]) > 0.8 and prefilled(seen["judge"]) > 0.8

    def test_tenants_do_not_learn_from_each_other(self, model: ChatPingPong) -> None:
        graph = chain(model)
        run(model, graph, given(1), {"configurable": {"tenant": "one"}})
        _, other = run(model, graph, given(2), {"configurable": {"tenant": "two"}})
        assert other["writer"]["source"] is None
        _, same = run(model, graph, given(3), {"configurable": {"tenant": "one"}})
        assert same["writer"]["source"] == "learned"

    def test_a_tenant_may_be_anything(self, model: ChatPingPong) -> None:
        graph = chain(model)
        for number in range(2):
            _, seen = run(model, graph, given(number), {"configurable": {"tenant": {"id": 1}}})
        assert seen["writer"]["source"] == "learned"
        _, other = run(model, graph, given(2), {"configurable": {"tenant": {"id": 2}}})
        assert other["writer"]["source"] is None

    def test_tenants_share_no_cached_prefix(self, model: ChatPingPong) -> None:
        graph = chain(model)
        for tenant in ("one", "one", "two", None):
            run(model, graph, given(1), {"configurable": {"tenant": tenant}})
        engines: Any = model._serving().pool.engines
        requests = [request for engine in engines for request in engine.requests]
        prefills = [request for engine in engines for request in engine.prefills]
        salts = {request.cache_salt for request in requests}
        assert len(salts) == 3 and None in salts
        assert not any("one" in salt or "two" in salt for salt in salts if salt)
        assert {request.cache_salt for request in prefills} == {requests[0].cache_salt}  # only "one" had a second run
        _, again = run(model, graph, given(1), {"configurable": {"tenant": "two"}})
        assert again["writer"]["cached"] > 0.8 * again["writer"]["prompt_tokens"]  # what its edge prefilled is found

    def test_graphs_do_not_learn_from_each_other(self, model: ChatPingPong) -> None:
        run(model, chain(model), given(1))
        _, seen = run(model, chain(model), given(2))
        assert seen["writer"]["source"] is None

    def test_calls_at_the_same_time_in_one_node_stay_plain(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node(
            "many", lambda s: {"drafts": [m.text for m in model.batch([f"{s['task']} {n}" for n in "abc"])]}
        )
        builder.add_node("writer", lambda s: {"report": ask(model, "You write.", s["drafts"][0])})
        for edge in ((START, "many"), ("many", "writer"), ("writer", END)):
            builder.add_edge(*edge)
        graph = builder.compile()
        for number in range(2):
            _, seen = run(model, graph, given(number))
            assert seen["writer"]["source"] is None

    def test_user_functions_run_once(self, model: ChatPingPong) -> None:
        calls: list[str] = []

        def writer(state: State) -> Any:
            calls.append("writer")
            return {"report": ask(model, "You write.", state["plan"])}

        graph = chain(model, writer)
        for number in range(3):
            run(model, graph, given(number))
        assert calls == ["writer"] * 3


def forbidden_acts(happened: list[str]) -> dict[str, Callable[[State], Any]]:
    """What a rehearsed node may try before its model call, each noting when it really happens."""

    @tool
    def ring(text: str) -> str:
        """Ring a bell."""
        happened.append(text)
        return text

    class Foreign(FakeListChatModel):
        def _call(self, *args: Any, **kwargs: Any) -> str:
            happened.append("foreign")
            return super()._call(*args, **kwargs)

    def raises(state: State) -> None:
        if is_probe(state["plan"]):
            raise RuntimeError("made up")

    return {
        "model": lambda state: Foreign(responses=["x"]).invoke("hello"),
        "tool": lambda state: ring.invoke({"text": "ding"}),
        "store": lambda state: get_store().put(("notes",), "note", {"text": "x"}),
        "interrupt": lambda state: interrupt("really?"),
        "raises": raises,
    }


class TestDryRun:
    def test_streams_from_the_first_run_on(self, model: ChatPingPong) -> None:
        _, seen = run(model, streaming_edges(chain(model), dry_run=True), given(1))
        assert seen["writer"]["source"] == "dry run"
        assert prefilled(seen["writer"]) > 0.85
        assert seen["writer"]["wasted"] == 0

    def test_async_nodes(self, model: ChatPingPong) -> None:
        async def planner(state: State) -> Any:
            return {"plan": (await model.ainvoke([SystemMessage(RULES), HumanMessage(state["task"])])).text}

        async def writer(state: State) -> Any:
            return {"report": (await model.ainvoke(f"{RULES}\n{state['plan']}")).text}

        builder = StateGraph(State)
        builder.add_node("planner", planner)
        builder.add_node("writer", writer)
        for edge in ((START, "planner"), ("planner", "writer"), ("writer", END)):
            builder.add_edge(*edge)
        graph = streaming_edges(builder.compile(), dry_run=True)

        class Once:
            def invoke(self, given: Any, config: Any) -> Any:
                import asyncio

                return asyncio.run(graph.ainvoke(given, config))

        _, seen = run(model, Once(), given(1))
        assert seen["writer"]["source"] == "dry run"
        assert prefilled(seen["writer"]) > 0.8

    def test_reducers_and_several_calls_are_honoured(self, model: ChatPingPong) -> None:
        def planner(state: State) -> Any:
            first = ask(model, "One.", state["task"])
            return {"drafts": [first, ask(model, "Two.", first)]}

        builder = StateGraph(State)
        builder.add_node("planner", planner)
        builder.add_node("writer", lambda s: {"report": model.invoke(f"{RULES}\n" + "\n--\n".join(s["drafts"])).text})
        for edge in ((START, "planner"), ("planner", "writer"), ("writer", END)):
            builder.add_edge(*edge)
        graph = streaming_edges(builder.compile(), dry_run=True)
        _, seen = run(model, graph, {**given(1), "drafts": ["An earlier draft."]})
        assert seen["planner"]["source"] == seen["writer"]["source"] == "dry run"
        assert prefilled(seen["writer"]) > 0.85

    def test_command_decides_where_to_go(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node(
            "planner", lambda s: Command(goto="writer", update={"plan": ask(model, "You plan.", s["task"])})
        )
        builder.add_node("writer", lambda s: {"report": ask(model, "You write.", s["plan"])})
        builder.add_edge(START, "planner")
        graph = streaming_edges(builder.compile(), dry_run=True)
        _, seen = run(model, graph, given(1))
        assert seen["writer"]["source"] == "dry run"
        assert prefilled(seen["writer"]) > 0.85

    @pytest.mark.parametrize("named", [{"planner"}, {"writer"}])
    def test_an_edge_needs_both_of_its_nodes(self, model: ChatPingPong, named: set[str]) -> None:
        _, seen = run(model, streaming_edges(chain(model), dry_run=named), given(1))
        assert seen["writer"]["source"] is None

    def test_only_the_named_nodes_are_rehearsed(self, model: ChatPingPong) -> None:
        calls: list[str] = []

        def writer(state: State) -> Any:
            calls.append(state["plan"])
            return {"report": ask(model, "You write.", state["plan"])}

        run(model, streaming_edges(chain(model, writer), dry_run={"planner"}), given(1))
        assert len(calls) == 1

    @pytest.mark.parametrize("forbidden", ["model", "tool", "store", "interrupt", "raises"])
    def test_nothing_else_happens_in_a_rehearsal(self, model: ChatPingPong, forbidden: str) -> None:
        happened: list[str] = []
        store = InMemoryStore()
        act = forbidden_acts(happened)[forbidden]

        def writer(state: State) -> Any:
            act(state)
            return {"report": ask(model, "You write.", state["plan"])}

        compiled = chain(model, writer, store=store, checkpointer=InMemorySaver())
        graph = streaming_edges(compiled, dry_run={"planner", "writer"})
        config: Any = {"configurable": {"thread_id": forbidden}}
        result, seen = run(model, graph, given(1), config)
        if forbidden == "interrupt":
            result, seen = run(model, graph, Command(resume="yes"), config)
        assert result["report"]
        assert seen["writer"]["source"] is None
        assert len(happened) == (forbidden in ("model", "tool"))
        assert len(store.search(("notes",))) == (forbidden == "store")

    @pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    def test_a_call_by_the_third_events_asks_no_engine_in_a_rehearsal(
        self, model: ChatPingPong, asynchronous: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They go past the public methods, where a rehearsal is answered; its guard stops them before that."""
        listen(object(), [], lambda *_: None)()  # from now on every run in this process has a handler of tools
        model = model.model_copy(update={"speculate": False})

        def prompt(state: State) -> Any:
            return [("system", "You write."), ("human", state["plan"])]

        def writer(state: State) -> Any:
            return {"report": "".join(model.stream_events(prompt(state), version="v3").text)}

        async def awriter(state: State) -> Any:
            return {"report": (await (await model.astream_events(prompt(state), version="v3"))).text}

        graph = chain(model, awriter if asynchronous else writer)
        graph = streaming_edges(graph, dry_run={"planner", "writer"})
        for number in range(2):
            result = asyncio.run(graph.ainvoke(given(number)))
            assert len(result["report"]) == 160
        assert sum(len(engine.requests) for engine in model._serving().pool.engines) == 4  # type: ignore[attr-defined]
        assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []

    def test_a_node_that_sleeps_does_not_hold_anyone_up(self) -> None:
        slept: list[float] = []

        def writer(state: State) -> Any:
            if not slept:
                slept.append(time.monotonic())
                time.sleep(3)
            return {"report": ask(model, "You write.", state["plan"])}

        with ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=160) as model:
            graph = streaming_edges(chain(model, writer), dry_run={"planner", "writer"})
            started = time.monotonic()
            run(model, graph, given(1))
            assert time.monotonic() - started < 2
            assert slept


class TestOptions:
    def test_off_keeps_a_node_plain(self, model: ChatPingPong) -> None:
        graph = streaming_edges(chain(model), off={"writer"})
        for number in range(3):
            _, seen = run(model, graph, given(number))
            assert seen["writer"]["appends"] == 0

    def test_declared_comes_before_learned(self, model: ChatPingPong) -> None:
        builder = StateGraph(State)
        builder.add_node("planner", agent_node(model, prompt=lambda s: f"{RULES} {s['task']}", writes="plan"))
        builder.add_node("writer", agent_node(model, prompt=lambda s: f"{RULES} {s['plan']}", writes="report"))
        for edge in ((START, "planner"), ("planner", "writer"), ("writer", END)):
            builder.add_edge(*edge)
        graph = builder.compile()
        for number in range(2):
            assert run(model, graph, given(number))[1]["writer"]["source"] == "declared"

    def test_returns_the_same_graph_unchanged(self, model: ChatPingPong) -> None:
        graph = chain(model)
        before = graph.get_graph().draw_mermaid(), dict(graph.config or {})
        assert streaming_edges(graph, dry_run=True, off=["planner"]) is graph
        assert (graph.get_graph().draw_mermaid(), dict(graph.config or {})) == before

    def test_survives_with_config_and_use_as_a_subgraph(self, model: ChatPingPong) -> None:
        inner = streaming_edges(chain(model), off={"writer"}).with_config(tags=["x"])
        builder = StateGraph(State)
        builder.add_node("inner", inner)
        builder.add_edge(START, "inner")
        graph = builder.compile()
        for number in range(2):
            _, seen = run(model, graph, given(number))
        assert seen["writer"]["appends"] == 0

    @pytest.mark.parametrize(
        ("target", "options", "message"),
        [
            ("graph", {"dry_run": {"nobody"}}, "no node 'nobody'"),
            ("graph", {"off": "nobody"}, "no node 'nobody'"),
            ("builder", {}, "compile"),
        ],
    )
    def test_bad_input_is_refused(
        self, model: ChatPingPong, target: str, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            streaming_edges(chain(model) if target == "graph" else StateGraph(State), **options)


class TestManyAtOnce:
    """More calls than are remembered of a run, and calls of one task that cannot be told apart."""

    @pytest.mark.parametrize("overlap", ["on", "off"])
    def test_a_wide_fan_out_is_answered(self, model: ChatPingPong, overlap: str) -> None:
        switched = model.model_copy(update={"overlap": overlap})
        builder = StateGraph(State)
        builder.add_node("worker", lambda s: {"drafts": [ask(switched, "You work.", f"Part {s['part']}.")]})
        builder.add_conditional_edges(START, lambda s: [Send("worker", {"part": n}) for n in range(40)], ["worker"])
        graph = builder.compile()
        for _ in range(2):
            drafts = graph.invoke(given(1), {"max_concurrency": 40})["drafts"]
            assert len(drafts) == len(set(drafts)) == 40

    @pytest.mark.parametrize("overlap", ["on", "off"])
    def test_a_call_that_ends_early_leaves_those_beside_it_alone(self, model: ChatPingPong, overlap: str) -> None:
        switched = model.model_copy(update={"overlap": overlap})

        def many(state: State) -> Any:
            slow = switched.stream("Say something long.")
            said = next(slow).text
            for _ in switched.stream("Say something else."):
                break
            return {"plan": said + "".join(chunk.text for chunk in slow)}

        builder = StateGraph(State)
        builder.add_node("many", many)
        builder.add_edge(START, "many")
        assert builder.compile().invoke(given(1))["plan"] == switched.invoke("Say something long.").text
