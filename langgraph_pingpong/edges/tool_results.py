"""What tools return, heard as they return it: through LangChain's own callbacks, with nothing put into the graph.

Tools are not touched: a handler that every run of a tool reports to looks whether somebody waits for its result. What
a tool says before its end counts where it is known to be the beginning of its result: the pieces of a
`streaming_tool`, and what a tool writes to LangGraph's stream, once its last run has shown that its result begins so.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage, convert_to_openai_messages
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.types import Command

from langgraph_pingpong.edges.langgraph_streams import run_of, tee_output_deltas
from langgraph_pingpong.errors import ConfigError
from langgraph_pingpong.tokens import Message, as_text

MAX_TOOLS = 1024
"""Tools of which it is remembered whether they write their results to the stream."""

Tell = Callable[[str, str | None, bool], None]
"""Takes more of the result of a tool call: its id, the text, and whether that was all.

None instead of the text: the tool failed, or, if that was all, what it returned is another one than was told, or none.
"""


@dataclass
class Waiting:
    """A tool call whose result is waited for."""

    id: str
    name: str
    args: Mapping[str, Any]
    tell: Tell
    begun: bool = False
    _told: list[str] = field(default_factory=list)
    _written: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def piece(self, text: str) -> None:
        """The tool said more of its result."""
        with self._lock:
            self._told.append(text)
            self.tell(self.id, text, False)

    def wrote(self, value: Any) -> None:
        """The tool wrote something to the stream, which may be of its result."""
        if not isinstance(value, str):
            return
        self._written.append(value)
        if _WRITES_RESULT.get(self.name):
            self.piece(value)

    def failed(self) -> None:
        """The tool raised. If it is run again, that is heard, unless the prompt holds pieces of this try."""
        with self._lock:
            self.begun = bool(self._told)
            self._written.clear()
            self.tell(self.id, None, False)

    def returned(self, text: str | None) -> None:
        """The tool is over; None if its result is no text."""
        with self._lock:
            written, told = "".join(self._written), "".join(self._told)
            if written:
                _note_writer(self.name, text is not None and text.startswith(written))
            self.tell(self.id, text[len(told) :] if text is not None and text.startswith(told) else None, True)


_WRITES_RESULT: dict[str, bool] = {}
_WAITING: dict[int, list[Waiting]] = {}  # by the identity of the run, which whoever waits keeps alive
_LOCK = threading.Lock()
_CURRENT: ContextVar[Waiting | None] = ContextVar("langgraph_pingpong_tool_call", default=None)


def _note_writer(name: str, writes_result: bool) -> None:
    if len(_WRITES_RESULT) >= MAX_TOOLS:
        _WRITES_RESULT.clear()
    _WRITES_RESULT[name] = writes_result


def listen(owner: object, calls: Sequence[Mapping[str, Any]], tell: Tell) -> Callable[[], None]:
    """Tell of the results of these tool calls of a run, from now on; returns what ends that.

    `tell` is called in the threads of the tools.
    """
    _install()
    waiting = [Waiting(call["id"], call["name"], call["args"], tell) for call in calls]
    with _LOCK:
        _WAITING.setdefault(id(owner), []).extend(waiting)

    def stop() -> None:
        with _LOCK:
            left = [each for each in _WAITING.pop(id(owner), ()) if each not in waiting]
            if left:
                _WAITING[id(owner)] = left

    return stop


def wrote(value: Any) -> None:
    """Something was written to LangGraph's stream, by whoever runs in this context."""
    if (current := _CURRENT.get()) is not None:
        current.wrote(value)


def _begin(call_id: str | None, name: str, inputs: Mapping[str, Any] | None) -> Waiting | None:
    """The call that is about to run. One that a node makes by hand has no id: it is told by its name and arguments."""
    owner = run_of(ensure_config())
    with _LOCK:
        waiting = [each for each in _WAITING.get(id(owner), ()) if not each.begun]
        for each in waiting:
            if each.id == call_id if call_id else (each.name, each.args) == (name, inputs):
                each.begun = True
                return each
    return None


class ToolWatch(BaseCallbackHandler):
    """Hears of every tool's start and end, in the tool's own thread and context."""

    run_inline = True

    def __init__(self) -> None:
        self._running: dict[UUID, Waiting] = {}

    @property
    def _ignored(self) -> bool:
        return True

    ignore_llm = ignore_retry = ignore_chain = ignore_retriever = ignore_chat_model = ignore_custom_event = _ignored

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        inputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool begins. One that runs within another is none that the model called."""
        if not _WAITING:
            return
        call = _begin(kwargs.get("tool_call_id"), (serialized or {}).get("name", ""), inputs)
        if call is not None:
            self._running[run_id] = call
            _CURRENT.set(call)
            tee_output_deltas(call.wrote)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool is over."""
        if (call := self._running.pop(run_id, None)) is not None:
            _CURRENT.set(None)
            call.returned(_text(output, call.id))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool failed: what the model gets to read is up to others."""
        if (call := self._running.pop(run_id, None)) is not None:
            _CURRENT.set(None)
            call.failed()


_WATCH: ContextVar[ToolWatch | None] = ContextVar("langgraph_pingpong_tool_watch", default=ToolWatch())  # noqa: B039


def hear_nothing() -> None:
    """Let the watch hear no tool that runs in this context."""
    _WATCH.set(None)


@functools.cache
def _install() -> None:
    """Let every run of a tool in this process report to the watch, not before the first is waited for."""
    register_configure_hook(_WATCH, inheritable=False)


def _text(output: Any, call_id: str) -> str | None:
    """The text of a tool's result, as it will stand in the message for the model; None if it is something else."""
    if isinstance(output, Command):
        update = output.update if isinstance(output.update, Mapping) else {}
        output = update.get("messages")
    if isinstance(output, list):
        answers = [each for each in output if isinstance(each, ToolMessage) and each.tool_call_id == call_id]
        output = answers[0] if len(answers) == 1 else None
    if isinstance(output, ToolMessage):
        output = as_text(cast("Message", convert_to_openai_messages(output)))["content"]
    return output if isinstance(output, str) else None


def streaming_tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tool that says its result piece by piece, from a generator function, async or not, that yields texts.

    Its result is all pieces in a row. They are prefilled as they come, for the call of the model that reads them:

        @tool
        @streaming_tool
        def search(query: str) -> Iterator[str]:
            \"\"\"Search the shore.\"\"\"
            for hit in hits(query):
                yield hit

    Raises:
        ConfigError: it is no generator function.
    """
    if inspect.isasyncgenfunction(function):

        async def awhole(*args: Any, **kwargs: Any) -> str:
            pieces = cast("AsyncIterator[str]", function(*args, **kwargs))
            return "".join([_said(piece) async for piece in pieces])

        return functools.wraps(function)(awhole)
    if not inspect.isgeneratorfunction(function):
        raise ConfigError(f"streaming_tool needs a function that yields texts, not {function!r}.")

    def whole(*args: Any, **kwargs: Any) -> str:
        return "".join([_said(piece) for piece in cast("Iterator[str]", function(*args, **kwargs))])

    return functools.wraps(function)(whole)


def _said(piece: str) -> str:
    if (current := _CURRENT.get()) is not None:
        current.piece(piece)
    return piece
