"""Kinds of state and schema, messages that come and go, context, store, cache, retries and time limits."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass, field
from typing import Annotated, Any

from langchain_core.messages import HumanMessage, RemoveMessage, SystemMessage, trim_messages
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.config import get_config, get_store
from langgraph.errors import NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, RetryPolicy
from pydantic import BaseModel, ConfigDict
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, agent_node
from tests.graph_gallery.branches import speaker
from tests.graph_gallery.chains import chain, talk_inputs
from tests.graph_gallery.scene import ASYNC_WAYS, TASKS, Doing, Scene, Texts, ask, failing_with, scenario, tasks


class Essay(BaseModel):
    """A state that is checked."""

    task: str
    draft: str = ""
    notes: list[str] = []


@scenario("writer -> critic, pydantic", declared=("critic",))
def pydantic_state(model: ChatPingPong) -> Scene:
    """A pydantic model as the state, with a function and a declared node."""
    effects: list[str] = []

    def writer(state: Essay) -> dict[str, str]:
        effects.append("writer")
        return {"draft": model.invoke(ask("writer", state.task)).text}

    first = agent_node(model, prompt=lambda state: ask("planner", state.task), writes="draft")
    critic = agent_node(
        model, prompt=lambda state: ask("critic", state.draft), writes=lambda answer: {"notes": [answer.text]}
    )
    builder = StateGraph(Essay).add_sequence([("writer", writer), ("planner", first), ("critic", critic)])
    return Scene(builder.add_edge(START, "writer").compile(), [Essay(task=task) for task in TASKS], effects)


@dataclass
class Sheet:
    """A state as a dataclass."""

    task: str
    draft: str = ""
    notes: Annotated[list[str], lambda before, new: [*before, *new]] = field(default_factory=list)


@scenario("writer -> critic, dataclass")
def dataclass_state(model: ChatPingPong) -> Scene:
    """A dataclass as the state, whose reducer is a lambda."""

    def writer(state: Sheet) -> dict[str, Any]:
        draft = model.invoke(ask("writer", state.task)).text
        return {"draft": draft, "notes": [draft[:5]]}

    def critic(state: Sheet) -> dict[str, Any]:
        return {"notes": [model.invoke(ask("critic", state.draft)).text]}

    builder = StateGraph(Sheet).add_sequence([("writer", writer), ("critic", critic)]).add_edge(START, "writer")
    return Scene(builder.compile(), [Sheet(task) for task in TASKS])


class Asked(TypedDict):
    """What goes in."""

    task: str


class Told(TypedDict):
    """What comes out."""

    final: str


class Secret(TypedDict):
    """What only two nodes share."""

    idea: str


@scenario("thinker -idea-> writer -> editor")
def private_state(model: ChatPingPong) -> Scene:
    """Input, output and private schemas."""
    effects: list[str] = []

    def thinker(state: Asked) -> Secret:
        effects.append("thinker")
        return {"idea": model.invoke(ask("thinker", state["task"])).text}

    def writer(state: Secret) -> dict[str, str]:
        return {"draft": model.invoke(ask("writer", state["idea"])).text}

    builder = StateGraph(Texts, input_schema=Asked, output_schema=Told)
    builder.add_sequence([("thinker", thinker), ("writer", writer)]).add_edge(START, "thinker")
    builder.add_node("editor", speaker(model, "editor", "draft", "final", effects)).add_edge("writer", "editor")
    return Scene(builder.compile(), tasks(), effects)


def in_place(before: list[str] | None, new: list[str]) -> list[str]:
    """A reducer that changes the value it is given."""
    before = before if before is not None else []
    before.extend(new)
    return before


class Pile(TypedDict, total=False):
    """A list that is changed in place."""

    task: str
    pile: Annotated[list[str], in_place]


@scenario("writer -> critic -> editor, declared, one growing list", declared=("critic", "editor"))
def mutating_reducer(model: ChatPingPong) -> Scene:
    """A reducer and a prompt function that change the state's list in place."""

    def prompt(role: str) -> Any:
        def build(state: Pile) -> Any:
            state.setdefault("pile", []).append(f"seen by the {role}")
            return ask(role, "\n".join([state["task"], *state["pile"]]))

        return build

    roles = ("writer", "critic", "editor")
    sequence = [
        (role, agent_node(model, prompt=prompt(role), writes=lambda answer: {"pile": [answer.text]})) for role in roles
    ]
    builder = StateGraph(Pile).add_sequence(sequence).add_edge(START, "writer")
    return Scene(builder.compile(), [{"task": task, "pile": []} for task in TASKS])


