"""The engines of the compared modes: every set that is needed is up before the first run, so that modes alternate."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self

from langgraph_pingpong.bench.modes import Mode, Place
from langgraph_pingpong.bench.recording import Recorder
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import Device, EngineConfig, count_devices, default_devices, parse_devices
from langgraph_pingpong.engines.fake_engine import FakeEngine
from langgraph_pingpong.errors import DeviceError
from langgraph_pingpong.exact import Exact
from langgraph_pingpong.pool import EnginePool

TP_ARGS: Mapping[str, Any] = {
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
"""What an engine over several GPUs needs: without it, it died on two H200 with an illegal memory access."""

TP_WEIGHT = 0.5
"""Memory of an engine over two GPUs on each of them, against one on a single GPU: half the weights, half of the cache
for each token."""

FEW, FEW_SHARE, MANY_SHARE = 3, 0.85, 0.92
"""Of a GPU's memory, what so many engines on it may take together by default, and what more of them may."""

FAKE_PREFILL, FAKE_DECODE, FAKE_TP_GAIN = 20_000.0, 1_000.0, 1.6
"""Speeds of modelled engines (tokens/s), and how much faster one over two devices is. They model no contention."""

FAKE_REPLY_WORDS = 60


@dataclass(frozen=True, slots=True)
class SetKey:
    """Which engines: where, and whether prefills ride on decode steps, for which CUDA engines are built otherwise.

    `built_with` are further settings of the chat model that they are built by.
    """

    place: Place
    rides: bool = False
    built_with: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "+".join([self.place, *(["rides"] if self.rides else []), *(name for name, _ in self.built_with)])

    def devices(self, devices: Sequence[str]) -> Sequence[str]:
        """Those that engines are started on."""
        return list(devices) if self.place == "pair" else [devices[0]]

    def width(self, devices: Sequence[str]) -> int:
        """Devices of one engine."""
        return len(devices) if self.place == "tp2" else 1


@dataclass
class EngineSettings:
    """What engines are built with, under vLLM's names.

    `gpu_memory_utilization` is the share of a GPU's memory that all engines on it may take together; None is 0.85, or
    more where many engines share a GPU: each has its own copy of the weights, and there is less need to be careful.
    """

    devices: Sequence[str]
    model: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    exact: Exact = "ids"
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """'cuda', 'cpu' or 'fake'."""
        return Device.parse(self.devices[0]).kind

    def key(self, mode: Mode) -> SetKey:
        """The engines of a mode; some CUDA engines are built otherwise when prefills ride."""
        return SetKey(mode.place, mode.rides and self._riding_differs, mode.built_with)

    @cached_property
    def _riding_differs(self) -> bool:
        if self.kind != "cuda":
            return False
        plain = EngineConfig("", parse_devices(self.devices), engine_args=self.engine_args)
        rides = replace(plain, same_device=True)
        assert rides.riding is not None, "on GPUs prefills ride"
        return rides.riding.paced or plain.vllm_args != rides.vllm_args


class EngineSet:
    """One set of engines that was started, and what they answered."""

    def __init__(self, model: ChatPingPong) -> None:
        self.model = model
        self.pool: EnginePool = model._serving().pool
        self.recorder = Recorder(self.pool)
        self._used = len(self.pool.engines)

    def use(self, place: Place) -> None:
        """Serve as engines of a place do: of a pair that stands in for one engine, only the first gets anything."""
        self._used = 1 if place == "one" else len(self.pool.engines)
        for index, each in enumerate(self.pool._placement.places):
            each.up = index < self._used

    def memory(self) -> list[dict[str, Any]]:
        """What is known of the KV caches of the engines that are used."""
        return self.pool.memory()[: self._used]


