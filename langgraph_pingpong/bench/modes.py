"""The modes that are compared. One program runs them all: a mode is a set of engines and settings of the chat model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from langgraph_pingpong.config import refuse_unknown
from langgraph_pingpong.errors import ConfigError

Place = Literal["one", "pair", "tp2"]
"""One engine on the first device, one engine on each device, or one engine over all of them."""

Cache = Literal["reset", "prewarmed", "never"]
"""What is cached when a run starts: nothing, the static prefixes, or nothing then and later."""

Order = Literal["alternate", "fixed"]
Scale = Literal["gpu", "cpu", "fake"]
"""For which kind of devices a profile has values."""

T = TypeVar("T")


def scale_of(kind: str) -> Scale:
    """The scale for a kind of devices: 'cuda', 'cpu' or 'fake'."""
    return "gpu" if kind == "cuda" else "cpu" if kind == "cpu" else "fake"


@dataclass(frozen=True, slots=True)
class Mode:
    """Which engines serve, what is set on the chat model, and what is cached; `many` takes several chains at once.

    `built_with` are settings of the chat model that its engines are built by, as pairs: modes that differ in them have
    engines of their own.
    """

    name: str
    place: Place
    settings: Mapping[str, Any] = field(default_factory=dict)
    cache: Cache = "reset"
    many: bool = False
    built_with: tuple[tuple[str, Any], ...] = ()

    @property
    def about(self) -> str:
        """The mode in words."""
        where = {"one": "one engine on the first device", "pair": "an engine on each device"}
        caches = {"reset": "", "prewarmed": ", static prefixes prefilled before the run", "never": ", nothing cached"}
        settings = {**self.settings, **dict(self.built_with)}
        does = ", ".join(f"{name}={value}" for name, value in settings.items())
        many = ", one or more chains at once" if self.many else ""
        return f"{where.get(self.place, 'one engine over all devices')}, {does}{caches[self.cache]}{many}"

    @property
    def overlaps(self) -> bool:
        """Whether it may prefill ahead."""
        return str(self.settings["overlap"]) != "off"

    @property
    def rides(self) -> bool:
        """Whether prefills ride on decode steps, for which engines get other arguments."""
        return str(self.settings["overlap"]) == "same-device"


_OFF = {"overlap": "off"}
_ON = {"overlap": "on"}
_SAME = {"overlap": "same-device"}

MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("serial", "one", _OFF),
        Mode("serial-cold", "one", _OFF, cache="never"),
        Mode("serial-prewarm", "one", _OFF, cache="prewarmed"),
        Mode("overlap-1", "one", _SAME),
        Mode("pingpong", "pair", _ON),
        Mode("pingpong-plain", "pair", {**_ON, "speculate": False}),
        Mode("tp2-serial", "tp2", _OFF),
        Mode("tp2-overlap", "tp2", _SAME),
        Mode("dp2-cold", "pair", _OFF, cache="never", many=True),
        Mode("dp2-serial", "pair", _OFF, many=True),
        Mode("pingpong-many", "pair", _ON, many=True),
        Mode("pingpong-kv", "pair", _ON, many=True, built_with=(("kv_transfer", True),)),
        Mode("tp2-many", "tp2", _OFF, many=True),
    )
}
"""Every mode by its name."""


def parse_modes(names: str) -> tuple[Mode, ...]:
    """Modes from a list with commas, each once.

    Raises:
        UnknownSetting: there is no such mode.
        ConfigError: none is named.
    """
    wanted = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if not wanted:
        raise ConfigError(f"--modes {names!r} names no mode: pingpong bench --list shows all.")
    refuse_unknown(wanted, MODES, "The benchmark")
    return tuple(MODES[name] for name in wanted)


def in_order(modes: Sequence[T], run: int, order: Order) -> Sequence[T]:
    """What is run in one round. Every other round goes backwards, so that a drift of the machine favours none."""
    return modes if order == "fixed" or run % 2 == 0 else modes[::-1]
