"""The library's loop thread: callers of any kind reach it, and none of them can hang on it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from langgraph_pingpong.errors import EngineDead
from langgraph_pingpong.loop import LoopThread, Remote, _acancel_and_wait


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


async def forever() -> None:
    await asyncio.Event().wait()


async def answer(value: Any = 42) -> Any:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("wrong")


class Source:
    """Counts to a number, or fails there, and remembers whether it was closed."""

    def __init__(self, upto: int = 3, error: Exception | None = None, gap_s: float = 0.0) -> None:
        self.upto, self.error, self.gap_s = upto, error, gap_s
        self.closed = threading.Event()

    async def __call__(self) -> AsyncGenerator[int]:
        try:
            for number in range(self.upto):
                yield number
                await asyncio.sleep(self.gap_s)
            if self.error:
                raise self.error
        finally:
            self.closed.set()


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def pending(loop: LoopThread) -> int:
    async def others() -> int:
        return len(asyncio.all_tasks()) - 1

    return loop.run(others())


class TestRun:
    def test_gives_the_result(self, loop: LoopThread) -> None:
        assert loop.run(answer()) == 42

    def test_works_while_the_caller_has_a_running_loop(self, loop: LoopThread) -> None:
        async def from_a_notebook() -> Any:
            return loop.run(answer())

        assert asyncio.run(from_a_notebook()) == 42

    def test_raises_what_the_work_raised(self, loop: LoopThread) -> None:
        with pytest.raises(ValueError, match="wrong"):
            loop.run(fail())

    def test_on_its_own_thread_is_refused(self, loop: LoopThread) -> None:
        async def blocking() -> None:
            loop.run(answer())

        with pytest.raises(RuntimeError, match="would never return"):
            loop.run(blocking())

    def test_iterating_on_its_own_thread_is_refused(self, loop: LoopThread) -> None:
        async def blocking() -> None:
            next(loop.iterate(Source()))

        with pytest.raises(RuntimeError, match="would never return"):
            loop.run(blocking())

    def test_an_interrupt_cancels_the_work_first(self, loop: LoopThread) -> None:
        ended = threading.Event()

        async def work() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(0.1)
                ended.set()

        main = threading.main_thread().ident
        threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert ended.is_set()


class TestIterate:
    def test_gives_every_item(self, loop: LoopThread) -> None:
        assert list(loop.iterate(Source(5))) == [0, 1, 2, 3, 4]

    def test_raises_the_sources_error_after_its_items(self, loop: LoopThread) -> None:
        items = loop.iterate(Source(2, ValueError("wrong")))
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(ValueError, match="wrong"):
            next(items)

    def test_closing_early_closes_the_source(self, loop: LoopThread) -> None:
        source = Source(1000, gap_s=0.01)
        items = loop.iterate(source)
        next(items)
        items.close()
        assert source.closed.is_set()
        assert pending(loop) == 0

    def test_a_generator_that_was_never_begun_costs_nothing(self, loop: LoopThread) -> None:
        loop.iterate(Source()).close()
        assert pending(loop) == 0

    def test_an_abandoned_generator_is_closed(self, loop: LoopThread) -> None:
        source = Source(1000, gap_s=0.01)
        next(loop.iterate(source))
        gc.collect()
        assert source.closed.wait(1)

    def test_a_generator_may_be_collected_on_the_loops_own_thread(self, loop: LoopThread) -> None:
        """The collector runs in whatever thread happens to allocate."""
        source = Source(1000, gap_s=0.01)
        items = loop.iterate(source)
        next(items)

        async def collect() -> None:
            items.close()

        remote = loop.submit(collect())
        remote.ended.result(timeout=2)
        assert source.closed.wait(1)

    def test_the_source_failing_to_clean_up_is_an_error(self, loop: LoopThread) -> None:
        async def source() -> AsyncGenerator[int]:
            try:
                yield 1
            finally:
                raise ValueError("not cleaned up")

        with pytest.raises(ValueError, match="not cleaned up"):
            list(loop.iterate(source))


class TestAiterate:
    async def test_gives_every_item(self, loop: LoopThread) -> None:
        assert [item async for item in loop.aiterate(Source(5))] == [0, 1, 2, 3, 4]

    async def test_raises_the_sources_error_after_its_items(self, loop: LoopThread) -> None:
        seen = []
        with pytest.raises(ValueError, match="wrong"):
            async for item in loop.aiterate(Source(2, ValueError("wrong"))):
                seen.append(item)
        assert seen == [0, 1]

    async def test_closing_early_closes_the_source(self, loop: LoopThread) -> None:
        source = Source(1000, gap_s=0.01)
        async with contextlib.aclosing(loop.aiterate(source)) as items:
            await anext(items)
        assert source.closed.is_set()
        assert pending(loop) == 0

    async def test_cancelling_the_reader_closes_the_source(self, loop: LoopThread) -> None:
        source = Source(1000, gap_s=0.01)

        async def read() -> None:
            async with contextlib.aclosing(loop.aiterate(source)) as items:
                async for _ in items:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.closed.is_set()

    def test_a_wait_that_was_cancelled_leaves_no_error_behind(self, caplog: pytest.LogCaptureFixture) -> None:
        """The reader's loop may end in the very step in which the source has."""
        ended: Future[None] = Future()
        reading = asyncio.new_event_loop()

        async def leave(remote: Remote[None]) -> None:
            waiting = asyncio.create_task(_acancel_and_wait(remote))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])

        reading.run_until_complete(leave(Remote(ended, lambda: None)))
        ended.set_exception(EngineDead("The engines were closed while the call was running."))
        reading.call_soon(reading.stop)
        reading.run_forever()
        reading.close()
        del ended
        gc.collect()
        assert caplog.messages == []

    def test_a_reader_whose_loop_ends_does_not_disturb_the_next(self, loop: LoopThread) -> None:
        async def read_one() -> int:
            return await anext(loop.aiterate(Source(1000, gap_s=0.001)))

        assert [asyncio.run(read_one()), asyncio.run(read_one())] == [0, 0]
        assert list(loop.iterate(Source(2))) == [0, 1]


