"""One stream of events from every layer; it feeds reports, pictures and logs.

Events come in the order they happened. `t` is `time.monotonic()` in seconds, so that differences within one
process are exact; names follow `x.started / x.complete / x.failed`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from langgraph_pingpong.errors import NotATrace

logger = logging.getLogger(__name__)

_encode = json.JSONEncoder(ensure_ascii=False).encode  # made once: events come often


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at time `t` (s, monotonic) in one run of a graph.

    `run` names the run, `node` the node whose prompt or answer it concerns, `device` where it happened;
    `data` holds what else is known (token counts, milliseconds).
    """

    name: str
    t: float
    run: str
    node: str
    device: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The event as one line of JSON."""
        return _encode({name: getattr(self, name) for name in self.__slots__})


Sink = Callable[[Event], None]


class Trace:
    """Hands events to every subscribed sink, from whatever thread they come."""

    def __init__(self, origin: Trace | None = None) -> None:
        self._sinks: list[Sink] = []
        self._callers: list[Callable[[str], None]] = []
        self._origin = origin

    @property
    def origin(self) -> Trace:
        """Where all events go that come here: itself, unless it was made by `also_to`."""
        return self._origin or self

    def emit(self, name: str, *, run: str, node: str, device: str, **data: Any) -> float:
        """Record an event now and return its time (s, monotonic)."""
        now = time.monotonic()
        if sinks := (*self._sinks, *(self._origin._sinks if self._origin else ())):
            event = Event(name, now, run, node, device, data)
            for sink in sinks:
                _hand_over(event, sink)
        return now

    def also_to(self, sink: Sink) -> Trace:
        """A trace whose events go to `sink`, and to whoever listens to this one."""
        trace = Trace(self.origin)
        trace.subscribe(sink)
        return trace

    @contextmanager
    def subscribed(self, sink: Sink) -> Iterator[None]:
        """Send events to `sink` while the block runs."""
        self.subscribe(sink)
        try:
            yield
        finally:
            self._sinks.remove(sink)

    def subscribe(self, sink: Sink) -> None:
        """Send every event from now on to `sink`; it is called in the thread that emits and must not block."""
        self._sinks.append(sink)

    def on_call(self, hook: Callable[[str], None]) -> None:
        """Give `hook` the request id of each call, in the thread and the context of the program that makes it.

        It is no event: events come from the thread of the engines, where nothing of a caller's context is known.
        """
        self._callers.append(hook)

    def called(self, request: str) -> None:
        """The program makes a call, here and now."""
        for hook in tuple(self._callers):
            try:
                hook(request)
            except Exception:
                logger.exception("A hook of the trace raised on a call")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Whoever listens to a model hears its copies too."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Whoever listens stays in this process."""
        return type(self), ()


def _hand_over(event: Event, sink: Sink) -> None:
    try:
        sink(event)
    except Exception:
        logger.exception("A sink of the trace raised on %r", event.name)


class JsonLines:
    """A sink that writes one JSON object a line, flushed at once."""

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.Lock()
        self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def __call__(self, event: Event) -> None:
        """Write one event."""
        with self._lock:
            self._file.write(event.to_json() + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path | str) -> list[Event]:
    """The events in a file that `JsonLines` wrote, in their order; a last line that was cut off is left out.

    Raises:
        NotATrace: the file cannot be read, or holds something else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise NotATrace(f"{path} cannot be read: {error}.") from None
    try:
        events = [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
    except (ValueError, TypeError):
        raise NotATrace(f"{path} holds something else than events.") from None
    if not events:
        raise NotATrace(f"{path} holds no event.")
    return events
