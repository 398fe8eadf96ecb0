"""Devices and engine settings, checked once, before any engine starts."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from langgraph_pingpong.environment import own_value
from langgraph_pingpong.errors import BadKvCache, BaseUrlError, DeviceError, ModelNotFound, NotExact, UnknownSetting
from langgraph_pingpong.exact import Exact, check_exact, exact_args
from langgraph_pingpong.keys import check_key
from langgraph_pingpong.kv_budget import KV_POOL_RATIO
from langgraph_pingpong.same_device import Riding, engine_can_pace, riding

_DEVICE = re.compile(r"(cpu|cuda|fake):(\d+)")


@dataclass(frozen=True, slots=True)
class Device:
    """One place to run an engine, written 'cuda:0', 'cpu:1' or 'fake:0' (a modelled engine, no hardware)."""

    kind: str
    index: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read 'kind:index'.

        Raises:
            DeviceError: `text` is not of that form, or the kind is unknown.
        """
        match = _DEVICE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise DeviceError(f"Unknown device {text!r}: devices are written cuda:N, cpu:N or fake:N.")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        """The device as the user writes it."""
        return f"{self.kind}:{self.index}"


def parse_devices(names: Iterable[str]) -> tuple[Device, ...]:
    """Read a list of devices.

    Raises:
        DeviceError: one is malformed or named twice, none is given, or kinds are mixed.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise DeviceError(f"devices is a list of names, and not {names!r}.")
    devices = tuple(Device.parse(name) for name in names)
    if not devices:
        raise DeviceError("No device given.")
    for device in devices:
        if devices.count(device) > 1:
            raise DeviceError(f"Device {device} is named twice: one engine serves a device.")
    if len({device.kind for device in devices}) > 1:
        raise DeviceError(f"Devices of different kinds cannot share a run: {', '.join(map(str, devices))}.")
    return devices


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server's OpenAI API is, for example 'http://a:8000/v1'."""

    url: str

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Read a base URL.

        Raises:
            BaseUrlError: `text` is no http(s) URL, or holds a user name, a query or a fragment.
        """
        if not isinstance(text, str):
            raise BaseUrlError(f"A base URL is a text, and not {text!r}.")
        parts = _split_url(text.strip())
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise BaseUrlError(f"{_without_user(text)!r} is not an http:// or https:// URL.")
        if "@" in parts.netloc:
            raise BaseUrlError(f"{_without_user(text)!r} has a user name or password in it: use api_key= instead.")
        if parts.query or parts.fragment:
            bare = parts._replace(query="", fragment="").geturl()  # a query may hold a key
            raise BaseUrlError(f"{bare!r} has a query or fragment, which a base URL cannot have.")
        return cls(text.strip().rstrip("/"))

    def at_root(self, path: str) -> str:
        """The URL of what vLLM serves beside its OpenAI API, for example '/metrics'."""
        return self.url.removesuffix("/v1") + path

    def __str__(self) -> str:
        """Host, port and what tells servers behind one port apart: 'a:8000', 'gateway:443/second'."""
        parts = urlsplit(self.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        return f"{parts.netloc.removesuffix(f':{port}')}:{port}{parts.path.removesuffix('/v1')}"


def _split_url(text: str) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises where it is no number
    except ValueError:
        return None
    return parts


def _without_user(text: str) -> str:
    """For messages: what stands before an @ may be a password."""
    return text.rpartition("@")[2]


def parse_base_urls(urls: Iterable[str]) -> tuple[ServerAddress, ...]:
    """Read a list of base URLs.

    Raises:
        BaseUrlError: one is malformed or named twice, or none is given.
    """
    if isinstance(urls, str) or not isinstance(urls, Iterable):
        raise BaseUrlError("base_urls is a list of URLs.")
    addresses = tuple(ServerAddress.parse(url) for url in urls)
    if not addresses:
        raise BaseUrlError("No base URL given.")
    names = [str(address) for address in addresses]
    for name in names:
        if names.count(name) > 1:
            raise BaseUrlError(f"The server {name} is named twice.")
    return addresses


@dataclass(frozen=True)
class ServerConfig:
    """Servers to use, and how.

    `model` is what they serve, `timeout` (s) bounds a silence within a request, `max_retries` is the OpenAI client's
    own setting. `http_client` makes the HTTP client for one server. Anchors may take `kv_pool_ratio` of a server's KV
    cache.

    Raises:
        BadKey: the key cannot be sent.
    """

    model: str
    addresses: tuple[ServerAddress, ...]
    api_key: str | None = field(default=None, repr=False)
    timeout: float | None = None
    max_retries: int | None = None
    http_client: Callable[[], Any] | None = None
    kv_pool_ratio: float = KV_POOL_RATIO

    def __post_init__(self) -> None:
        check_key(self.api_key)


def count_devices(kind: str) -> int:
    """How many devices of a kind this machine has: CUDA devices by the driver, CPU devices by usable core."""
    if kind == "cpu":
        return len(usable_cores())
    if kind == "cuda":
        return _count_gpus()
    return 2**31


def usable_cores() -> list[int]:
    """The CPU cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _count_gpus() -> int:
    """Ask the driver's own tool: importing torch for this would take seconds and may touch CUDA."""
    if (visible := own_value("CUDA_VISIBLE_DEVICES")) is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def default_devices() -> tuple[str, ...]:
    """Two devices where the machine has two: GPUs first, else one CPU engine per half of the cores."""
    kind = "cuda" if count_devices("cuda") else "cpu"
    return tuple(f"{kind}:{index}" for index in range(min(2, count_devices(kind))))


