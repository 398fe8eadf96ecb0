"""Where the next prompt goes: decisions on plain data, which the pool carries out.

**Start.** A run starts on the device with the least load; of several, on the one where the fewest open runs started.
The load is the leases with the one to come, times how slow the device is.

**A call** that no edge prepared goes to its place in the ring, (start + i) mod N for the i-th call of a run. Another
device is chosen if its load is clearly less. Then the device that holds the longest prefix of the prompt is looked
at: it wins if it *saves more than is new*, which is, in tokens:

    what it holds more than the other  >  what it would have to compute + CROWD_TOKENS for each lease of more load

So a conversation stays where its turns are cached, and a beginning that many prompts share does not draw them all to
one device.

**An edge** opens on a device other than its upstream's, chosen by the same rules from the prompt as far as it is known.
There it hides what is new behind the upstream's answer, but computes once more what the upstream's device holds. If
by the same rule, with ANSWER_TOKENS more for the answer to come, the upstream's device wins, no edge is opened: the
call will go there by itself. No edge is opened either where there is no other device for it.

**Slow devices.** Of every ENOUGH_TOKENS times between tokens on a device a median is taken, apart for each number of
leases and each order of prompt length. A device whose median was clearly above that of the fastest, twice in a row,
gets no edges for a while, and fewer calls: its leases count as many times as it is slow, twice at most. Not none: all
others together may have neither the time nor the cache for what it did. Only medians that overlap in time are compared:
a busy machine slows them all.

Devices that are down get nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

CLEARLY_FEWER = 2
"""So many leases of load less than the device whose turn it is make another device the better one."""

CROWD_TOKENS = 1024
"""What a lease counts for where it is weighed against cached tokens: how many could be computed in the time that an
answer loses to another one on its device."""

ANSWER_TOKENS = 256
"""What an answer that is still to come counts for, where it is weighed against cached tokens."""

MAX_BLOCKS = 1 << 16
"""Blocks that are remembered of a device whose cache is of unknown size."""

SLOW_FACTOR = 1.5
"""A device is slow if its tokens take so many times as long as those of the fastest..."""

MOST_TIMES_SLOW = 2.0
"""A slow device counts as so many times as slow at most: medians of a moment tell that it is, and badly by how much."""

SLOW_BY_S = 0.001
"""...and so many seconds longer: what is less is lost in the noise of the program itself."""

SLOW_IN_A_ROW = 2
"""So many medians in a row have to say so."""

ENOUGH_TOKENS = 256
"""Of so many times between tokens a median is taken."""

SLOW_FOR_S = 30.0
"""How long a device counts as slow, in seconds; then it is tried again."""

Load = tuple[int, int]
"""What decoding speed depends on: leases on the device, and the order of the prompt's length."""


