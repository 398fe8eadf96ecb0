"""The library's own event loop, in a thread of its own.

Engines are tied to the loop that started them. Callers are not: they come from scripts without a loop, from
notebooks with a running one, from several `asyncio.run` in a row and from threads. So the engines live on this
loop and everyone else reaches them by submitting to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from langgraph_pingpong.errors import EngineDead

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remote(Generic[T]):
    """A task on the loop thread: `ended` resolves when it is really over, also after `cancel()`."""

    ended: Future[T]
    cancel: Callable[[], None]


FORKED = "The engines belong to the process that this one was forked from."
"""Why nothing can be asked of a loop that is elsewhere."""

_WOULD_BLOCK = "a blocking call from the library's own loop thread would never return"


class _Stop:
    """Ends a stream; `error` is what the source raised, if it did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str = "langgraph-pingpong") -> None:
        # In an empty context, as everything here: the loop would keep that of the node that made it.
        self._loop = contextvars.Context().run(asyncio.new_event_loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._submitting = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread.start()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the loop runs in another process: a fork copies the object, and not its thread."""
        return os.getpid() != self._process

    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Remote[T]:
        """Start a coroutine on the loop thread.

        Raises:
            EngineDead: the loop thread was closed, or runs in another process.
        """
        if self.is_elsewhere:
            work.close()
            raise EngineDead(FORKED)
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda done: _copy_outcome(done, ended))
            tasks.append(task)

        def cancel() -> None:
            self.call_soon(lambda: tasks[0].cancel())

        with self._submitting:
            if self._closed:
                work.close()
                raise EngineDead("The engines were closed.")
            # In an empty context: the caller's would be kept by whatever the task schedules.
            self._loop.call_soon_threadsafe(start, context=contextvars.Context())
        return Remote(ended, cancel)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback on the loop thread, if it still runs; safe from anywhere, finalizers included."""
        if self.is_elsewhere:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args, context=contextvars.Context())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop thread and wait for it; an interrupt cancels it first."""
        if self.is_current():
            work.close()
            raise RuntimeError(_WOULD_BLOCK)
        remote = self.submit(work)
        try:
            return remote.ended.result()
        except BaseException:
            self._cancel_and_wait(remote)
            raise

    def iterate(self, source: Callable[[], AsyncGenerator[T]]) -> Generator[T]:
        """Iterate an async iterator that lives on the loop thread; closing early closes the source."""
        if self.is_current():
            raise RuntimeError(_WOULD_BLOCK)
        items: queue.SimpleQueue[T | _Stop] = queue.SimpleQueue()
        remote = self.submit(_pump(source, items.put))
        remote.ended.add_done_callback(lambda ended: items.put(_Stop(ended.exception())))
        try:
            while not isinstance(item := items.get(), _Stop):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            self._cancel_and_wait(remote)

    async def aiterate(self, source: Callable[[], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Like `iterate`, for a caller on any other event loop."""
        items: asyncio.Queue[T | _Stop] = asyncio.Queue()
        caller = asyncio.get_running_loop()

        def put(item: T | _Stop) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone, and with it the reader
                caller.call_soon_threadsafe(items.put_nowait, item)

        remote = self.submit(_pump(source, put))
        remote.ended.add_done_callback(lambda ended: put(_Stop(ended.exception())))
        try:
            while not isinstance(item := await items.get(), _Stop):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            await _acancel_and_wait(remote)

    def close(self) -> None:
        """Cancel what still runs, then end the thread. Safe to call twice, not from the thread itself."""
        if self.is_elsewhere:
            return
        with self._submitting:  # what was submitted before is cancelled, what comes after is refused
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._cancel_all_and_stop)
        self._thread.join()
        self._loop.close()

    def _cancel_all_and_stop(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        if not tasks:
            self._loop.stop()
            return
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._cancel_all_and_stop())

    def _cancel_and_wait(self, remote: Remote[Any]) -> None:
        if remote.ended.done() or self.is_elsewhere:
            return
        remote.cancel()
        if self.is_current():  # an abandoned stream that is collected here: the loop cannot wait for itself
            return
        with contextlib.suppress(BaseException):
            remote.ended.result()


async def all_at_once(source: AsyncGenerator[T]) -> AsyncGenerator[list[T]]:
    """All that a source gives, in one piece once it has ended: for a caller who has no use for the pieces."""
    async with contextlib.aclosing(source) as items:
        yield [item async for item in items]


async def _pump(source: Callable[[], AsyncGenerator[T]], put: Callable[[T], None]) -> None:
    async with contextlib.aclosing(source()) as items:
        async for item in items:
            put(item)


def _copy_outcome(task: asyncio.Task[T], ended: Future[T]) -> None:
    if task.cancelled():
        ended.set_exception(EngineDead("The engines were closed while the call was running."))
    elif error := task.exception():
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


async def _acancel_and_wait(remote: Remote[Any]) -> None:
    if remote.ended.done():
        return
    remote.cancel()
    caller, over = asyncio.get_running_loop(), asyncio.Event()

    def ended(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is gone, and with it whoever waited
            caller.call_soon_threadsafe(over.set)

    remote.ended.add_done_callback(ended)
    # Not on a future with the outcome: where nobody is left to ask for its error, the loop would complain.
    await over.wait()