@scenario("writer -> critic -> editor, trimmed")
def trimmed_messages(model: ChatPingPong) -> Scene:
    """`trim_messages`: each node sees only what fits, counted by the model's tokenizer."""

    def node(role: str) -> Any:
        def speak(state: MessagesState) -> dict[str, Any]:
            fitting = trim_messages(
                state["messages"], max_tokens=170, token_counter=model, strategy="last", include_system=True
            )
            return {"messages": [model.invoke([SystemMessage(f"You are the {role}."), *fitting])]}

        return speak

    roles = ("writer", "critic", "editor", "clerk")
    builder = StateGraph(MessagesState).add_sequence([(role, node(role)) for role in roles]).add_edge(START, "writer")
    return Scene(builder.compile(), talk_inputs())


@scenario("writer -> critic -> editor, trimmed, declared", declared=("critic", "editor"))
def trimmed_messages_of_declared_nodes(model: ChatPingPong) -> Scene:
    """The same in the prompt functions of declared nodes, which also run on answers that nobody has given."""

    def node(role: str) -> Any:
        def prompt(state: MessagesState) -> Any:
            fitting = trim_messages(state["messages"], max_tokens=2, token_counter=len, strategy="last")
            return [SystemMessage(f"You are the {role}. Answer in short sentences."), *fitting]

        return agent_node(model, prompt=prompt, writes=lambda answer: {"messages": [answer]})

    roles = ("writer", "critic", "editor")
    builder = StateGraph(MessagesState).add_sequence([(role, node(role)) for role in roles]).add_edge(START, "writer")
    return Scene(builder.compile(), talk_inputs())


def joined(before: str, new: str) -> str:
    """A reducer that puts texts together."""
    return f"{before}\n- {new}" if before else new


class Reduced(TypedDict, total=False):
    """Keys with reducers of several kinds."""

    task: str
    said: Annotated[str, joined]
    parts: Annotated[list[str], operator.add]
    by_role: Annotated[dict[str, str], operator.or_]


@scenario("writer -> critic -> editor, three reducers, declared", declared=("critic", "editor"))
def reducers_of_partial_answers(model: ChatPingPong) -> Scene:
    """A text, a list and a dict that grow: the upstream's words come to the prompt through the reducers."""

    def node(role: str) -> Any:
        def prompt(state: Reduced) -> Any:
            parts, by_role = state.get("parts", []), state.get("by_role", {})
            text = [state["task"], state.get("said", ""), " | ".join(parts), *(f"{k}: {v}" for k, v in by_role.items())]
            return ask(role, "\n".join(text))

        def writes(answer: Any) -> dict[str, Any]:
            return {"said": answer.text, "parts": [answer.text], "by_role": {role: answer.text}}

        return agent_node(model, prompt=prompt, writes=writes)

    sequence = [(role, node(role)) for role in ("writer", "critic", "editor")]
    return Scene(StateGraph(Reduced).add_sequence(sequence).add_edge(START, "writer").compile(), tasks())


@scenario(
    "writer (returns something else) -> critic, declared", declared=("critic",), replies={"the writer": "abcd " * 5}
)
def declared_and_not_what_was_streamed(model: ChatPingPong) -> Scene:
    """A guard that lets made-up answers pass and stores a fixed text in place of the real one."""

    def guarded(answer: Any) -> dict[str, str]:
        return {"draft": "Low tide." if "abcd" in answer.text else answer.text}

    writer = agent_node(model, prompt=lambda state: ask("writer", state["task"]), writes=guarded)
    critic = agent_node(model, prompt=lambda state: ask("critic", state["draft"]), writes="notes")
    return Scene(chain(("writer", writer), ("critic", critic)), tasks())


@scenario("writer -> summarizer (removes) -> editor")
def removed_messages(model: ChatPingPong) -> Scene:
    """`RemoveMessage`: a node replaces the history by its summary."""

    def writer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage("You are the writer."), *state["messages"]])]}

    def summarizer(state: MessagesState) -> dict[str, Any]:
        summary = model.invoke([*state["messages"], HumanMessage("Sum up what was said.")])
        gone = [RemoveMessage(id=str(message.id)) for message in state["messages"]]
        return {"messages": [*gone, HumanMessage(f"So far: {summary.text}")]}

    nodes = ("writer", writer), ("summarizer", summarizer), ("editor", writer)
    return Scene(StateGraph(MessagesState).add_sequence(nodes).add_edge(START, "writer").compile(), talk_inputs())