class TestClose:
    def test_ends_the_thread_and_may_be_repeated(self) -> None:
        loop = LoopThread("to be closed")
        loop.close()
        loop.close()
        assert "to be closed" not in [thread.name for thread in threading.enumerate()]

    def test_ends_calls_that_wait(self) -> None:
        loop = LoopThread()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                loop.run(forever())
            except EngineDead as error:
                errors.append(error)

        thread = in_thread(wait)
        time.sleep(0.05)
        loop.close()
        thread.join(2)
        assert not thread.is_alive()
        assert "closed while" in str(errors[0])

    def test_ends_streams_that_are_read(self) -> None:
        loop = LoopThread()
        items = loop.iterate(Source(1000, gap_s=0.01))
        next(items)
        threading.Timer(0.1, loop.close).start()
        with pytest.raises(EngineDead, match="closed while"):
            list(items)

    async def test_ends_streams_that_are_awaited(self) -> None:
        loop = LoopThread()
        threading.Timer(0.1, loop.close).start()
        with pytest.raises(EngineDead, match="closed while"):
            async for _ in loop.aiterate(Source(1000, gap_s=0.01)):
                pass

    def test_ends_a_stream_that_had_no_time_to_begin(self) -> None:
        loop = LoopThread()
        self.keep_busy(loop, 0.2)
        outcome: list[Any] = []

        def read() -> None:
            try:
                outcome.append(list(loop.iterate(Source())))
            except EngineDead as error:
                outcome.append(error)

        reader = in_thread(read)
        time.sleep(0.05)
        loop.close()
        reader.join(2)
        assert not reader.is_alive()
        assert isinstance(outcome[0], EngineDead)

    def test_work_that_comes_while_it_closes_is_refused(self) -> None:
        loop = LoopThread()

        async def slow_to_end() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(0.3)

        loop.submit(slow_to_end())
        time.sleep(0.05)
        closing = in_thread(loop.close)
        time.sleep(0.05)
        outcome: list[BaseException] = []

        def late() -> None:
            try:
                loop.run(answer())
            except EngineDead as error:
                outcome.append(error)

        thread = in_thread(late)
        thread.join(2)
        closing.join(2)
        assert not thread.is_alive()
        assert outcome

    def test_work_after_it_is_refused(self) -> None:
        loop = LoopThread()
        loop.close()
        with pytest.raises(EngineDead, match="closed"):
            loop.run(answer())
        with pytest.raises(EngineDead, match="closed"):
            list(loop.iterate(Source()))

    def test_waits_for_what_cleaning_up_starts(self) -> None:
        loop = LoopThread()
        tidied = threading.Event()

        async def tidy() -> None:
            try:
                await asyncio.sleep(0.1)
            finally:
                tidied.set()

        async def leave_work() -> None:
            try:
                await forever()
            finally:
                self.kept = asyncio.create_task(tidy())

        loop.submit(leave_work())
        time.sleep(0.05)
        loop.close()
        assert tidied.is_set()
        assert self.kept.done()

    @staticmethod
    def keep_busy(loop: LoopThread, seconds: float) -> None:
        async def block() -> None:
            time.sleep(seconds)  # noqa: ASYNC251 - a busy loop is the point

        loop.submit(block())
