"""Stock vLLM in this process: one `AsyncLLM` on one device. Beside this, only small modules here import vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from langgraph_pingpong import heap
from langgraph_pingpong.config import Device, EngineConfig, refuse_unknown
from langgraph_pingpong.engines.base import PREFILL_PRIORITY, Delta, Request, new_request_id
from langgraph_pingpong.engines.main_guard import check_main_guard
from langgraph_pingpong.engines.vllm_appends import (
    ONE_IN,
    SINCE,
    AppendsBook,
    Pieces,
    VllmAppends,
    are_sound,
    token_prompt,
)
from langgraph_pingpong.engines.vllm_calls import clear_errors, sampling_params
from langgraph_pingpong.engines.vllm_kv import VllmKv
from langgraph_pingpong.engines.vllm_outputs import check_not_aborted, to_delta
from langgraph_pingpong.engines.vllm_setup import (
    check_machine,
    interrupts_held,
    set_up_for,
)
from langgraph_pingpong.engines.vllm_text import AnswerText, can_make_text, is_made_here
from langgraph_pingpong.errors import EngineDead, EngineStartFailed, PingPongError
from langgraph_pingpong.exact import check_settled
from langgraph_pingpong.kv_budget import KvBudget
from langgraph_pingpong.model_files import tokenizer_args
from langgraph_pingpong.same_device import piece_beside_decodes

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
RESET_AGAIN_S = 0.05
"""The pause before the prefix cache is reset once more, in seconds."""

_BUILDING = threading.Lock()
"""Engines are built one after the other: each finds its device in the environment, and the first compiles for all."""


class VllmEngine:
    """One copy of the model on one device, in a process of its own that vLLM manages."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._llm: AsyncLLM | None = None
        self._settled: VllmConfig | None = None  # kept while there is no engine: prompts are still measured by it
        self._defaults: dict[str, Any] = {}
        self._running: set[str] = set()
        self._makes_text = False
        self.budget = KvBudget()
        """Who holds how much of the KV cache."""
        self._appends = AppendsBook(self.budget, 0)
        self._kv = VllmKv(config.kind, self._outputs, lambda: self._appends.let_go()) if config.kv_transfer else None

    @property
    def device(self) -> str:
        """Where the engine runs, for example 'cuda:0'."""
        return str(self._device)

    @property
    def model(self) -> str:
        """The folder or Hugging Face id of the model."""
        return self._config.model

    @property
    def tokenizer_args(self) -> dict[str, Any]:
        """How to load the tokenizer that the engine has, by `load_tokenizer`."""
        return tokenizer_args(self._config.model, self._config.engine_args)

    @property
    def block_size(self) -> int:
        """Tokens per KV cache block, as the engine settled it."""
        return int(self._config_in_use.cache_config.block_size)

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return int(self._config_in_use.model_config.max_model_len)

    @property
    def cache_tokens(self) -> int | None:
        """How many tokens the prefix cache can hold. vLLM keeps one block for itself."""
        blocks = self._config_in_use.cache_config.num_gpu_blocks  # on a CPU, too
        return (blocks - 1) * self.block_size if blocks else None

    @property
    def _config_in_use(self) -> VllmConfig:
        return self._settled or self._engine.vllm_config

    @property
    def piece_tokens(self) -> int:
        """How many tokens of a prefill a decode step can carry along: what the captured graphs have place for.

        An engine that paces prefills by itself takes them whole. On a CPU none: each takes its time.
        """
        if (riding := self._config.riding) is not None:
            return self.max_model_len if riding.paced else riding.piece
        if self.device.startswith("cpu"):
            return 0
        captured = self._engine.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        return piece_beside_decodes(captured)

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and are neither finished nor aborted; appends count while a piece is computed."""
        return len(self._running) + self._appends.computing

    @property
    def kv(self) -> VllmKv | None:
        """Where KV leaves for other engines and comes from them; None where it cannot."""
        return self._kv

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead(f"The engine on {self.device} is not running.")
        return self._llm

    async def start(self) -> None:
        """Bring the engine up, which takes seconds to minutes.

        Raises:
            EngineStartFailed: vLLM could not build it.
            NotExact: it settled on other values than `exact` needs.
        """
        try:
            await self._bring_up()
            if self._kv is not None:
                self._kv.began()
            if self._config.exact == "bits":
                check_settled(self._config.vllm_args, self._engine.vllm_config)
            await self._warm_up()
        except PingPongError:
            raise
        except Exception as error:
            raise EngineStartFailed(f"The engine on {self.device} did not start: {error}") from error

    async def _bring_up(self) -> None:
        building = asyncio.ensure_future(asyncio.to_thread(self._build))
        try:
            self._llm = await asyncio.shield(building)
        except asyncio.CancelledError:  # which does not end the thread: what it brings up must not outlive this
            await asyncio.wait([building])
            if building.exception() is None:
                self._llm = building.result()
                await self.stop()
            raise

    def _build(self) -> AsyncLLM:
        with _BUILDING, set_up_for(self._config, self._device), interrupts_held():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            args = self._config.vllm_args | (self._kv.engine_args() if self._kv else {})
            refuse_unknown(args, [field.name for field in dataclasses.fields(AsyncEngineArgs)], "vLLM")
            heap.collect()  # engines that are garbage give their memory back before this one takes any
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        heap.set_apart()
        self._settled = llm.vllm_config
        self._defaults = llm.vllm_config.model_config.get_diff_sampling_param()
        return llm

    async def _warm_up(self) -> None:
        """Run a few tokens, so that what happens once only does not land in the first answer."""
        prompt = tuple(range(1, min(2 * self.block_size, self.max_model_len - 2)))
        async for _ in self.generate(Request(prompt, {"max_tokens": 2, "ignore_eos": True})):
            pass
        self._makes_text = can_make_text(self._engine.get_tokenizer(), self._params(Request(prompt)), prompt)
        await self._try_appends()
        await self.reset_prefix_cache()

    async def _try_appends(self) -> None:
        """Growing prompts are used where they turn out right; everywhere else prefills do."""
        import vllm

        config = self._engine.vllm_config
        self.budget.began(self.cache_tokens, self.max_model_len, self.block_size)
        book = AppendsBook(self.budget, config.scheduler_config.max_num_seqs // ONE_IN)
        if book.max_open and vllm.__version_tuple__[:2] >= SINCE:
            self._appends = book
            if not await are_sound(self):
                self._appends = AppendsBook(self.budget, 0)

    async def restart(self) -> None:
        """Replace the engine's process, dead or alive, by a new one.

        Raises:
            EngineStartFailed: vLLM could not build it.
        """
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        """Shut the engine's process down."""
        if self._llm is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._appends.close()
        if self._kv is not None:
            await self._kv.ended()
        llm, self._llm = self._llm, None
        heap.take_back()
        if llm.output_handler is not None:  # first, or it reports the end of the process as a failure
            llm.output_handler.cancel()
            await asyncio.wait({llm.output_handler})
        llm.output_processor.propagate_error(EngineDeadError())  # nothing else would tell open requests
        if threading.main_thread().is_alive():
            await asyncio.to_thread(llm.shutdown)
        else:  # at the interpreter's end no thread takes work any more
            llm.shutdown()
        # vLLM's object shuts down once more when it is collected. At the interpreter's end that raises.
        llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream the answer; closing the iterator early aborts the request.

        Raises:
            CallRefused: vLLM cannot do what the request asks for.
            EngineDead: the engine's process ended, or gave the request up.
            EngineError: vLLM met an error of its own in this request.
        """
        first, likeliest = True, request.sampling.get("logprobs") or 0
        prompt, said = len(request.prompt_token_ids), 0
        longest = request.sampling.get("n", 1) * (request.sampling.get("max_tokens") or self.max_model_len - prompt)
        text = self._text_of(request)
        if text is not None:
            request = replace(request, sampling={**request.sampling, "detokenize": False})
        with self._appends.answer(prompt, longest) as reach:
            async with aclosing(self._outputs(request, priority=0)) as outputs:
                async for output in outputs:
                    for answer in output.outputs:
                        said += len(answer.token_ids)
                        reach(said)
                        delta = to_delta(output, answer, first, likeliest, self.device)
                        yield text.told(delta) if text else delta
                        first = False

    def _text_of(self, request: Request) -> AnswerText | None:
        """What makes the answer's text here; None where vLLM does."""
        if not (self._makes_text and is_made_here(request.sampling)):
            return None
        with self._clear_errors(self._engine):
            return AnswerText(self._engine.get_tokenizer(), request, self._params(request))

    async def prefill(self, request: Request) -> int:
        """Compute a prompt's KV cache. vLLM refuses `max_tokens=0`, so one token is sampled and dropped."""
        cached = 0
        bare = replace(request, sampling=_ONE_TOKEN)
        async with aclosing(self._outputs(bare, PREFILL_PRIORITY)) as outputs:
            async for output in outputs:
                cached = output.num_cached_tokens or cached
        return cached

    def open_appends(self, cache_salt: str | None = None, *, keep: bool = False) -> VllmAppends | None:
        """Begin a prompt that grows; None where that is not sound or too many are open.

        One to `keep` stays open until it is closed.

        Raises:
            EngineDead: the engine is not running.
        """
        bare = Request((), _ONE_TOKEN, new_request_id(), cache_salt)
        limit = int(self._engine.vllm_config.model_config.max_model_len)
        send = partial(self._sent, request=bare, priority=PREFILL_PRIORITY)
        return self._appends.open(send, self._salted(cache_salt), limit, keep=keep)

    def _salted(self, salt: str | None) -> str | None:
        return self._kv.salted(salt) if self._kv else salt

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; prompts that grow are closed, since what they hold is not forgotten.

        Raises:
            EngineDead: the engine's process ended.
        """
        await self._appends.close()
        tries = int(self._kv.lease_s / RESET_AGAIN_S) if self._kv else 1
        for _ in range(tries):  # blocks may be kept for a reader
            if await self._reset():
                return
            await asyncio.sleep(RESET_AGAIN_S)

    async def _reset(self) -> bool:
        """Whether all was forgotten: what a request uses is not."""
        engine = self._engine
        with self._clear_errors(engine):
            reset = asyncio.ensure_future(engine.reset_prefix_cache())
            # An engine that dies meanwhile never answers. The task that hands its answers out ends with it.
            ends = {engine.output_handler} if engine.output_handler else set()
            try:
                await asyncio.wait({reset, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not reset.done():
                    raise EngineDead(f"The engine on {self.device} died.")
                return bool(reset.result())
            finally:
                reset.cancel()

    async def _outputs(self, request: Request, priority: int) -> AsyncGenerator[RequestOutput]:
        self._running.add(request.request_id)
        try:
            prompt = token_prompt(replace(request, cache_salt=self._salted(request.cache_salt)))
            async with aclosing(self._sent(prompt, request, priority)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._running.discard(request.request_id)

    async def _sent(
        self, prompt: dict[str, Any] | Pieces, request: Request, priority: int
    ) -> AsyncGenerator[RequestOutput]:
        """What vLLM says to a prompt, or to the pieces of one."""
        engine = self._engine
        by_priority = engine.vllm_config.scheduler_config.policy == "priority"
        place = priority if by_priority else 0
        with self._clear_errors(engine):
            params = self._params(request)
            stream = engine.generate(prompt, params, request.request_id, priority=place)  # type: ignore[arg-type]
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    check_not_aborted(output, self.device)
                    yield output

    def _clear_errors(self, engine: AsyncLLM) -> AbstractContextManager[None]:
        return clear_errors(self.device, engine)

    def _params(self, request: Request) -> SamplingParams:
        return sampling_params({**self._defaults, **request.sampling})


def build_vllm_engines(config: EngineConfig) -> list[VllmEngine]:
    """One engine for each device, not started yet; everything that can be checked without vLLM is.

    Raises:
        EngineNotInstalled: vLLM is not installed.
        DeviceError: a device does not exist on this machine.
        MissingMainGuard: the script would start itself again.
        NotEnoughMemory: the engines would not fit into memory together.
    """
    check_machine(config)
    check_main_guard()
    return [VllmEngine(config, device) for device in config.devices]
