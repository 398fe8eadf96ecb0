"""An engine without hardware: deterministic answers, modelled time, a modelled prefix cache, faults on demand.

It serves tests of logic, timing and failure, and lets a graph be tried where no vLLM is installed. Times are what
a device with the given speeds would take; the engine adds them up on a clock of its own and sleeps for that long
times `time_scale` (0: not at all).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.engines.base import ABORTED, Delta, Request, TokenLogprob
from langgraph_pingpong.engines.fake_kv import FakeKv
from langgraph_pingpong.errors import CallRefused, EngineDead
from langgraph_pingpong.kv_budget import KvBudget
from langgraph_pingpong.placement import block_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Reply = Callable[[str], str | Sequence[Delta]]
"""From the prompt's text to the answer: a text, or exact deltas."""

NOTICE_S = 0.01
"""Within what time a request notices that its engine died, in seconds."""

WRONG = "What another prompt was answered."
"""What is said where the cache holds another prompt's KV."""

CLOCK_S = 1e-6
"""What is left of a sleep is no reason for another one if it is shorter, in seconds."""

_WORDS = (
    "tide",
    "pool",
    "crab",
    "shell",
    "sand",
    "wave",
    "moss",
    "rock",
    "foam",
    "gull",
    "kelp",
    "salt",
    "wind",
    "dusk",
)


def fake_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a ChatML template: one token a byte, words as pre-tokens, no file to load."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def pseudo_words(prompt: str) -> str:
    """Forty words that depend on every character of the prompt."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return " ".join(_WORDS[byte % len(_WORDS)] for byte in (digest * 2)[:40])


class FakeAppends:
    """A prompt that grows on a modelled engine, which notes each piece as a prefill of all there is."""

    def __init__(self, engine: FakeEngine, cache_salt: str | None, keep: bool = False) -> None:
        self.keep = keep
        self.held = 0
        """Tokens of the prompt, and of the piece under way."""
        self._engine = engine
        self._cache_salt = cache_salt
        self._ids: tuple[int, ...] = ()
        engine.appends.append(self)

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt are computed."""
        return len(self._ids)

    @property
    def is_open(self) -> bool:
        """Whether what was computed is still held."""
        return self in self._engine.appends

    @property
    def keys(self) -> list[int]:
        """Of the blocks that it holds."""
        return block_keys(self._ids, self._engine.block_size, self._cache_salt)

    async def append(self, ids: Sequence[int]) -> int | None:
        """Compute more of the prompt; one for which there is no room is closed."""
        engine, whole = self._engine, (*self._ids, *ids)
        if not self.keep and engine.budget.prompts + len(whole) - self.held > engine.budget.room:
            self.let_go()
        if not self.is_open:
            return None
        self.held = len(whole)
        engine.count_prompts()
        try:
            found = await self._engine.prefill(Request(whole, cache_salt=self._cache_salt))
        except BaseException:
            self.let_go()
            raise
        self._ids = whole
        return found

    def let_go(self) -> None:
        """Close it."""
        if self in self._engine.appends:
            self._engine.appends.remove(self)
            self._engine.count_prompts()

    async def close(self) -> None:
        """Close it."""
        self.let_go()