class WithModel(Texts, total=False):
    """A state that carries the model."""

    model: Any


@scenario("writer -> critic, the model is in the state", declared=("critic",))
def model_in_the_state(model: ChatPingPong) -> Scene:
    """Nodes that take the model from the state; the plan's copies of the state must not copy the engines."""

    def writer(state: WithModel) -> dict[str, str]:
        return {"draft": state["model"].invoke(ask("writer", state["task"])).text}

    planner = agent_node(model, prompt=lambda state: ask("planner", state["task"]), writes="plan")
    critic = agent_node(model, prompt=lambda state: ask("critic", state["plan"]), writes="notes")
    nodes = ("writer", writer), ("planner", planner), ("critic", critic)
    graph = StateGraph(WithModel).add_sequence(nodes).add_edge(START, "writer").compile()
    return Scene(graph, tasks(model=model))


class Settings(TypedDict):
    """What a run is told beside its input."""

    tone: str


@scenario("writer -> critic, with a context")
def runtime_context(model: ChatPingPong) -> Scene:
    """The runtime's context goes into the prompts."""

    def writer(state: Texts, runtime: Runtime[Settings]) -> dict[str, str]:
        return {"draft": model.invoke(ask(f"{runtime.context['tone']} writer", state["task"])).text}

    async def critic(state: Texts, runtime: Runtime[Settings]) -> dict[str, str]:
        return {"notes": (await model.ainvoke(ask(f"{runtime.context['tone']} critic", state["draft"]))).text}

    builder = StateGraph(Texts, context_schema=Settings).add_sequence([("writer", writer), ("critic", critic)])
    graph = builder.add_edge(START, "writer").compile()
    return Scene(graph, tasks(), options={"context": {"tone": "gentle"}}, ways=ASYNC_WAYS)


@scenario("writer -> critic, configurable")
def configurable_values(model: ChatPingPong) -> Scene:
    """Nodes that read the config, given by `with_config` and with the run; one passes it on to the model."""

    def writer(state: Texts, config: RunnableConfig) -> dict[str, str]:
        tone = config["configurable"]["tone"]
        return {"draft": model.invoke(ask(f"{tone} writer", state["task"]), config).text}

    def critic(state: Texts) -> dict[str, str]:
        tone = get_config()["configurable"]["tone"]
        own = {"metadata": {"purpose": "judging"}, "run_name": "judge"}
        return {"notes": model.invoke(ask(f"{tone} critic", state["draft"]), own).text}  # type: ignore[arg-type]

    graph = chain(("writer", writer), ("critic", critic)).with_config(configurable={"tone": "dry"}, tags=["mine"])
    return Scene(graph, tasks(), config={"metadata": {"customer": "a"}})


@scenario("writer -> critic, with a store")
def store_in_nodes(model: ChatPingPong) -> Scene:
    """Nodes that read from a store and write to it; what one run leaves there, the next one's prompt shows."""
    store = InMemoryStore()

    def writer(state: Texts, *, store: BaseStore) -> dict[str, str]:
        known = "; ".join(item.value["text"] for item in store.search(("drafts",)))
        draft = model.invoke(ask("writer", f"{state['task']}\nKnown: {known}")).text
        store.put(("drafts",), state["task"][:9], {"text": draft})
        return {"draft": draft}

    def critic(state: Texts) -> dict[str, str]:
        item = get_store().get(("drafts",), state["task"][:9])
        return {"notes": model.invoke(ask("critic", item.value["text"] if item else "nothing")).text}

    builder = StateGraph(Texts).add_sequence([("writer", writer), ("critic", critic)]).add_edge(START, "writer")

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.note("stored", sorted((item.key, item.value["text"]) for item in store.search(("drafts",))))

    return Scene(builder.compile(store=store), tasks(), story=story)


@scenario("writer (cached) -> critic (cached) -> editor")
def cached_nodes(model: ChatPingPong) -> Scene:
    """Cache policies: the second run of an input calls only the editor's model."""
    effects: list[str] = []
    builder = StateGraph(Texts)
    for role, reads, writes in (("writer", "task", "draft"), ("critic", "draft", "notes")):
        builder.add_node(role, speaker(model, role, reads, writes, effects), cache_policy=CachePolicy())
    builder.add_node("editor", speaker(model, "editor", "notes", "final", effects))
    builder.add_edge(START, "writer").add_edge("writer", "critic").add_edge("critic", "editor")
    return Scene(builder.compile(cache=InMemoryCache()), tasks(), effects)


