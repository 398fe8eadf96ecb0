"""Prompts that grow on a vLLM engine, as requests with streaming input: only what is new is sent.

The answer is never taken from such a request: it is an ordinary one with the whole prompt, which finds the blocks in
the prefix cache. So what is known to be wrong with streaming input in some releases (an answer that ends after one
token, refused stop strings) does not matter, as long as the blocks are right; `are_sound` tries that at the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.engines.base import Appends, Delta, Engine, Request
from langgraph_pingpong.errors import CallRefused, EngineDead
from langgraph_pingpong.kv_budget import KvBudget

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.outputs import RequestOutput

IDLE_S = 60.0
"""How long a prompt stays open without a new piece, in seconds. Then it is closed; its blocks stay cached."""

ONE_IN = 4
"""Of the requests that an engine runs at once, one in so many may be an open prompt: each takes a place."""

AHEAD = 1024
"""Tokens that are kept free for an answer at a time; twice as many beyond what it has."""

SINCE = (0, 26)
"""The first release of vLLM that prompts grow on; no older one was tried."""

TRY_S = 60.0
"""How long trying them at the start may take, in seconds; it takes well under one."""

TOLERANCE = 0.25
"""How far apart (in nats) the log-probability of a token may be with the prompt in pieces and in one."""

Pieces = AsyncGenerator["StreamingInput"]
Stream = Callable[[Pieces], AsyncGenerator["RequestOutput"]]
"""Sends a request with streaming input; it gives one output a piece."""


class VllmAppends:
    """One prompt that grows on one engine."""

    def __init__(
        self, book: AppendsBook, stream: Stream, cache_salt: str | None, max_model_len: int, keep: bool = False
    ) -> None:
        self.keep = keep
        """Whether it stays open until it is closed, whoever needs the room: an anchor."""
        self.tokens = 0
        """How many tokens of the prompt are computed."""
        self.held = 0
        """The same, and those of the piece under way."""
        self._book = book
        self._stream = stream
        self._cache_salt = cache_salt
        self._max_model_len = max_model_len
        self._pieces: asyncio.Queue[Sequence[int]] = asyncio.Queue()
        self._computed: asyncio.Future[int | None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(lambda _: self._ended())
        self._stay_open()

    @property
    def is_open(self) -> bool:
        """Whether it holds what was computed, and more may come."""
        return not self._task.done() and not self._task.cancelling()

    @property
    def computing(self) -> bool:
        """Whether a piece is under way."""
        return self._computed is not None

    async def append(self, ids: Sequence[int]) -> int | None:
        """Compute more of the prompt: whole blocks, one piece at a time.

        Returns how many of its tokens were there already, or None if it had been closed.

        Raises:
            CallRefused: the prompt leaves no room for an answer.
            EngineDead: the engine's process ended.
        """
        if self.tokens + len(ids) >= self._max_model_len:
            raise CallRefused(f"A prompt of {self.tokens + len(ids)} tokens leaves no room for an answer.")
        if self._task.done():
            return None
        self.held = self.tokens + len(ids)
        self._book.make_room(keep=self)
        self._stay_open()
        self._computed = asyncio.get_running_loop().create_future()
        self._pieces.put_nowait(ids)
        try:
            found = await self._computed
        except asyncio.CancelledError:
            self.let_go()
            raise
        if found is not None:
            self.tokens = self.held
        return found

    async def close(self) -> None:
        """Let go of the KV cache. Safe to call twice."""
        self.let_go()
        await asyncio.wait([self._task])

    def let_go(self) -> None:
        """Close it soon: the abort goes out when the loop comes to it."""
        self._task.cancel()

    def _stay_open(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if not self.keep:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.let_go)

    async def _read(self) -> None:
        """Count outputs, not their labels: what an output says of its prompt is one piece late."""
        try:
            async with aclosing(self._stream(self._inputs())) as outputs:
                async for output in outputs:
                    self._settle(max(self.tokens, output.num_cached_tokens or 0))
        except Exception as error:  # noqa: BLE001 - for whoever waits for the piece
            self._settle(error)

    def _ended(self) -> None:
        self._settle(None)
        self._book.forget(self)
        if self._idle is not None:
            self._idle.cancel()

    async def _inputs(self) -> Pieces:
        from vllm.engine.protocol import StreamingInput

        while True:
            piece = Request(tuple(await self._pieces.get()), cache_salt=self._cache_salt)
            yield StreamingInput(prompt=token_prompt(piece))  # type: ignore[arg-type]

    def _settle(self, outcome: int | Exception | None) -> None:
        waiting, self._computed = self._computed, None
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, Exception):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)


class AppendsBook:
    """The open prompts of one engine, oldest use first, and who has to go when answers need the room.

    Tokens of answers count ahead of time, so that an answer never waits for an open prompt.
    """

    def __init__(self, budget: KvBudget, max_open: int) -> None:
        """Take the budget of the KV cache, and how many prompts may be open."""
        self.budget = budget
        self.max_open = max_open
        self._open: dict[VllmAppends, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def held(self) -> int:
        """Tokens that open prompts hold, beside those that are kept."""
        return sum(each.held for each in self._open if not each.keep)

    @property
    def computing(self) -> int:
        """Open prompts of which a piece is computed at this moment."""
        return sum(each.computing for each in self._open)

    def open(
        self, stream: Stream, cache_salt: str | None, max_model_len: int, *, keep: bool = False
    ) -> VllmAppends | None:
        """Open a prompt, unless too many are. For one that shall be kept, the one used least recently goes."""
        if keep and len(self._open) >= self.max_open:
            self._close_oldest()
        if len(self._open) >= self.max_open:
            return None
        appends = VllmAppends(self, stream, cache_salt, max_model_len, keep)
        self._open[appends] = None
        return appends

    def _close_oldest(self) -> None:
        for appends in self._open:
            if not appends.keep:
                self.forget(appends)
                appends.let_go()
                return

    def make_room(self, keep: VllmAppends | None = None) -> None:
        """Close the prompts that were used least recently until the others fit; `keep` was used just now."""
        if keep in self._open:
            self._open[keep] = self._open.pop(keep)
        held, room = self.held, self.budget.room
        for appends in [each for each in self._open if not each.keep]:
            if held <= room:
                break
            held -= appends.held
            del self._open[appends]
            appends.let_go()
        self.budget.prompts = held

    @contextmanager
    def answer(self, prompt: int, longest: int) -> Iterator[Callable[[int], None]]:
        """An answer is under way: tokens of its prompt, and of the longest answer it may get.

        What is yielded is told how many tokens it has. Room is kept for some more than those, not for the longest
        answer, which without a limit is all of the context.
        """
        kept = 0

        def reach(said: int) -> None:
            nonlocal kept
            wanted = prompt + min((said // AHEAD + 2) * AHEAD, longest)
            if wanted > kept:
                self.budget.answering += wanted - kept
                kept = wanted
                self.make_room()

        reach(0)
        try:
            yield reach
        finally:
            self.budget.answering -= kept

    def forget(self, appends: VllmAppends) -> None:
        """A prompt was closed."""
        self._open.pop(appends, None)
        self.budget.prompts = self.held

    def let_go(self) -> None:
        """Close every prompt soon."""
        for appends in self._open:
            appends.let_go()

    async def close(self) -> None:
        """Close every prompt."""
        for appends in list(self._open):
            await appends.close()


def token_prompt(request: Request) -> dict[str, Any]:
    """A prompt in the form that vLLM takes."""
    salted = {"cache_salt": request.cache_salt} if request.cache_salt else {}
    return {"type": "token", "prompt_token_ids": list(request.prompt_token_ids), **salted}


async def are_sound(engine: Engine) -> bool:
    """Whether a prompt that grows fills the cache with what a whole prompt does, tried on four blocks.

    Two things can be wrong: the answer does not find the blocks, or it finds other content in them. The first shows
    in the count, the second in the log-probability of the likeliest next token.
    """
    size = engine.block_size
    prompt = tuple(7 * i % 997 + 3 for i in range(4 * size + 2))
    if len(prompt) >= engine.max_model_len:
        return False
    await engine.reset_prefix_cache()
    cold = await _first_token(engine, prompt)
    await engine.reset_prefix_cache()
    try:
        async with asyncio.timeout(TRY_S):
            if not await _grow(
                engine.open_appends(), (prompt[: 2 * size], prompt[2 * size : 3 * size], prompt[3 * size : 4 * size])
            ):
                return False
            warm = await _first_token(engine, prompt)
    except EngineDead:
        raise
    except Exception:  # noqa: BLE001 - whatever is wrong with them, prefills do as well
        return False
    return warm.num_cached_tokens == 4 * size and _agree(cold, warm)


async def _grow(appends: Appends | None, pieces: Sequence[Sequence[int]]) -> bool:
    """Append piece by piece; whether each was computed."""
    if appends is None:
        return False
    try:
        return None not in [await appends.append(piece) for piece in pieces]
    finally:
        await appends.close()


async def _first_token(engine: Engine, prompt: tuple[int, ...]) -> Delta:
    request = Request(prompt, {"max_tokens": 1, "temperature": 0.0, "logprobs": 5, "ignore_eos": True})
    async with aclosing(engine.generate(request)) as deltas:
        return await anext(deltas)


def _agree(cold: Delta, warm: Delta) -> bool:
    """Whether the likeliest token is about as likely; rounding may differ."""
    token = cold.logprobs[0]
    found = dict(warm.logprobs[0].top).get(token.token)
    return found is not None and abs(found - token.logprob) < TOLERANCE
