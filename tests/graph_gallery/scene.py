"""What a scenario of the gallery is, and the few words its modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.pregel import Pregel
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.fake_engine import pseudo_words

WAYS = ("invoke", "stream", "astream", "events")
"""How a graph is run, round after round; whatever is learned in one round is used in the next."""
SYNC_WAYS = ("invoke", "stream", "invoke", "stream")
ASYNC_WAYS = ("ainvoke", "astream", "events", "ainvoke")

REPLY_LENGTH = 28
"""Of an answer that no script gives, in characters, which are the tokens of the modelled engines."""

TASKS = (
    "Say what a tide pool is, in two lines.",
    "List three animals that live between the tides, and what each of them eats.",
    "Why is kelp brown?",
)


class Doing(Protocol):
    """One round of a scenario, as its story sees it."""

    way: str
    input: Any
    config: dict[str, Any]

    @property
    def parallel(self) -> bool: ...

    def run(
        self,
        input: Any,
        config: Mapping[str, Any] | None = None,
        *,
        graph: Any = None,
        raises: type[Exception] | None = None,
        **options: Any,
    ) -> Any:
        """Run a graph (the scene's own, if no other is named) in the round's way; the result is kept, and returned.

        With `raises` the run must end with that error, which is then the result.
        """

    def note(self, name: str, value: Any) -> None:
        """Keep something else to compare."""


def just_run(round_: Doing) -> None:
    """The story of most scenarios."""
    round_.run(round_.input)


def failing_with(error: type[Exception]) -> Callable[[Doing], None]:
    """The story of a scenario whose runs end with an error."""
    return lambda round_: round_.run(round_.input, raises=error)


@dataclass
class Scene:
    """A graph on a model, and what is done with it in one round.

    Round i gets the i-th input, in turn. Nodes name themselves in `effects` each time they run. `config` and `options`
    (arguments of `invoke`) go to every run. `close` is called after the last round.
    """

    graph: Pregel[Any, Any, Any, Any]
    inputs: Sequence[Any]
    effects: list[str] = field(default_factory=list)
    story: Callable[[Doing], None] = just_run
    ways: Sequence[str] = WAYS
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


Build = Callable[[ChatPingPong], Scene]


@dataclass(frozen=True)
class Scenario:
    """A small graph of the gallery.

    `parallel` says that nodes run at the same time, so that the order of what they emit is not fixed. `declared` names
    nodes whose prompts are foreseen from the first round on. `unplanned` says that planning fails, which no one must
    notice. Nodes that are `pure` may run on states that never happen. `reply` answers a prompt.
    """

    name: str
    description: str
    shape: str
    build: Build
    reply: Callable[[str], str]
    parallel: bool = False
    declared: frozenset[str] = frozenset()
    unplanned: bool = False
    pure: bool = True

    def __str__(self) -> str:
        return self.name


SCENARIOS: list[Scenario] = []
"""All of them, in the order of the modules."""


def scenario(
    shape: str,
    *,
    parallel: bool = False,
    declared: Sequence[str] = (),
    unplanned: bool = False,
    pure: bool = True,
    replies: Mapping[str, str] | Callable[[str], str] | None = None,
) -> Callable[[Build], Build]:
    """Put a function that builds a scene into the gallery; its docstring describes the scenario."""
    reply = replies if callable(replies) else scripted(replies or {})

    def register(build: Build) -> Build:
        name, description = build.__name__, (build.__doc__ or "").strip()
        foreseen = frozenset(declared)
        SCENARIOS.append(Scenario(name, description, shape, build, reply, parallel, foreseen, unplanned, pure))
        return build

    return register


def scripted(replies: Mapping[str, str]) -> Callable[[str], str]:
    """Answers with the text of the first key that the prompt contains, else with words that depend on all of it."""

    def reply(prompt: str) -> str:
        return next((text for key, text in replies.items() if key in prompt), pseudo_words(prompt)[:REPLY_LENGTH])

    return reply


class Texts(TypedDict, total=False):
    """The state of most scenarios."""

    task: str
    plan: str
    draft: str
    notes: str
    final: str


def tasks(**more: Any) -> list[dict[str, Any]]:
    """Inputs for three rounds."""
    return [{"task": task, **more} for task in TASKS]


def ask(role: str, text: str) -> list[AnyMessage]:
    """A prompt: who answers, by which rules, and the text at hand."""
    rules = f"You are the {role}. Answer in short sentences, and leave nothing out that the reader needs."
    return [SystemMessage(rules), HumanMessage(f"Text:\n{text}\n\nGo on as the {role}.")]