def block_keys(ids: Sequence[int], block_size: int, salt: str | None, parent: int | None = None) -> list[int]:
    """One key for each full block of a prompt; it stands for the block and all before it, under this salt.

    With the key `parent` the ids go on behind its block.
    """
    raw, step = array("I", ids).tobytes(), block_size * array("I").itemsize
    parent = hash(salt) if parent is None else parent
    keys = []
    for start in range(0, len(raw) // step * step, step):
        parent = hash((parent, raw[start : start + step]))
        keys.append(parent)
    return keys


class HeldBlocks:
    """What a device has cached as far as can be told from what went there, least recently used first."""

    def __init__(self, capacity: int = MAX_BLOCKS) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        """A prompt was computed or found there. Its end is forgotten before its beginning, as vLLM does."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[int]) -> None:
        """Blocks are not cached any more."""
        for key in keys:
            self._keys.pop(key, None)

    def count(self, keys: Sequence[int]) -> int:
        """How many blocks from the beginning of a prompt are held."""
        return next((number for number, key in enumerate(keys) if key not in self._keys), len(keys))

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._keys.clear()


@dataclass
class Pace:
    """How fast a device decodes at one load: the last median of the seconds between tokens, and when it was taken."""

    median: float = 0.0
    at: float = float("-inf")
    began: float = 0.0
    slow_in_a_row: int = 0
    _times: list[float] = field(default_factory=list)

    def token_took(self, seconds: float, now: float) -> bool:
        """Note the time between two tokens; whether there is a new median."""
        if not self._times:
            self.began = now
        self._times.append(seconds)
        if len(self._times) < ENOUGH_TOKENS:
            return False
        self.median, self.at = median(self._times), now
        self._times.clear()
        return True


@dataclass
class Place:
    """What is known of one device, beside its leases."""

    block_size: int = 16
    up: bool = True
    slow_until: float = 0.0
    times_slower: float = 1.0
    held: HeldBlocks = field(default_factory=HeldBlocks)
    paces: dict[Load, Pace] = field(default_factory=dict)


class Placement:
    """The state that decisions rest on, one entry a device. Times are seconds of one monotonic clock."""

    def __init__(self, size: int) -> None:
        self.places = [Place() for _ in range(size)]
        self.leases = [0] * size

    # -- choices -------------------------------------------------------------------------------------------

    def start(self, open_runs: Sequence[int], now: float) -> int:
        """Where a run starts; `open_runs` tells how many runs that are not over started on each device."""
        return min(self.up(), key=lambda i: (self.load(i, now), open_runs[i]))

    def for_call(self, preferred: int, ids: Sequence[int], salt: str | None, now: float) -> int:
        """The device for a call whose turn in the ring is `preferred`; one that is down only if all are."""
        return self._choose(preferred, self.up(), self.held_tokens(ids, salt), len(ids), now)

    def for_edge(self, upstream: int, preferred: int, ids: Sequence[int], salt: str | None, now: float) -> int | None:
        """The device for an edge; None if the call it is for does better without."""
        others = [i for i, place in enumerate(self.places) if i != upstream and place.up and not self._is_slow(i, now)]
        if not others:
            return None
        held = self.held_tokens(ids, salt)
        chosen = self._choose(preferred, others, held, len(ids), now)
        more = self.load(upstream, now, ending=1) - self.load(chosen, now)  # the upstream's own lease is about to end
        quiet = _saves_more_than_is_new(held[upstream], held[chosen], len(ids) + ANSWER_TOKENS, more)
        return None if quiet else chosen

    def for_rest(
        self, failed: int, among: Iterable[int], ids: Sequence[int], salt: str | None, now: float
    ) -> int | None:
        """The device for an answer whose own device failed; None if no other is up."""
        left = [index for index in among if self.places[index].up]
        return self._choose(failed + 1, left, self.held_tokens(ids, salt), len(ids), now) if left else None

    def load(self, index: int, now: float, ending: int = 0) -> float:
        """The leases of a device with the one to come and without those `ending`, times how slow it is."""
        times = min(self.places[index].times_slower, MOST_TIMES_SLOW) if self._is_slow(index, now) else 1.0
        return (self.leases[index] + 1 - ending) * times

    def _is_slow(self, index: int, now: float) -> bool:
        return now < self.places[index].slow_until

    def up(self) -> list[int]:
        """The devices that are up; all, if none is."""
        return [i for i, place in enumerate(self.places) if place.up] or list(range(len(self.places)))

    def held_tokens(self, ids: Sequence[int], salt: str | None) -> list[int]:
        """How many tokens from the beginning of a prompt each device holds."""
        keys = {size: block_keys(ids, size, salt) for size in {place.block_size for place in self.places}}
        return [place.held.count(keys[place.block_size]) * place.block_size for place in self.places]

    def _choose(self, preferred: int, among: Sequence[int], held: Sequence[int], tokens: int, now: float) -> int:
        size = len(self.places)
        ring = sorted(among, key=lambda index: (index - preferred) % size)
        loads = {index: self.load(index, now) for index in ring}
        home, lightest = ring[0], min(ring, key=loads.__getitem__)
        clearly = CLEARLY_FEWER if home == preferred % size and not self._is_slow(home, now) else 0
        if loads[home] - loads[lightest] >= clearly:
            home = lightest
        holder = max(ring, key=held.__getitem__)
        more = loads[holder] - loads[home]
        return holder if _saves_more_than_is_new(held[holder], held[home], tokens, more) else home

    # -- what happened -------------------------------------------------------------------------------------

    def computed(self, index: int, ids: Sequence[int], salt: str | None) -> None:
        """A prompt is being computed on a device, and cached from now on."""
        place = self.places[index]
        place.held.add(block_keys(ids, place.block_size, salt))

    def token_took(self, index: int, seconds: float, prompt_tokens: int, now: float) -> float | None:
        """A device said a token. If that shows that it is slow, returns how many times as slow as the fastest."""
        place, load = self.places[index], (self.leases[index], prompt_tokens.bit_length())
        own = place.paces.setdefault(load, Pace())
        if not own.token_took(seconds, now):
            return None
        others = [other.paces[load] for other in self.places if other is not place and load in other.paces]
        if not (medians := [pace.median for pace in others if pace.at >= own.began]):
            return None
        fastest = min(medians)
        slow = own.median > max(fastest * SLOW_FACTOR, fastest + SLOW_BY_S)
        own.slow_in_a_row = own.slow_in_a_row + 1 if slow else 0
        if own.slow_in_a_row < SLOW_IN_A_ROW:
            return None
        place.slow_until, place.times_slower = now + SLOW_FOR_S, own.median / fastest
        place.paces.clear()
        return place.times_slower

    def went_down(self, index: int) -> None:
        """A device serves no more, and has lost what it had cached."""
        place = self.places[index]
        place.up = False
        place.held.clear()
        place.paces.clear()

    def came_up(self, index: int, block_size: int, cache_tokens: int | None) -> None:
        """A device serves, for the first time or again."""
        place = self.places[index]
        place.up, place.block_size = True, block_size
        place.held.capacity = cache_tokens // block_size if cache_tokens else MAX_BLOCKS

    def forget_cached(self) -> None:
        """Nothing is cached on any device."""
        for place in self.places:
            place.held.clear()


def _saves_more_than_is_new(held: int, otherwise: int, tokens: int, more_load: float) -> bool:
    return held - otherwise > tokens - held + CROWD_TOKENS * max(0.0, more_load)
