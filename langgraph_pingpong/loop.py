"""The library's own event loop, in a thread of its own.

Engines are tied to the loop that started them. Callers are not: they come from scripts without a loop, from
notebooks with a running one, from several `asyncio.run` in a row and from threads. So the engines live on this
loop and everyone else reaches them by submitting to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CLOSED = "the call was cancelled, or its engines were closed, while it was running"


@dataclass(frozen=True, slots=True)
class Remote(Generic[T]):
    """A task on the loop thread: `ended` resolves when it is really over, also after `cancel()`."""

    ended: Future[T]
    cancel: Callable[[], None]


class _Stop:
    """Ends a stream; `error` is what the source raised, if it did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self, name: str = "langgraph-pingpong") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Remote[T]:
        """Start a coroutine on the loop thread.

        Raises:
            RuntimeError: the loop thread was closed.
        """
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(lambda done: _copy_outcome(done, ended))
            tasks.append(task)

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to cancel
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            work.close()
            raise
        return Remote(ended, cancel)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop thread and wait for it; an interrupt cancels it first."""
        if self.is_current():
            work.close()
            raise RuntimeError("a blocking call from the library's own loop thread would never return")
        remote = self.submit(work)
        try:
            return remote.ended.result()
        except BaseException:
            _cancel_and_wait(remote)
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop thread and await it from any other loop; cancelling cancels it."""
        remote = self.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(remote.ended))
        except asyncio.CancelledError:
            await _acancel_and_wait(remote)
            raise

    def iterate(self, source: Callable[[], AsyncGenerator[T]]) -> Generator[T]:
        """Iterate an async iterator that lives on the loop thread; closing early closes the source."""
        items: queue.SimpleQueue[T | _Stop] = queue.SimpleQueue()
        remote = self.submit(_pump(source, items.put))
        try:
            while not isinstance(item := items.get(), _Stop):
                yield item
            _raise(item.error)
        finally:
            _cancel_and_wait(remote)

    async def aiterate(self, source: Callable[[], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """Like `iterate`, for a caller on any other event loop."""
        items: asyncio.Queue[T | _Stop] = asyncio.Queue()
        caller = asyncio.get_running_loop()

        def put(item: T | _Stop) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is gone, and with it the reader
                caller.call_soon_threadsafe(items.put_nowait, item)

        remote = self.submit(_pump(source, put))
        try:
            while not isinstance(item := await items.get(), _Stop):
                yield item
            _raise(item.error)
        finally:
            await _acancel_and_wait(remote)

    def close(self) -> None:
        """Cancel what still runs, then end the thread. Safe to call twice, not from the thread itself."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._cancel_all_and_stop)
        self._thread.join()
        self._loop.close()

    def _cancel_all_and_stop(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self._loop.stop())


async def _pump(source: Callable[[], AsyncGenerator[T]], put: Callable[[T | _Stop], None]) -> None:
    """Drive `source` to its end or its error; whoever reads `put` always gets a `_Stop` last."""
    error: BaseException | None = None
    iterator = source()
    try:
        async for item in iterator:
            put(item)
    except BaseException as exc:
        error = exc
        if isinstance(exc, asyncio.CancelledError):
            raise
    finally:
        aclose = getattr(iterator, "aclose", None)
        if aclose is not None:
            await aclose()
        put(_Stop(error))


def _copy_outcome(task: asyncio.Task[T], ended: Future[T]) -> None:
    if task.cancelled():
        ended.set_exception(RuntimeError(_CLOSED))
    elif error := task.exception():
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


def _cancel_and_wait(remote: Remote[Any]) -> None:
    if not remote.ended.done():
        remote.cancel()
        with contextlib.suppress(BaseException):
            remote.ended.result()


async def _acancel_and_wait(remote: Remote[Any]) -> None:
    if not remote.ended.done():
        remote.cancel()
        with contextlib.suppress(Exception):
            await asyncio.shield(asyncio.wrap_future(remote.ended))


def _raise(error: BaseException | None) -> None:
    if isinstance(error, asyncio.CancelledError):
        raise RuntimeError(_CLOSED)
    if error is not None:
        raise error
