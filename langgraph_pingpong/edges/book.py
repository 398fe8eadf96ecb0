"""What is remembered of a run: its calls, what each could draw from, and what it answered."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_openai_messages

from langgraph_pingpong.edges.tasks import RunningTask
from langgraph_pingpong.edges.template import Message, Path, Sources
from langgraph_pingpong.growing_prompt import CallKey
from langgraph_pingpong.tokens import as_text

Answers = Mapping[CallKey, str]
"""What calls answered."""

MAX_CALLS = 32
"""Finished calls of one run that are remembered."""

MAX_DEPTH = 3
"""How deep the state is searched for texts."""

MAX_TEXTS = 500
"""Texts of one state that are looked at."""

MAX_VALUES = 10_000
"""Values of one state that are gone through in search of them."""


@dataclass(frozen=True)
class Shaping:
    """What shapes a prompt beside its messages: a call's tools and variables, and its model's own chat template."""

    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass
class Outcome:
    """The calls that followed a call. `graph` is the run of its graph, which may still bring the first.

    `called` names the tools that its answer called.
    """

    followers: set[CallKey] = field(default_factory=set)
    called: frozenset[str] = frozenset()
    graph: weakref.ref[Any] | None = None

    @property
    def settled(self) -> bool:
        """Whether it is known what followed, be it nothing."""
        return bool(self.followers) or self.graph is None or self.graph() is None


@dataclass
class CallRecord:
    """One call of the model within a run. `task` is let go of when the call ends."""

    key: CallKey
    step: int
    messages: Sequence[Message]
    shaping: Shaping
    task: RunningTask | None
    round: int = 0
    """How many calls with the same key this run has had before, as in a loop of the graph."""
    spec: weakref.ref[Any] | None = None
    """The node's object in the compiled graph; what is learned of it ends with it."""
    texts: Mapping[Path, str] = field(default_factory=dict)
    lists: Mapping[Path, Sequence[Message]] = field(default_factory=dict)
    answer: str = ""
    turn: Message | None = None
    """The answer as a message, if it called tools."""
    began: int = 0
    ended: int | None = None
    alone: bool = True
    """Whether no other call of the same task ran at the same time; else its number means nothing."""
    outcome: Outcome = field(default_factory=Outcome)


class RunBook:
    """The calls of one run, in the order of their beginnings and ends."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, int], int] = {}
        self._rounds: Counter[CallKey] = Counter()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.active: dict[CallKey, CallRecord] = {}
        self.finished: OrderedDict[CallKey, CallRecord] = OrderedDict()

    def begin(self, task: RunningTask, messages: Sequence[Message], shaping: Shaping) -> CallRecord:
        """Note that a call begins."""
        with self._lock:
            attempt = (task.task_id, task.attempt)
            number = self._numbers.get(attempt, 0)
            self._numbers[attempt] = number + 1
            key = CallKey(task.site, number, task.push)
            record = CallRecord(key, task.step, messages, shaping, task, self._rounds[key])
            record.outcome.graph = weakref.ref(task.loop)
            record.began = next(self._clock)
            for other in self.active.values():
                if other.task is not None and other.task.task_id == task.task_id:
                    record.alone = other.alone = False
            self.active[record.key] = record
            return record

    def is_new_graph(self, loop: Any) -> bool:
        """Whether no call within this run of a graph, given by its loop, was seen before."""
        with self._lock:
            seen = loop in self._graphs
            self._graphs.add(loop)
            return not seen

    def end(self, record: CallRecord, answer: str | None, turn: Message | None = None) -> None:
        """Note that a call is over; without an answer it is as if it had not been. A `turn` is one that calls tools."""
        with self._lock:
            record.task = None
            if self.active.get(record.key) is record:
                del self.active[record.key]
            if answer is None:
                return
            record.answer, record.turn, record.ended = answer, turn, next(self._clock)
            record.outcome.called = frozenset(call["function"]["name"] for call in (turn or {}).get("tool_calls", ()))
            self._rounds[record.key] += 1
            self.finished.pop(record.key, None)
            self.finished[record.key] = record
            if len(self.finished) > MAX_CALLS:
                self.finished.popitem(last=False)

    def predecessors(self, record: CallRecord) -> list[CallRecord]:
        """The call that ended last before `record` began, and those that ran beside it."""
        with self._lock:
            before = [r for r in self.finished.values() if r.ended is not None and r.ended < record.began]
        if not before:
            return []
        last = max(before, key=lambda r: r.ended or 0)
        return [r for r in before if r is last or (r.ended or 0) > last.began]

    def running(self) -> list[CallKey]:
        """The calls that are being answered."""
        with self._lock:
            return list(self.active)

    def answers(self) -> dict[CallKey, str]:
        """What the finished calls answered."""
        with self._lock:
            return {key: record.answer for key, record in self.finished.items()}


def note_sources(record: CallRecord, state: Mapping[str, Any], task_input: Any) -> None:
    """Look through a call's prompt, state and input for texts and message lists that a later prompt may hold."""
    texts: dict[Path, str] = {}
    lists: dict[Path, Sequence[Message]] = {}
    for index, message in enumerate(record.messages):
        if isinstance(content := message.get("content"), str):
            texts["prompt", index] = content
    lists["prompt",] = record.messages
    converted: dict[int, Sequence[Message]] = {}  # state and input are often the same list
    for root, value in (("state", state), ("input", task_input)):
        for path, found in itertools.islice(_walk(root, value), MAX_TEXTS):
            if isinstance(found, str):
                texts[path] = found
            elif id(found) in converted:
                lists[path] = converted[id(found)]
            else:
                lists[path] = converted[id(found)] = [*map(as_text, convert_to_openai_messages(found))]
    record.texts, record.lists = texts, lists


def _walk(root: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """Every text and list of messages within a value, with the path to it; what lies deeper comes later.

    Types are asked, and their own methods: one of the user's might load what was not needed yet, as might `isinstance`.
    """
    ahead: deque[tuple[Path, Any]] = deque([((root,), value)])
    for _ in range(MAX_VALUES):
        if not ahead:
            return
        path, value = ahead.popleft()
        kind = type(value)
        if issubclass(kind, str):
            yield path, value
        elif issubclass(kind, BaseMessage):
            yield path, value.text
        elif (is_messages := _is_messages(value)) or len(path) <= MAX_DEPTH:
            if is_messages:
                yield path, value
            inner = (((*path, name), item) for name, item in _children(value) if isinstance(name, str | int))
            ahead.extend(itertools.islice(inner, MAX_VALUES - len(ahead)))


def _is_messages(value: Any) -> bool:
    return type(value) is list and bool(value) and all(issubclass(type(item), BaseMessage) for item in value)


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    kind = type(value)
    if issubclass(kind, dict):
        return list(itertools.islice(dict.items(value), MAX_VALUES))
    for sequence in (list, tuple):
        if issubclass(kind, sequence):
            return enumerate(itertools.islice(sequence.__iter__(value), MAX_VALUES))
    return list(vars(value).items()) if kind.__dictoffset__ and not callable(value) else []


def sources_of(record: CallRecord, answers: Answers) -> Sources:
    """What a prompt that follows `record` may be made of."""
    return Sources(answers=dict(answers.items()), texts=record.texts, lists=record.lists, turn=record.turn)
