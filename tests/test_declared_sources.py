"""Prompts that are foreseen in a graph's first run without a word from the user, on modelled engines."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node, streaming_edges
from langgraph_pingpong.edges.sequences import model_sequence
from tests.growing_prompts import is_probe
from tests.test_prompt_sources import RULES, given, prefilled, run


class State(TypedDict, total=False):
    task: str
    plan: Any
    report: Any
    notes: str


@pytest.fixture
def model() -> Iterator[ChatPingPong]:
    """Two modelled engines whose answers take about 50 ms, so that plans and appends have time to happen."""
    with ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=160) as model:
        for engine in model._serving().pool.engines:
            engine.time_scale = 0.03  # type: ignore[attr-defined]
        yield model


def plain(model: ChatPingPong) -> ChatPingPong:
    """The same model with edges off."""
    return model.model_copy(update={"overlap": "off"})


def prompt(role: str, reads: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages(
        [("system", f"You are the {role}. {RULES}"), ("human", f"Text:\n{{{reads}}}\nGo on.")]
    )


def chain(*nodes: tuple[str, Any], schema: Any = State) -> Any:
    builder = StateGraph(schema).add_sequence(nodes)
    return builder.add_edge(START, nodes[0][0]).add_edge(nodes[-1][0], END).compile()


PLANNERS: dict[str, Any] = {
    "a dict of parsers": lambda model: prompt("planner", "task") | model | {"plan": StrOutputParser()},
    "a key around it": lambda model: RunnableParallel(plan=prompt("planner", "task") | model | StrOutputParser()),
    "bound": lambda model: prompt("planner", "task") | model.bind(stop=["@"]) | {"plan": StrOutputParser()},
    "with a config": lambda model: (prompt("planner", "task") | model | {"plan": StrOutputParser()}).with_config(
        tags=["x"]
    ),
    "a value picked": lambda model: (
        {"task": operator.itemgetter("task"), "all": RunnablePassthrough()}
        | prompt("planner", "task")
        | model
        | RunnableParallel(plan=StrOutputParser(), notes=StrOutputParser())
    ),
}

UNTOLD: dict[str, Any] = {
    "a function": lambda: RunnableLambda(lambda answer: {"plan": answer.text}),
    "a parser that refuses": lambda: {"plan": JsonOutputParser()},
    "a function beside a parser": lambda: {"plan": StrOutputParser(), "notes": lambda answer: answer.text},
}


def test_the_made_up_answer_is_no_json() -> None:
    assert is_probe("Zq000 probe")


class TestSequences:
    @pytest.mark.parametrize("kind", PLANNERS)
    def test_stream_from_the_first_run_on(self, model: ChatPingPong, kind: str) -> None:
        def graph(model: ChatPingPong) -> Any:
            writer = prompt("writer", "plan") | model | {"report": StrOutputParser()}
            return chain(("planner", PLANNERS[kind](model)), ("writer", writer))

        for number in range(2):
            result, seen = run(model, graph(model), given(number))
            assert seen["writer"]["source"] == "declared"
            assert prefilled(seen["writer"]) > 0.85
            assert seen["writer"]["wasted"] == 0
            assert result == graph(plain(model)).invoke(given(number))

    @pytest.mark.parametrize("rest", UNTOLD)
    def test_whose_outcome_is_untold_are_learned(self, model: ChatPingPong, rest: str) -> None:
        model = model.model_copy(update={"max_tokens": 60})
        for engine in model._serving().pool.engines:
            engine.reply = lambda prompt: '{"answer": "Tide pools fill twice a day, and crabs wait in them."}'  # type: ignore[attr-defined]
        planner = prompt("planner", "task") | model | UNTOLD[rest]()
        graph = chain(
            ("asker", agent_node(model, prompt=prompt("asker", "task"), writes="notes")),
            ("planner", planner),
            ("writer", prompt("writer", "plan") | model | {"report": StrOutputParser()}),
        )
        _, first = run(model, graph, given(1))
        _, second = run(model, graph, given(2))
        assert first["planner"]["source"] == "declared"
        assert (first["writer"]["source"], second["writer"]["source"]) == (None, "learned")
        assert prefilled(second["writer"]) > 0.5

    def test_a_dry_run_tells_what_a_function_returns(self, model: ChatPingPong) -> None:
        planner = prompt("planner", "task") | model | (lambda answer: {"plan": answer.text})
        graph = chain(
            ("planner", planner), ("writer", prompt("writer", "plan") | model | {"report": StrOutputParser()})
        )
        _, seen = run(model, streaming_edges(graph, dry_run={"planner"}), given(1))
        assert seen["writer"]["source"] == "declared"
        assert prefilled(seen["writer"]) > 0.85

    def test_functions_of_the_user_run_once(self, model: ChatPingPong) -> None:
        calls: list[str] = []

        def note(name: str, value: Any) -> Any:
            calls.append(name)
            return value

        def stamp() -> str:
            return str(note("stamp", "today"))

        stamped = ChatPromptTemplate.from_messages([("human", f"{RULES} {{day}}: {{plan}}")]).partial(day=stamp)
        graph = chain(
            ("planner", prompt("planner", "task") | model | {"plan": StrOutputParser()}),
            ("reader", RunnableLambda(lambda s: note("before", s)) | prompt("reader", "plan") | model | {"notes": str}),
            ("writer", stamped | model | (lambda answer: note("after", {"report": answer.text}))),
        )
        _, seen = run(model, graph, given(1))
        assert sorted(calls) == ["after", "before", "stamp"]
        assert {seen[node]["source"] for node in ("reader", "writer")} == {None}

    def test_a_missing_variable_is_the_nodes_own_error(self, model: ChatPingPong) -> None:
        events: list[Any] = []
        graph = chain(
            ("planner", prompt("planner", "task") | model | {"plan": StrOutputParser()}),
            ("writer", prompt("writer", "nothing") | model | {"report": StrOutputParser()}),
        )
        with model.trace.subscribed(events.append), pytest.raises(KeyError, match="nothing"):
            graph.invoke(given(1))
        assert [event.name for event in events if event.name.endswith("failed")] == []

    def test_a_list_of_parts_is_streamed_up_to_the_first_comma(self, model: ChatPingPong) -> None:
        graph = chain(
            ("planner", prompt("planner", "task") | model | {"plan": CommaSeparatedListOutputParser()}),
            ("writer", prompt("writer", "plan") | model | {"report": StrOutputParser()}),
        )
        _, seen = run(model, graph, given(1))
        assert (seen["writer"]["source"], seen["writer"]["wasted"]) == ("declared", 0)
        assert seen["writer"]["static"] > len(RULES)

    def test_over_a_root_list_of_messages(self, model: ChatPingPong) -> None:
        def graph(model: ChatPingPong) -> Any:
            asker = ChatPromptTemplate.from_messages([("system", f"You ask. {RULES}"), MessagesPlaceholder("messages")])
            schema: Any = Annotated[list[AnyMessage], add_messages]
            return chain(("asker", asker | model), ("bare", model), ("bound", model.bind(stop=["@"])), schema=schema)

        asked: Sequence[AnyMessage] = [HumanMessage("Why is the sea salt?", id="1")]
        result, seen = run(model, graph(model), asked)
        assert {seen[node]["source"] for node in ("bare", "bound")} == {"declared"}
        assert all(prefilled(seen[node]) > 0.6 and seen[node]["wasted"] == 0 for node in ("bare", "bound"))
        expected = graph(plain(model)).invoke(asked)
        assert [message.text for message in result] == [message.text for message in expected]

    @pytest.mark.parametrize(
        "make",
        [
            lambda model: RunnableLambda(lambda state: state) | prompt("writer", "plan") | model,
            lambda model: (prompt("writer", "plan") | model).with_retry(),
            lambda model: prompt("writer", "plan") | model.with_fallbacks([model]),
            lambda model: prompt("writer", "plan") | StrOutputParser(),
            lambda model: prompt("writer", "plan").partial(plan=lambda: "x") | model,
            lambda model: RunnablePassthrough(print) | prompt("writer", "plan") | model,
        ],
    )
    def test_what_runs_the_users_code_before_the_model_is_not_declared(self, model: ChatPingPong, make: Any) -> None:
        node: Runnable[Any, Any] = make(model)
        assert model_sequence(node) is None


def speaker(model: ChatPingPong, role: str, reads: str, writes: str) -> Any:
    return agent_node(model, prompt=prompt(role, reads), writes=writes)


def inner(model: ChatPingPong, **compiling: Any) -> Any:
    """critic -> clerk."""
    builder = StateGraph(State).add_node("critic", speaker(model, "critic", "plan", "notes"))
    builder.add_node("clerk", speaker(model, "clerk", "notes", "report"))
    return builder.add_edge(START, "critic").add_edge("critic", "clerk").compile(**compiling)


class TestSubgraphs:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_stream_from_the_first_run_on(self, model: ChatPingPong, depth: int) -> None:
        def graph(model: ChatPingPong) -> Any:
            within = inner(model)
            for number in range(1, depth):
                within = chain((f"level_{number}", within))
            return chain(("planner", speaker(model, "planner", "task", "plan")), ("review", within))

        result, seen = run(model, graph(model), given(1))
        assert {seen[node]["source"] for node in ("critic", "clerk")} == {"declared"}
        assert all(prefilled(seen[node]) > 0.85 and seen[node]["wasted"] == 0 for node in ("critic", "clerk"))
        assert result == graph(plain(model)).invoke(given(1))

    def test_of_another_state_are_given_what_the_schemas_share(self, model: ChatPingPong) -> None:
        class Memo(TypedDict, total=False):
            plan: str
            drafts: Annotated[list[str], operator.add]

        reader = ChatPromptTemplate.from_messages([("human", f"{RULES} {{plan}} {{drafts}}")])
        memo = chain(("reader", agent_node(model, prompt=reader, writes="plan")), schema=Memo)
        graph = chain(("planner", speaker(model, "planner", "task", "plan")), ("memo", memo))
        _, seen = run(model, graph, given(1))
        assert (seen["reader"]["source"], seen["reader"]["wasted"]) == ("declared", 0)
        assert prefilled(seen["reader"]) > 0.8

    def test_by_send_get_its_argument(self, model: ChatPingPong) -> None:
        def writes(answer: Any) -> Any:
            return Command(update={"notes": answer.text}, goto=Send("review", {"plan": f"Part one of {answer.text}"}))

        builder = StateGraph(State).add_node("review", inner(model))
        builder.add_node("planner", agent_node(model, prompt=prompt("planner", "task"), writes=writes))
        _, seen = run(model, builder.add_edge(START, "planner").compile(), given(1))
        assert (seen["critic"]["source"], seen["critic"]["wasted"]) == ("declared", 0)
        assert prefilled(seen["critic"]) > 0.85

    def test_that_keep_their_state_are_not_entered(self, model: ChatPingPong) -> None:
        nodes = ("planner", speaker(model, "planner", "task", "plan")), ("review", inner(model, checkpointer=True))
        builder = StateGraph(State).add_sequence(nodes).add_edge(START, "planner")
        _, seen = run(model, builder.compile(InMemorySaver()), given(1), {"configurable": {"thread_id": "1"}})
        assert (seen["critic"]["source"], seen["clerk"]["source"]) == (None, "declared")

    def test_with_a_checkpointer_above_are_entered(self, model: ChatPingPong) -> None:
        nodes = ("planner", speaker(model, "planner", "task", "plan")), ("review", inner(model))
        builder = StateGraph(State).add_sequence(nodes).add_edge(START, "planner")
        saver, plain_saver = InMemorySaver(), InMemorySaver()
        config: Any = {"configurable": {"thread_id": "1"}}
        _, seen = run(model, builder.compile(saver), given(1), config)
        assert prefilled(seen["critic"]) > 0.85
        nodes = ("planner", speaker(plain(model), "planner", "task", "plan")), ("review", inner(plain(model)))
        off = StateGraph(State).add_sequence(nodes).add_edge(START, "planner").compile(plain_saver)
        off.invoke(given(1), config)
        assert len(list(saver.list(None))) == len(list(plain_saver.list(None)))

    def test_are_not_entered_beyond_a_breakpoint(self, model: ChatPingPong) -> None:
        nodes = (
            ("planner", speaker(model, "planner", "task", "plan")),
            ("review", inner(model, interrupt_before=["critic"])),
        )
        graph = StateGraph(State).add_sequence(nodes).add_edge(START, "planner").compile(InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        events: list[Any] = []
        with model.trace.subscribed(events.append):
            graph.invoke(given(1), config)
            assert [event for event in events if event.name == "append.started"] == []
            assert graph.invoke(None, config)["report"]

    def test_options_of_the_node_hold_for_what_lies_within(self, model: ChatPingPong) -> None:
        def ordinary(state: State) -> Any:
            return {"report": model.invoke(f"{RULES} {state['plan']}").text}

        def graph() -> Any:
            return chain(
                ("planner", speaker(model, "planner", "task", "plan")), ("review", chain(("critic", ordinary)))
            )

        _, dry = run(model, streaming_edges(graph(), dry_run={"review"}), given(1))
        assert dry["critic"]["source"] == "dry run"
        assert prefilled(dry["critic"]) > 0.85
        _, ordinary_run = run(model, graph(), given(1))
        assert ordinary_run["critic"]["source"] is None

    def test_switched_off_stay_plain(self, model: ChatPingPong) -> None:
        graph = chain(("planner", speaker(model, "planner", "task", "plan")), ("review", inner(model)))
        _, seen = run(model, streaming_edges(graph, off={"review"}), given(1))
        assert seen["critic"]["appends"] == 0
