"""A small model of what a chain of agents takes in each topology, from a few speeds of the machine. Times are in s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from langgraph_pingpong.same_device import STEP

Topology = Literal["serial", "ping-pong", "same-device overlap", "tensor parallel"]

TP_GAIN = {"nvlink": 1.4, "other": 1.05}
"""How much faster an engine over two GPUs is than one on a single GPU, by the link between them, where that was not
measured: two H200 with NVLink gave 1.40 from end to end with a model of 14B parameters; without it, what each layer
sends around eats most of the gain."""

WORTH = 0.98
"""Another topology than serial is advised only where it takes at most this share of serial's time."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast one engine is.

    `prefill_s` is the time a token of a prompt takes, `step_s` that from one token of an answer to the next,
    `floor_s` that of a first token whose prompt is cached, `mixed_s` how much longer decoding takes for each token
    of a prompt that is prefilled on the same device meanwhile.
    """

    prefill_s: float
    step_s: float
    floor_s: float
    mixed_s: float

    def faster(self, gain: float) -> Speeds:
        """The same for an engine that is so many times as fast."""
        return Speeds(self.prefill_s / gain, self.step_s / gain, self.floor_s / gain, self.mixed_s / gain)


@dataclass(frozen=True, slots=True)
class Across:
    """What two engines cost each other while one decodes and the other prefills, on devices of their own.

    `prefill_s` is the time a token of a prompt takes meanwhile, `slowed_s` how much longer the decoding takes for it.
    Cores of one processor share memory and caches; GPUs hardly share anything.
    """

    prefill_s: float
    slowed_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """A chain of `agents`: a static prefix and an answer for each, in tokens; `chains` of them at once.

    `output` is the answer of all but the last agent, `last_output` that of the last.
    """

    agents: int = 5
    static: int = 4096
    document: int = 1024
    output: int = 256
    last_output: int = 64
    chains: int = 1

    @property
    def mean_input(self) -> float:
        """Mean tokens of a prompt."""
        return self.static + (self.document + (self.agents - 1) * self.output) / self.agents

    @property
    def decoding(self) -> int:
        """Tokens of all answers."""
        return self.output * (self.agents - 1) + self.last_output


@dataclass(frozen=True, slots=True)
class Place:
    """What there is: devices, the link between them, whether the weights fit twice, and measured speeds.

    `tp` are the speeds of an engine over all devices, if they were measured. `alone` are those of an engine that runs
    alone, where it has more of the machine than one of several: on CPUs all cores. `across` is what two engines cost
    each other; None takes them to be independent.
    """

    devices: int
    link: str
    fits_twice: bool
    speeds: Speeds
    tp: Speeds | None = None
    gpus: bool = True
    alone: Speeds | None = None
    across: Across | None = None

    @property
    def beside(self) -> Across:
        """What prefilling for one engine's downstream on another one costs."""
        return self.across or Across(self.speeds.prefill_s, 0.0)

    @property
    def single(self) -> Speeds:
        """The speeds of the one engine of serial and same-device overlap."""
        return self.alone or self.speeds


def serial_s(work: Workload, speeds: Speeds) -> float:
    """One engine, one agent after the other."""
    prompts = work.static * work.agents + work.document + work.output * (work.agents - 1)
    return prompts * speeds.prefill_s + work.agents * speeds.floor_s + work.decoding * speeds.step_s


def fits_beside(work: Workload, step_s: float, across: Across) -> float:
    """How many tokens of a downstream's static prefix are prefilled elsewhere while its upstream speaks.

    The answer takes `output * step_s + tokens * slowed_s`, and the tokens take `tokens * prefill_s` of that.
    """
    each = across.prefill_s - across.slowed_s
    return min(work.static, work.output * step_s / each) if each > 0 else work.static


def ping_pong_s(work: Workload, place: Place) -> float:
    """Two engines: a downstream's prompt is prefilled while its upstream speaks elsewhere."""
    speeds, across = place.speeds, place.beside
    first = (work.static + work.document) * speeds.prefill_s + speeds.floor_s
    fits = fits_beside(work, speeds.step_s, across)
    downstream = fits * across.slowed_s + (work.static - fits) * speeds.prefill_s + speeds.floor_s
    return first + work.decoding * speeds.step_s + (work.agents - 1) * downstream