def check_devices(devices: Sequence[Device], tensor_parallel_size: int = 1) -> None:
    """Check that the machine has the devices; an engine with tensor parallelism takes the next ones too.

    Raises:
        DeviceError: a device does not exist, or two engines would share one.
    """
    taken: dict[int, Device] = {}
    for device in devices:
        have = count_devices(device.kind)
        for index in range(device.index, device.index + tensor_parallel_size):
            if index >= have:
                raise DeviceError(
                    f"{device.kind}:{index} does not exist: this machine has {have} {device.kind} device(s)."
                )
            if other := taken.get(index):
                raise DeviceError(f"{device} and {other} overlap at tensor_parallel_size={tensor_parallel_size}.")
            taken[index] = device


def cores_for(device: Device, devices: Sequence[Device], exact: Exact = "ids") -> list[int]:
    """The cores a CPU engine is bound to: an equal, contiguous share, so that engines do not disturb each other.

    For answers equal to the bit every engine has as many, and a core may be left: how a sum is split depends on it.
    """
    cores = usable_cores()
    rank, count = list(devices).index(device), len(devices)
    shared = len(cores) // count * count if exact == "bits" else len(cores)
    return cores[rank * shared // count : (rank + 1) * shared // count]


def gpus_of(device: Device, width: int) -> list[str]:
    """The GPUs of a CUDA engine, as `CUDA_VISIBLE_DEVICES` names them: the device and the next ones, `width` in all.

    Each engine's process is shown its own GPUs only. What vLLM compiles for the first engine names GPU 0 and is
    loaded again for the second, where it must name the second's.
    """
    visible = own_value("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(count_devices("cuda"))]
    return names[device.index : device.index + width]


@dataclass(frozen=True)
class EngineConfig:
    """What to serve and how.

    Every field except `devices`, `exact`, `same_device`, `kv_transfer` and `kv_pool_ratio` has vLLM's name and reaches
    vLLM unchanged. None is vLLM's own default, or on a CPU the value in `_CPU_DEFAULTS`. Lengths are in tokens. With
    `same_device`, prefills ride on the decode steps of their device; with `kv_transfer`, engines can read each other's
    KV. `kv_pool_ratio` is the share of the KV cache that may be held (kv_budget.py), `kv_offloading_size` the
    main memory (GiB) for KV that a GPU has no room for.

    Raises:
        NotExact: the settings contradict `exact`.
        BadKvCache: the share is none, or a CPU shall have a second tier.
    """

    model: str
    devices: tuple[Device, ...]
    dtype: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    enforce_eager: bool | None = None
    exact: Exact = "ids"
    same_device: bool = False
    kv_pool_ratio: float = KV_POOL_RATIO
    kv_offloading_size: float | None = None
    kv_transfer: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_exact(self.exact)
        _check_kv_cache(self)
        if self.same_device and self.exact == "bits":
            raise NotExact("overlap='same-device' contradicts exact='bits', which lets nothing share a step here.")
        if self.kv_transfer and self.exact == "bits":
            raise NotExact("kv_transfer=True contradicts exact='bits': what another engine computed may be rounded.")
        _ = self.vllm_args

    @property
    def kind(self) -> str:
        """That of its devices."""
        return self.devices[0].kind

    @cached_property
    def vllm_args(self) -> dict[str, Any]:
        """The arguments for vLLM's `AsyncEngineArgs`, without the device."""
        named = {
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.enforce_eager,
            "kv_offloading_size": self.kv_offloading_size,
        }
        given = {name: value for name, value in named.items() if value is not None}
        defaults = _CPU_DEFAULTS if self.kind == "cpu" else {}
        exact = exact_args(self.engine_args) if self.exact == "bits" else {}
        rides = self.riding.engine_args if self.riding else {}
        return {**_DEFAULTS, **defaults, **given, **self.engine_args, **rides, **exact, "model": self.model}

    @property
    def riding(self) -> Riding | None:
        """How prefills ride on the decode steps of their device, where they shall and where that needs anything."""
        if not self.same_device:
            return None
        return riding(self.kind, self.engine_args, engine_paces=engine_can_pace())


def _check_kv_cache(config: EngineConfig) -> None:
    if not 0 < config.kv_pool_ratio <= 1:
        raise BadKvCache(f"kv_pool_ratio is a share between 0 and 1, and not {config.kv_pool_ratio}.")
    if config.kind == "cpu" and (config.kv_offloading_size or config.engine_args.get("kv_offloading_size")):
        raise BadKvCache("kv_offloading_size= is for GPUs: a CPU engine has its KV cache in main memory anyway.")


_DEFAULTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "scheduling_policy": "priority",  # prefills come after answers
}

# Eager: compiling pays only for long runs on a CPU. Blocks of 32 tokens, not 128: a prefix is reused in whole
# blocks, so small ones leave less of the prompt to the moment the node starts.
_CPU_DEFAULTS: dict[str, Any] = {"enforce_eager": True, "block_size": 32}


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse names that are not in `known`, naming the closest one.

    Raises:
        UnknownSetting: at least one name is unknown.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UnknownSetting(f"{what} has no setting {name!r}.{hint}")


def resolve_model(model: str | None) -> str:
    """The folder or Hugging Face id to load; None is the default model, made ready on first use.

    Raises:
        ModelNotFound: `model` looks like a folder and is none, or the folder holds no model.
    """
    if model is None:
        from langgraph_pingpong.default_model import default_model_path

        return str(default_model_path())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"The folder {path} holds no config.json.")
        return str(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"The model folder {path} does not exist.")
    return model