class EngineSets:
    """All sets that the modes need. They start one after the other: memory is measured by difference."""

    def __init__(self, settings: EngineSettings, modes: Sequence[Mode], calls: Mapping[str, Any]) -> None:
        """Take `calls`, the settings of answers: temperature, seed.

        Raises:
            DeviceError: a mode needs devices that were not given.
        """
        self._settings = settings
        wanted = {settings.key(mode) for mode in modes}
        self._stands_in = {key: pair for key in wanted if (pair := _pair_for(key, settings.kind)) in wanted}
        self.keys = tuple(dict.fromkeys(self._key(mode) for mode in modes))
        self._calls = calls
        self._sets: dict[SetKey, EngineSet] = {}
        _check(settings, modes)

    def of(self, mode: Mode) -> EngineSet:
        """The engines of a mode. Valid once started."""
        return self._sets[self._key(mode)]

    def _key(self, mode: Mode) -> SetKey:
        key = self._settings.key(mode)
        return self._stands_in.get(key, key)

    def start(self, told: Callable[[str], None]) -> None:
        """Start them; `told` hears of each.

        Raises:
            ConfigError: they cannot work on this machine.
            EngineStartFailed: one did not come up.
        """
        if self._settings.kind == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        total = self._settings.gpu_memory_utilization or (FEW_SHARE if len(self.keys) <= FEW else MANY_SHARE)
        shares = memory_shares(self.keys, self._settings.devices, total)
        for key in self.keys:
            places = self._settings.devices[: 1 if key.place == "one" else None]
            told(f"Starting {key} on {', '.join(places)}")
            model = self._make(key, shares[key])
            self._sets[key] = EngineSet(model)
            model.start()

    def told(self) -> dict[str, Any]:
        """What each set is, as plain data."""
        return {
            str(key): {
                "devices": list(key.devices(self._settings.devices)),
                "width": key.width(self._settings.devices),
                "gpu_memory_utilization": each.model.gpu_memory_utilization,
                "block_size": each.pool.engines[0].block_size,
                "max_model_len": each.pool.engines[0].max_model_len,
            }
            for key, each in self._sets.items()
        }

    def close(self) -> None:
        """Shut all of them down."""
        for each in self._sets.values():
            each.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _make(self, key: SetKey, share: float) -> ChatPingPong:
        settings = self._settings
        width = key.width(settings.devices)
        model = ChatPingPong(
            model=settings.model,
            devices=key.devices(settings.devices),
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=share if settings.kind == "cuda" else None,
            exact=settings.exact,
            tensor_parallel_size=width if width > 1 else None,
            engine_args=merged(TP_ARGS if width > 1 else {}, settings.engine_args),
            overlap="same-device" if key.rides else "on",
            **dict(key.built_with),
            **self._calls,
        )
        if settings.kind == "fake":
            _set_speeds(model._serving().pool, FAKE_TP_GAIN if width > 1 else 1.0)
        return model


def _pair_for(key: SetKey, kind: str) -> SetKey | None:
    """The pair whose first engine is what one engine alone would be; None on CPUs, where that has all cores."""
    return replace(key, place="pair") if key.place == "one" and kind != "cpu" else None


def _check(settings: EngineSettings, modes: Sequence[Mode]) -> None:
    parse_devices(settings.devices)
    for mode in modes:
        if mode.place != "one" and len(settings.devices) < 2:
            raise DeviceError(f"The mode {mode.name} needs two devices, and one was given.")
        if mode.place == "tp2" and settings.kind == "cpu":
            raise DeviceError(f"The mode {mode.name} needs GPUs: its engine spans several devices.")
        if mode.place == "tp2" and not _consecutive(settings.devices):
            raise DeviceError(f"The mode {mode.name} needs devices that follow one another, like cuda:0,cuda:1.")


def _consecutive(devices: Sequence[str]) -> bool:
    indices = [Device.parse(device).index for device in devices]
    return indices == list(range(indices[0], indices[0] + len(indices)))


def memory_shares(keys: Iterable[SetKey], devices: Sequence[str], total: float) -> dict[SetKey, float]:
    """The share of each GPU's memory for one engine of each set, so that all on the first GPU fit into `total`."""
    weights = {key: TP_WEIGHT if key.width(devices) > 1 else 1.0 for key in keys}
    return {key: round(total * weight / sum(weights.values()), 3) for key, weight in weights.items()}


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Given values before defaults, within mappings too."""
    both = {
        name: merged(defaults[name], value)
        for name, value in given.items()
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping)
    }
    return {**defaults, **given, **both}


def places_of(text: str | None) -> list[str]:
    """Devices from a list with commas, or those that the machine has; a bare number is a GPU where there are any.

    Raises:
        DeviceError: one is malformed or named twice.
    """
    if not text:
        return list(default_devices())
    names = [name.strip() for name in text.split(",")]
    kind = "cuda" if any(map(str.isdigit, names)) and count_devices("cuda") else "cpu"
    devices = [f"{kind}:{name}" if name.isdigit() else name for name in names]
    parse_devices(devices)
    return devices


def _set_speeds(pool: EnginePool, gain: float) -> None:
    for engine in pool.engines:
        assert isinstance(engine, FakeEngine), "only modelled engines have speeds"
        engine.prefill_speed, engine.decode_speed = FAKE_PREFILL * gain, FAKE_DECODE * gain
        engine.time_scale, engine.reply = 1.0, _long_reply


def _long_reply(prompt: str) -> str:
    """Words that depend on the prompt: more than any fake run asks for."""
    letters = Counter(prompt)
    return " ".join(f"{len(prompt)}{letter}{letters[letter]}" for letter in "etaoin" * (FAKE_REPLY_WORDS // 6))
