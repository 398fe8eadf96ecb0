"""Learned edges: what followed a call in earlier runs, and what its prompt was made of.

Passive: nothing of the user's is run. What one run shows is used in the next; from the second observation on only
what the last two agree on is trusted. That nothing followed is an observation, too.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langgraph_pingpong.edges.book import Answers, CallRecord, Outcome, Shaping, sources_of
from langgraph_pingpong.edges.template import AFTER_TOOLS, Template, ToolRound, learn
from langgraph_pingpong.growing_prompt import CallKey

MAX_CALL_SITES = 512
"""Call sites of one memory that are remembered; the ones used least recently are forgotten first."""

MAX_FOLLOWERS = 16
"""Followers of one call that are remembered."""

MAX_OUTCOMES = 3
"""Outcomes of one round of a call that are remembered, that of the call under way included."""

MAX_ROUNDS = 32
"""Rounds of a loop that are told apart; those beyond count as one."""

At = tuple[Hashable, CallKey]
"""A tenant and a call of its graph."""

Site = tuple[str, ...]
"""The names of the nodes around a node, and its own."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A call that followed another one: its prompt as it was seen last and, where that was different, before that.

    `steps` is the number of supersteps between the two, where they are of the same graph.
    """

    templates: tuple[Template, ...] = ()
    shaping: Shaping = field(default_factory=Shaping)
    steps: int | None = None
    times: int = 0
    """How often it was seen."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The followers of a call in its last runs; it is `certain` if all saw the same ones. `runs` is how many.

    `times` tells how often each follower was seen in all runs.
    """

    followers: Mapping[CallKey, Follower]
    certain: bool
    runs: int
    times: Mapping[CallKey, int] = field(default_factory=dict)


@dataclass
class CallSite:
    """What followed one call: the outcomes of each round, the newest last, and the followers."""

    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    followers: OrderedDict[CallKey, Follower] = field(default_factory=OrderedDict)

    @property
    def settled(self) -> bool:
        """Whether it is known of every outcome what it is."""
        return all(outcome.settled for past in self.outcomes.values() for outcome in past)

    def past(self, record: CallRecord) -> list[set[CallKey]]:
        """What followed in this round lately; for a round not seen before, in the one before it."""
        for number in range(_round(record), -1, -1):
            outcomes = [o for o in self.outcomes.get(number, ()) if o.settled and o is not record.outcome]
            if outcomes:
                return [set(outcome.followers) for outcome in outcomes]
        return []


class Memory:
    """What was learned of some nodes, for each tenant apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: OrderedDict[At, CallSite] = OrderedDict()
        self._nodes: dict[Site, weakref.WeakSet[Any]] = {}

    def add_node(self, site: Site, spec: Any) -> None:
        """Note which object in a compiled graph the node at a site is."""
        with self._lock:
            self._nodes.setdefault(site, weakref.WeakSet()).add(spec)

    def nodes_at(self, site: Site) -> list[Any]:
        """The nodes at a site, one for each graph that is alive; none if no call of it was seen."""
        with self._lock:
            return list(self._nodes.get(site, ()))

    def began(self, tenant: Hashable, record: CallRecord) -> None:
        """A call begins: what follows it is noted from now on."""
        with self._lock:
            site = self._site(tenant, record.key)
            outcomes = site.outcomes.setdefault(_round(record), [])
            outcomes.append(record.outcome)
            del outcomes[:-MAX_OUTCOMES]
            if site.followers:
                self._changed((tenant, record.key))

    def observe(self, tenant: Hashable, before: CallRecord, record: CallRecord, template: Template) -> None:
        """A call followed the one `before` it, with a prompt of this template."""
        with self._lock:
            followers = self._site(tenant, before.key).followers
            known = followers.get(record.key, Follower())
            templates = (*(old for old in known.templates[-1:] if old != template), template)
            followers[record.key] = Follower(templates, record.shaping, _steps(before, record), known.times + 1)
            before.outcome.followers.add(record.key)
            followers.move_to_end(record.key)
            if len(followers) > MAX_FOLLOWERS:
                followers.popitem(last=False)
            self._changed((tenant, before.key))

    def expected(self, tenant: Hashable, record: CallRecord) -> Expected:
        """What earlier runs of a call saw lately."""
        with self._lock:
            site = self._site(tenant, record.key)
            past = site.past(record)
            seen: set[CallKey] = set().union(*past)
            certain = all(outcome == seen for outcome in past)
            times = {key: follower.times for key, follower in site.followers.items()}
            return Expected({k: f for k, f in site.followers.items() if k in seen}, certain, len(past), times)

    def after_tools(self, tenant: Hashable, record: CallRecord) -> list[tuple[CallKey, Follower]]:
        """What may follow a call that has called tools, likeliest first: what followed when it called the same ones.

        Where that was never seen: whatever followed other tools, else the same call with the results in its prompt.
        """
        with self._lock:
            site = self._site(tenant, record.key)
            behind_tools = {key: follower for key, follower in site.followers.items() if _reads_results(follower)}
            past = [outcome for outcomes in site.outcomes.values() for outcome in outcomes]
            same = [o for o in past if o.settled and o is not record.outcome and o.called == record.outcome.called]
            if not (same or behind_tools):
                return [(record.key, Follower((AFTER_TOOLS,), record.shaping))]
            times = Counter(key for outcome in same for key in outcome.followers)
            keys = [key for key in reversed(behind_tools) if key in times or not same]
            return [(key, behind_tools[key]) for key in sorted(keys, key=lambda key: -times[key])]

    def followed(self) -> set[tuple[CallKey, CallKey]]:
        """Calls, each with one that followed it lately in some tenant's runs."""
        with self._lock:
            return {
                (key, follower)
                for (_, key), site in self._sites.items()
                for follower in site.followers
                if any(follower in outcome.followers for past in site.outcomes.values() for outcome in past)
            }

    def _site(self, tenant: Hashable, key: CallKey) -> CallSite:
        site = self._sites.setdefault((tenant, key), CallSite())
        self._sites.move_to_end((tenant, key))
        if len(self._sites) > MAX_CALL_SITES:
            self._sites.popitem(last=False)
        return site

    def _changed(self, at: At) -> None:
        """Something was learned about a call."""