@scenario("writer (fails twice) -> critic", pure=False)
def retried_node(model: ChatPingPong) -> Scene:
    """A retry policy on a node that fails after its model call, with another prompt each time."""
    effects: list[str] = []

    def writer(state: Texts) -> dict[str, str]:
        effects.append("writer")
        draft = model.invoke(ask("writer", f"{state['task']} (try {len(effects)})")).text
        if effects.count("writer") < 3:
            raise ConnectionError("try again")
        return {"draft": draft}

    policy = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3)
    builder = StateGraph(Texts).add_node("writer", writer, retry_policy=policy).add_edge(START, "writer")
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects)).add_edge("writer", "critic")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer -> critic (fails) -> editor")
def error_in_a_node(model: ChatPingPong) -> Scene:
    """An error after the model call of the second node ends the run."""
    effects: list[str] = []

    def critic(state: Texts) -> dict[str, str]:
        effects.append("critic")
        raise LookupError(f"no notes on: {model.invoke(ask('critic', state['draft'])).text}")

    nodes = ("writer", speaker(model, "writer", "task", "draft", effects)), ("critic", critic)
    return Scene(
        chain(*nodes, ("editor", speaker(model, "editor", "notes", "final", effects))),
        tasks(),
        effects,
        story=failing_with(LookupError),
    )


@scenario("writer (fails) -> its error handler -> critic")
def handled_error(model: ChatPingPong) -> Scene:
    """A node's error handler puts another draft in place."""
    effects: list[str] = []

    def writer(state: Texts) -> dict[str, str]:
        raise ValueError(model.invoke(ask("writer", state["task"])).text)

    def instead(state: Texts) -> dict[str, str]:
        effects.append("instead")
        return {"draft": model.invoke(ask("deputy", state["task"])).text}

    builder = StateGraph(Texts).add_node("writer", writer, error_handler=instead).add_edge(START, "writer")
    builder.add_node("critic", speaker(model, "critic", "draft", "notes", effects)).add_edge("writer", "critic")
    return Scene(builder.compile(), tasks(), effects)


@scenario("writer (in time) -> critic (too slow)")
def node_timeouts(model: ChatPingPong) -> Scene:
    """Time limits on async nodes: one keeps it, one does not."""
    effects: list[str] = []

    async def writer(state: Texts) -> dict[str, str]:
        return {"draft": (await model.ainvoke(ask("writer", state["task"]))).text}

    async def critic(state: Texts) -> dict[str, str]:
        effects.append((await model.ainvoke(ask("critic", state["draft"]))).text)
        await asyncio.sleep(60)
        return {"notes": "too late"}

    builder = StateGraph(Texts).add_node("writer", writer, timeout=30.0).add_edge(START, "writer")
    builder.add_node("critic", critic, timeout=0.8).add_edge("writer", "critic")
    return Scene(builder.compile(), tasks(), effects, story=failing_with(NodeTimeoutError), ways=("ainvoke", "astream"))


@scenario("writer -> critic, a whole run limited")
def step_timeout(model: ChatPingPong) -> Scene:
    """A time limit on each superstep, which is kept."""
    effects: list[str] = []
    nodes = ("writer", speaker(model, "writer", "task", "draft", effects))
    graph = chain(nodes, ("critic", speaker(model, "critic", "draft", "notes", effects)))
    graph.step_timeout = 30.0
    return Scene(graph, tasks(), effects)


class Strict(BaseModel):
    """A state that takes any object and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    task: str
    draft: str = ""
    lock: Any = None


@scenario("writer -> critic, declared, with a lock in the state", unplanned=True)
def uncopyable_state(model: ChatPingPong) -> Scene:
    """A state that cannot be copied, so that nothing can be foreseen."""
    import threading

    writer = agent_node(model, prompt=lambda state: ask("writer", state.task), writes="draft")
    critic = agent_node(model, prompt=lambda state: ask("critic", state.draft), writes="draft")
    builder = StateGraph(Strict).add_sequence([("writer", writer), ("critic", critic)]).add_edge(START, "writer")
    lock = threading.Lock()
    return Scene(builder.compile(), [Strict(task=task, lock=lock) for task in TASKS])