def same_device_s(work: Workload, speeds: Speeds) -> float:
    """One engine: the same, beside its own decode steps, each of which takes a piece along and is longer for it."""
    riding = min(work.static, work.output * STEP)
    downstream = (riding + work.output) * speeds.mixed_s + (work.static - riding) * speeds.prefill_s + speeds.floor_s
    first = (work.static + work.document) * speeds.prefill_s + speeds.floor_s
    return first + work.decoding * speeds.step_s + (work.agents - 1) * downstream


def predict(work: Workload, place: Place) -> dict[Topology, float]:
    """End to end in each topology that is possible here, s. Chains at once share what engines there are."""
    speeds = place.speeds
    times: dict[Topology, float] = {
        "serial": serial_s(work, place.single),
        "same-device overlap": same_device_s(work, place.single),
    }
    if place.devices > 1 and place.fits_twice:
        times["ping-pong"] = ping_pong_s(work, place)
    if place.devices > 1 and place.gpus:
        times["tensor parallel"] = serial_s(work, place.tp or speeds.faster(TP_GAIN[place.link]))
    return times


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use, in the words of the settings, and why."""

    topology: Topology
    setting: str
    reasons: tuple[str, ...]


_SETTINGS: Mapping[Topology, str] = {
    "serial": 'one device, overlap="off"',
    "ping-pong": 'two devices, overlap="on"',
    "same-device overlap": 'one device, overlap="same-device"',
    "tensor parallel": "tensor_parallel_size=2",
}


def advise(work: Workload, place: Place) -> Advice:
    """The topology with the shortest time; serial unless another is clearly faster; several engines for many chains."""
    times = predict(work, place)
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] > WORTH * times["serial"]:
        fastest = "serial"
    if work.chains >= 2 * place.devices and "ping-pong" in times and fastest != "serial":
        fastest = "ping-pong"  # an engine for each share of the chains decodes more than one engine over both devices
    return Advice(fastest, _SETTINGS[fastest], tuple(_reasons(work, place, times)))


def _reasons(work: Workload, place: Place, times: Mapping[Topology, float]) -> list[str]:
    speeds = place.speeds
    prefill, decode = work.static * place.beside.prefill_s, work.output * speeds.step_s
    share = (work.agents - 1) * work.static * place.single.prefill_s / times["serial"]
    hidden = fits_beside(work, speeds.step_s, place.beside) / work.static if work.static else 1.0
    reasons = [
        f"Prefilling the static prefixes of the agents after the first takes {share:.0%} of a serial run.",
        f"An answer of {work.output:,} tokens takes {decode:.2f} s, a static prefix of {work.static:,} takes "
        f"{prefill:.2f} s: {hidden:.0%} of it fits beside the answer.",
        _of_mixing(work, place.single),
    ]
    if place.across is not None:
        slowed = work.static * place.across.slowed_s
        reasons.append(f"Prefilled on another device, it slows a decode by {slowed:.2f} s.")
    if place.alone is not None:
        faster = speeds.prefill_s / place.alone.prefill_s
        reasons.append(f"One engine alone has all cores: it prefills {faster:.1f} times as fast as one of several.")
    if place.devices < 2:
        reasons.append("There is one device, so prefills can only ride on its own decode steps.")
    elif not place.fits_twice:
        reasons.append("The weights do not fit twice, so there is no second engine to prefill on.")
    if place.devices > 1 and place.gpus and place.tp is None:
        gain = TP_GAIN[place.link]
        reasons.append(f"An engine over two devices is taken to be {gain:.2f} times as fast (--tp measures it).")
    if work.chains >= 2 * place.devices > 2:
        reasons.append(f"{work.chains} chains at once keep every device busy: engines of their own serve more of them.")
    return reasons


def _of_mixing(work: Workload, speeds: Speeds) -> str:
    slowed, gained = work.static * speeds.mixed_s, work.static * speeds.prefill_s
    verdict = "less" if slowed < gained else "no less"
    return f"Prefilled beside a decode on its own device, it slows that by {slowed:.2f} s: {verdict} than it saves."


def pays_from(work: Workload, place: Place, topology: Topology) -> int | None:
    """The smallest static prefix, 256 tokens doubled up to 32k, with which a topology is clearly faster than serial."""
    for static in (256 << power for power in range(8)):
        times = predict(replace(work, static=static), place)
        if topology in times and times[topology] <= WORTH * times["serial"]:
            return static
    return None