_GIVEN: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def give_memory(spec: Any, memory: Memory) -> None:
    """Let a node learn there, and not for its pool and its own life only."""
    _GIVEN[spec] = memory


_POOLS: weakref.WeakSet[LearnedEdges] = weakref.WeakSet()


def memories_of(spec: Any) -> list[Memory]:
    """Wherever something was learned of a node: in the memory that it was given, or on each pool that ran it."""
    if given := _GIVEN.get(spec):
        return [given]
    return [memory for pool in list(_POOLS) if (memory := pool.existing(spec))]


class LearnedEdges:
    """The memories of one pool: each node has its own, unless it was given one."""

    def __init__(self) -> None:
        _POOLS.add(self)
        self._lock = threading.Lock()
        self._memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()

    def memory_of(self, spec: Any) -> Memory:
        """Where is learned what follows a node's calls."""
        with self._lock:
            return _GIVEN.get(spec) or self._memories.setdefault(spec, Memory())

    def existing(self, spec: Any) -> Memory | None:
        """The node's own memory on this pool, if there is one."""
        with self._lock:
            return self._memories.get(spec)

    def began(self, spec: Any, tenant: Hashable, record: CallRecord) -> None:
        """A call begins: what follows it is noted from now on."""
        self.memory_of(spec).began(tenant, record)

    def observe(self, tenant: Hashable, before: CallRecord, record: CallRecord, answers: Answers) -> None:
        """Learn what the prompt of `record` took from the call `before` it and from the answers so far."""
        spec, follower = before.spec and before.spec(), record.spec and record.spec()
        if spec is None or follower is None:  # the graph is gone
            return
        memory = self.memory_of(spec)
        memory.add_node(record.key.site, follower)
        memory.observe(tenant, before, record, learn(record.messages, sources_of(before, answers)))


def _reads_results(follower: Follower) -> bool:
    return any(isinstance(part, ToolRound) for template in follower.templates for part in template)


def _round(record: CallRecord) -> int:
    return min(record.round, MAX_ROUNDS - 1)


def _steps(before: CallRecord, record: CallRecord) -> int | None:
    return record.step - before.step if before.key.site[:-1] == record.key.site[:-1] else None