@dataclass
class FakeEngine:
    """A modelled engine. Speeds are tokens per second; `fail_prefill` and `fail_generate` are raised when set.

    After `die()` running and later requests fail as those of a process that was killed, until `restart()`, which fails
    with `fail_restart` where that is set.
    """

    device: str = "fake:0"
    tokenizer: Any = field(default_factory=fake_tokenizer, repr=False)
    reply: Reply = pseudo_words
    block_size: int = 16
    max_model_len: int = 32768
    prefill_speed: float = 10_000.0
    decode_speed: float = 100.0
    time_scale: float = 0.0
    fail_prefill: Exception | None = None
    fail_generate: Exception | None = None
    fail_after_tokens: int = 0
    """How many tokens are answered before `fail_generate` is raised."""
    fail_restart: Exception | None = None
    prefill_gate: asyncio.Event | None = None
    """While set and not open, prefills wait."""
    piece_tokens: int = 256
    takes_appends: bool = True
    """Whether prompts may grow; else each append is a prefill of the whole prefix."""
    kv_transfer: bool = False
    """Whether KV can go to other modelled engines, and come from them."""

    clock_ms: float = 0.0
    requests: list[Request] = field(default_factory=list, repr=False)
    prefills: list[Request] = field(default_factory=list, repr=False)
    aborted: list[str] = field(default_factory=list, repr=False)
    running: set[str] = field(default_factory=set)
    appends: list[FakeAppends] = field(default_factory=list, repr=False)
    """The prompts that grow and are open."""
    starts: int = 0
    restarts: int = 0
    stopped: bool = False
    dead: bool = False
    cache_tokens: int | None = None
    """What `cache_tokens` of an engine tells; the modelled cache forgets what `evict` is told to, and nothing else."""
    budget: KvBudget = field(default_factory=KvBudget, repr=False)
    _cache: set[int] = field(default_factory=set, repr=False)
    _lost: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._kv = FakeKv(self) if self.kv_transfer else None

    @property
    def kv(self) -> FakeKv | None:
        """Where KV goes to other modelled engines, and comes from."""
        return self._kv

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and are neither finished nor aborted."""
        return len(self.running)

    async def start(self) -> None:
        """Count the start; nothing needs bringing up."""
        self.starts += 1
        self.budget.began(self.cache_tokens, self.max_model_len, self.block_size)

    async def restart(self) -> None:
        """Live again, with an empty cache."""
        self.restarts += 1
        await asyncio.sleep(0)
        if self.fail_restart is not None:
            raise self.fail_restart
        self._lost |= self.running
        self.stopped = self.dead = False
        await self._close_appends()
        self.forget()

    def die(self) -> None:
        """End as a process that is killed does. May be called from any thread."""
        self.dead = True
        self._lost |= self.running

    def _check_alive(self, request: Request) -> None:
        if self.dead or request.request_id in self._lost:
            raise EngineDead(f"The engine on {self.device} died.")

    async def stop(self) -> None:
        """Forget everything."""
        self.stopped = True
        await self._close_appends()
        self.forget()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._close_appends()
        self.forget()

    def forget(self) -> None:
        """Nothing is cached any more."""
        self._cache.clear()
        if self._kv is not None:
            self._kv.wrong.clear()
            self._kv.tell(lambda book: book.clear())

    def store(self, request: Request) -> list[int]:
        """A prompt is cached; returns the keys of its blocks."""
        keys = block_keys(request.prompt_token_ids, self.block_size, request.cache_salt)
        self._cache.update(keys)
        if self._kv is not None:
            self._kv.tell(lambda book: book.add(keys))
        return keys

    def count_prompts(self) -> None:
        """Bring the budget up to date."""
        self.budget.prompts = sum(each.held for each in self.appends if not each.keep)

    async def _close_appends(self) -> None:
        for appends in list(self.appends):
            await appends.close()

    def open_appends(self, cache_salt: str | None = None, *, keep: bool = False) -> FakeAppends | None:
        """Begin a prompt that grows."""
        if self.stopped:
            raise EngineDead(f"The engine on {self.device} is not running.")
        return FakeAppends(self, cache_salt, keep) if self.takes_appends else None

    def evict(self) -> None:
        """Forget all that no open prompt holds, as after a flood of other prompts. May be called from any thread."""
        gone = list(self._cache.difference(*(each.keys for each in list(self.appends))))
        self._cache.difference_update(gone)
        if self._kv is not None:
            self._kv.tell(lambda book: book.discard(gone))

    def cached_tokens(self, ids: Sequence[int], salt: str | None = None) -> int:
        """How much of a prompt the cache would serve: whole blocks, and never the last token."""
        usable = (len(ids) - 1) // self.block_size
        for count, key in enumerate(block_keys(ids, self.block_size, salt)[:usable]):
            if key not in self._cache:
                return count * self.block_size
        return max(usable, 0) * self.block_size

    async def prefill(self, request: Request) -> int:
        """Put a prompt into the cache; returns the tokens found there."""
        self.prefills.append(request)
        self.running.add(request.request_id)
        try:
            while self.prefill_gate is not None and not self.prefill_gate.is_set():
                await asyncio.sleep(NOTICE_S)
                self._check_alive(request)
            if self.fail_prefill is not None:
                raise self.fail_prefill
            return await self._compute(request)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream the reply."""
        self.requests.append(request)
        self.running.add(request.request_id)
        finished = False
        try:
            cached = await self._compute(request)
            first = Delta(prompt_token_ids=request.prompt_token_ids, num_cached_tokens=cached)
            said = 0
            for delta in self._deltas(request):
                await self.spend(max(1, len(delta.token_ids)) / self.decode_speed)
                self._check_alive(request)
                if self.fail_generate is not None and said >= self.fail_after_tokens:
                    raise self.fail_generate
                if delta.finish_reason == ABORTED:
                    raise EngineDead(f"The engine on {self.device} gave the request up.")
                said += len(delta.token_ids)
                finished = finished or delta.finish_reason is not None
                yield _merge(first, delta)
                first = Delta()
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    async def _compute(self, request: Request) -> int:
        ids, salt = request.prompt_token_ids, request.cache_salt
        self._check_alive(request)
        if self.stopped:
            raise EngineDead(f"The engine on {self.device} is not running.")
        if len(ids) >= self.max_model_len:
            raise CallRefused(f"A prompt of {len(ids)} tokens does not fit into {self.max_model_len}.")
        cached = self.cached_tokens(ids, salt)
        await self.spend((len(ids) - cached) / self.prefill_speed)
        self._check_alive(request)
        self.store(request)
        return cached

    async def spend(self, seconds: float) -> None:
        """Take a modelled time: sleep, in short pieces, so that the end of the engine is noticed soon."""
        self.clock_ms += seconds * 1000
        left, lost = seconds * self.time_scale, len(self._lost)
        until = asyncio.get_running_loop().time() + left
        while True:
            await asyncio.sleep(min(left, NOTICE_S))
            left = until - asyncio.get_running_loop().time()
            if left < CLOCK_S or len(self._lost) > lost:
                return

    def _deltas(self, request: Request) -> list[Delta]:
        reply = self.reply(self.tokenizer.decode(list(request.prompt_token_ids)))
        if self._kv is not None and self._kv.wrong.intersection(
            block_keys(request.prompt_token_ids, self.block_size, request.cache_salt)
        ):
            reply = WRONG
        if not isinstance(reply, str):
            return list(reply)
        each = self._token_by_token(reply, request)
        count = request.sampling.get("n", 1)
        return [replace(delta, index=index) for delta in each for index in range(count)]

    def _token_by_token(self, text: str, request: Request) -> list[Delta]:
        """One delta a token. Text that may become a stop string is held back, as vLLM does."""
        limit = request.sampling.get("max_tokens") or self.max_model_len
        stops = request.sampling.get("stop") or ()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        held = max(map(len, stops), default=1) - 1
        deltas: list[Delta] = []
        shown = 0
        for count in range(1, min(len(ids), limit) + 1):
            said = self.tokenizer.decode(ids[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
            if hit := min(((said.find(stop), stop) for stop in stops if stop in said), default=None):
                return [*deltas, self._delta(said[shown : hit[0]], ids[count - 1], request, "stop", hit[1])]
            last = count == min(len(ids), limit)
            end = len(said) if last else max(shown, len(said) - held)
            reason = ("length" if len(ids) > limit else "stop") if last else None
            deltas.append(self._delta(said[shown:end], ids[count - 1], request, reason))
            shown = end
        return deltas or [Delta(finish_reason="stop")]

    def _delta(
        self, text: str, token_id: int, request: Request, reason: str | None, stop_reason: str | None = None
    ) -> Delta:
        likeliest = request.sampling.get("logprobs")
        logprobs = () if likeliest is None else (self._logprob(token_id, likeliest),)
        return Delta(text, (token_id,), reason, stop_reason, logprobs=logprobs)

    def _logprob(self, token_id: int, likeliest: int) -> TokenLogprob:
        """The token that is said is certain; the ids after it are made to look next likely."""
        tokens = [self.tokenizer.decode([token_id + step]) for step in range(likeliest)]
        return TokenLogprob(
            self.tokenizer.decode([token_id]), 0.0, tuple((token, -10.0 * rank) for rank, token in enumerate(tokens))
        )


def _merge(prompt: Delta, delta: Delta) -> Delta:
    """The delta with what the first one says of the prompt."""
    if prompt.prompt_token_ids is None:
        return delta
    return replace(delta, prompt_token_ids=prompt.prompt_token_ids, num_cached_tokens=prompt.num_cached_tokens)
