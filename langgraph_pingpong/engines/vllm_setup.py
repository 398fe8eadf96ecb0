"""What a vLLM engine finds when it is built: its device, its cores, its settings in the environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from langgraph_pingpong.config import Device, EngineConfig, check_devices, cores_for, gpus_of
from langgraph_pingpong.engines.orphans import PARENT
from langgraph_pingpong.engines.vllm_kv import SIDE_PORT, kv_environment
from langgraph_pingpong.environment import environment_with
from langgraph_pingpong.errors import ConfigError, EngineNotInstalled, NixlNotInstalled, NotEnoughMemory

GIB = 1 << 30

# Read by vLLM when an engine is built. Spawn, because a fork would copy this process's threads' locks. The
# sampler that FlashInfer compiles on the spot costs 100 s at the first start. Warnings and bars that torch, vLLM and
# FlashInfer show at every start (what is deprecated, what this machine lacks) are for their developers.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "FLASHINFER_LOGGING_LEVEL": "error",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

_NO_BARS = {"TQDM_DISABLE": "1"}
"""For engines' processes only: vLLM shows one bar whatever `use_tqdm_on_load` says."""

_OWN_CORES = "VLLM_CPU_OMP_THREADS_BIND"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_ONE_ENGINE = (_OWN_CORES, _VISIBLE, SIDE_PORT, PARENT)
"""Variables that have another value for each engine, whatever the user has set."""

_CPU_KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_KV_CACHE_GIB = "2"


def check_machine(config: EngineConfig) -> None:
    """Check that this machine can run the engines, as far as that can be known without vLLM.

    Raises:
        EngineNotInstalled: vLLM is not installed.
        NixlNotInstalled: KV shall be transferred, and NIXL is not installed.
        DeviceError: a device does not exist on this machine.
        NotEnoughMemory: the engines would not fit into memory together.
        ConfigError: a variable of the environment cannot be read.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineNotInstalled("vLLM is not installed.")
    if config.kv_transfer and importlib.util.find_spec("nixl") is None:
        raise NixlNotInstalled("kv_transfer=True needs NIXL, which is not installed.")
    check_devices(config.devices, config.tensor_parallel_size or 1)
    if config.devices[0].kind == "cpu":
        check_cpu_memory(config)


def engine_environment(config: EngineConfig, device: Device) -> dict[str, str]:
    """The variables that vLLM reads when an engine is built; what the user has set stays, but for its device."""
    own = {**_ENVIRONMENT, **_NO_BARS, **(kv_environment(device.kind) if config.kv_transfer else {})}
    values = {name: value if name == SIDE_PORT else os.environ.get(name, value) for name, value in own.items()}
    values[PARENT] = str(os.getpid())
    if device.kind == "cuda":
        return {**values, _VISIBLE: ",".join(gpus_of(device, config.tensor_parallel_size or 1))}
    cores = cores_for(device, config.devices, config.exact)
    return {
        **values,
        _CPU_KV_CACHE: os.environ.get(_CPU_KV_CACHE, _CPU_KV_CACHE_GIB),
        _OWN_CORES: ",".join(map(str, cores)),
    }


def check_cpu_memory(config: EngineConfig) -> None:
    """Compare what the engines need together (weights and KV cache each) with the memory that is free.

    Raises:
        NotEnoughMemory: it is more.
        ConfigError: how large the KV cache is cannot be read.
    """
    weights = weight_bytes(config)
    cache = cpu_kv_cache_gib() * GIB
    needed, free = (weights + cache) * len(config.devices), psutil.virtual_memory().available
    if needed > free:
        raise NotEnoughMemory(
            f"{len(config.devices)} engines need {needed / GIB:.1f} GiB together (weights {weights / GIB:.1f} and KV "
            f"cache {cache / GIB:.1f} GiB each, the latter set by {_CPU_KV_CACHE}); {free / GIB:.1f} GiB are free."
        )


def cpu_kv_cache_gib(default: str = _CPU_KV_CACHE_GIB) -> int:
    """The KV cache that vLLM sets aside on a CPU, in GiB.

    Raises:
        ConfigError: the variable that tells it cannot be read.
    """
    given = os.environ.get(_CPU_KV_CACHE, default)
    with contextlib.suppress(ValueError):
        if (gib := int(given)) >= 0:  # as vLLM reads it
            return gib
    raise ConfigError(f"The variable {_CPU_KV_CACHE} is a whole number of GiB, like 4, and not {given!r}.")


def weight_bytes(config: EngineConfig) -> int:
    """Size of one copy of the weights in memory; 0 where the model is not in a local folder."""
    stored = sum(file.stat().st_size for file in _weight_files(Path(config.model)))
    return stored * 2 if config.dtype == "float32" else stored


def set_up_for(config: EngineConfig, device: Device) -> AbstractContextManager[None]:
    """Build the engine on a device within this."""
    importlib.import_module("tqdm")  # reads its variables when it is imported: the user's own bars stay
    return environment_with(engine_environment(config, device), _OF_ONE_ENGINE)


def quiet_vllm() -> AbstractContextManager[None]:
    """Import vLLM within this: it reads settings from the environment, such as what to log."""
    return environment_with(_ENVIRONMENT)


def _weight_files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


@contextmanager
def interrupts_held() -> Iterator[None]:
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
