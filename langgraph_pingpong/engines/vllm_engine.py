"""Stock vLLM in this process: one `AsyncLLM` on one device. Only this module and vllm_parsers.py import vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from langgraph_pingpong.config import Device, EngineConfig, check_devices, cores_for, gpus_of, refuse_unknown
from langgraph_pingpong.engines.base import Delta, Request, TokenLogprob
from langgraph_pingpong.engines.main_guard import check_main_guard
from langgraph_pingpong.errors import (
    CallRefused,
    EngineDead,
    EngineNotInstalled,
    EngineStartFailed,
    NotEnoughMemory,
    PingPongError,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

GIB = 1 << 30

# Read by vLLM when an engine is built. Spawn, because a fork would copy this process's threads' locks. The
# sampler that FlashInfer compiles on the spot costs 100 s at the first start. Warnings that torch and vLLM give at
# every start (what is deprecated, what this machine lacks) are for their developers.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_OWN_CORES = "VLLM_CPU_OMP_THREADS_BIND"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUILDING = threading.Lock()
"""Engines are built one after the other: each finds its device in the environment, and the first compiles for all."""

_CPU_KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_KV_CACHE_GIB = "2"


class VllmEngine:
    """One copy of the model on one device, in a process of its own that vLLM manages."""

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self._config = config
        self._device = device
        self._llm: AsyncLLM | None = None
        self._defaults: dict[str, Any] = {}
        self._running: set[str] = set()

    @property
    def device(self) -> str:
        """Where the engine runs, for example 'cuda:0'."""
        return str(self._device)

    @property
    def model(self) -> str:
        """The folder or Hugging Face id of the model."""
        return self._config.model

    @property
    def block_size(self) -> int:
        """Tokens per KV cache block, as the engine settled it."""
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return int(self._engine.vllm_config.model_config.max_model_len)

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and are neither finished nor aborted."""
        return len(self._running)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead(f"The engine on {self.device} is not running.")
        return self._llm

    async def start(self) -> None:
        """Bring the engine up, which takes seconds to minutes.

        Raises:
            EngineStartFailed: vLLM could not build it.
        """
        try:
            self._llm = await asyncio.to_thread(self._build)
            await self._warm_up()
        except PingPongError:
            raise
        except Exception as error:
            raise EngineStartFailed(f"The engine on {self.device} did not start: {error}") from error

    def _build(self) -> AsyncLLM:
        with _BUILDING, _environment(engine_environment(self._config, self._device)), _interrupts_held():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            args = dict(self._config.vllm_args)
            refuse_unknown(args, [field.name for field in dataclasses.fields(AsyncEngineArgs)], "vLLM")
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
        self._defaults = llm.vllm_config.model_config.get_diff_sampling_param()
        return llm

    async def _warm_up(self) -> None:
        """Run a few tokens, so that what happens once only does not land in the first answer."""
        prompt = tuple(range(1, 2 * self.block_size))
        async for _ in self.generate(Request(prompt, {"max_tokens": 2, "ignore_eos": True})):
            pass
        await self.reset_prefix_cache()

    async def stop(self) -> None:
        """Shut the engine's process down."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:  # first, or it reports the end of the process as a failure
            llm.output_handler.cancel()
            await asyncio.wait({llm.output_handler})
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
            EngineDead: the engine's process ended.
        """
        first, likeliest = True, request.sampling.get("logprobs") or 0
        async with aclosing(self._outputs(request)) as outputs:
            async for output in outputs:
                for answer in output.outputs:
                    yield _to_delta(output, answer, first, likeliest)
                    first = False

    async def prefill(self, request: Request) -> int:
        """Compute a prompt's KV cache. vLLM refuses `max_tokens=0`, so one token is sampled and dropped."""
        cached = 0
        bare = dataclasses.replace(request, sampling={"max_tokens": 1, "temperature": 0.0})
        async with aclosing(self._outputs(bare)) as outputs:
            async for output in outputs:
                cached = output.num_cached_tokens or cached
        return cached

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._engine.reset_prefix_cache()

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput]:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self._engine
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        self._running.add(request.request_id)
        try:
            stream = engine.generate(prompt, self._params(request), request.request_id)  # type: ignore[arg-type]
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            raise EngineDead(f"The engine on {self.device} died.") from error
        except (ValueError, VLLMValidationError) as error:
            raise CallRefused(f"vLLM refused the call: {error}") from error
        finally:
            self._running.discard(request.request_id)

    def _params(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = {**self._defaults, **request.sampling, "output_kind": RequestOutputKind.DELTA}
        if constraint := sampling.get("structured_outputs"):
            sampling["structured_outputs"] = StructuredOutputsParams(**constraint)
        return SamplingParams(**sampling)


def _to_delta(output: RequestOutput, answer: CompletionOutput, first: bool, likeliest: int) -> Delta:
    return Delta(
        answer.text,
        tuple(answer.token_ids),
        answer.finish_reason,
        answer.stop_reason,
        tuple(output.prompt_token_ids or ()) if first else None,
        output.num_cached_tokens or 0 if first else None,
        answer.index,
        tuple(_to_logprobs(answer, likeliest)),
    )


def _to_logprobs(answer: CompletionOutput, likeliest: int) -> Iterator[TokenLogprob]:
    """For each token vLLM has one table of the sampled token and the likeliest ones; ranks start at 1."""
    for token_id, table in zip(answer.token_ids, answer.logprobs or (), strict=False):
        if table is None:
            continue
        ranked = sorted(table.values(), key=lambda each: each.rank or 0)[:likeliest]
        top = tuple((each.decoded_token or "", each.logprob) for each in ranked)
        yield TokenLogprob(table[token_id].decoded_token or "", table[token_id].logprob, top)


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


def check_machine(config: EngineConfig) -> None:
    """Check that this machine can run the engines, as far as that can be known without vLLM.

    Raises:
        EngineNotInstalled: vLLM is not installed.
        DeviceError: a device does not exist on this machine.
        NotEnoughMemory: the engines would not fit into memory together.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineNotInstalled("vLLM is not installed.")
    check_devices(config.devices, config.tensor_parallel_size or 1)
    if config.devices[0].kind == "cpu":
        check_cpu_memory(config)


def engine_environment(config: EngineConfig, device: Device) -> dict[str, str]:
    """The variables that vLLM reads when an engine is built; what the user has set stays, but for its device."""
    values = {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
    if device.kind == "cuda":
        return {**values, _VISIBLE: ",".join(gpus_of(device, config.tensor_parallel_size or 1))}
    cores = cores_for(device, config.devices)
    return {
        **values,
        _CPU_KV_CACHE: os.environ.get(_CPU_KV_CACHE, _CPU_KV_CACHE_GIB),
        _OWN_CORES: ",".join(map(str, cores)),
    }


def check_cpu_memory(config: EngineConfig) -> None:
    """Compare what the engines need together (weights and KV cache each) with the memory that is free.

    Raises:
        NotEnoughMemory: it is more.
    """
    weights = weight_bytes(config)
    cache = float(os.environ.get(_CPU_KV_CACHE, _CPU_KV_CACHE_GIB)) * GIB
    needed, free = (weights + cache) * len(config.devices), psutil.virtual_memory().available
    if needed > free:
        raise NotEnoughMemory(
            f"{len(config.devices)} engines need {needed / GIB:.1f} GiB together (weights {weights / GIB:.1f} and KV "
            f"cache {cache / GIB:.1f} GiB each, the latter set by {_CPU_KV_CACHE}); {free / GIB:.1f} GiB are free."
        )


def weight_bytes(config: EngineConfig) -> int:
    """Size of one copy of the weights in memory; 0 where the model is not in a local folder."""
    stored = sum(file.stat().st_size for file in _weight_files(Path(config.model)))
    return stored * 2 if config.dtype == "float32" else stored


def quiet_vllm() -> AbstractContextManager[None]:
    """Import vLLM within this: it reads settings from the environment, such as what to log."""
    return _environment(_ENVIRONMENT)


def _weight_files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started within never see Ctrl-C.

    At a terminal and in a notebook it reaches every process of the group, and vLLM's would end at it, though it is
    meant for the call that is running.
    """
    resource_tracker.ensure_running()  # it lets them through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables while an engine is built; a value the user has set stays, except the ones tied to a device."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if name in (_OWN_CORES, _VISIBLE) or name not in os.environ:
            os.environ[name] = value
    try:
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = earlier
