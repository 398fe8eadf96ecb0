"""Learned edges: what followed a call in earlier runs, and what its prompt was made of.

Passive: nothing of the user's is run. What one run shows is used in the next; from the second observation on only
what the last two agree on is trusted.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from langgraph_pingpong.edges.book import Answers, CallRecord, Render, sources_of
from langgraph_pingpong.edges.template import Template, learn
from langgraph_pingpong.growing_prompt import CallKey

MAX_CALL_SITES = 512
"""Call sites of one scope that are remembered; the ones used least recently are forgotten first."""

MAX_FOLLOWERS = 16
"""Followers of one call that are remembered."""


@dataclass
class Follower:
    """A call that followed another one."""

    templates: deque[Template] = field(default_factory=lambda: deque(maxlen=2))
    render: Render | None = None
    spec: weakref.ref[Any] | None = None
    """The follower's node, for its options."""
    steps: int | None = None
    """Supersteps between the two, where they are of the same graph."""


@dataclass
class CallSite:
    """What followed one call: `outcomes` are the followers of its last runs, the newest last, this one's included."""

    outcomes: deque[set[CallKey]] = field(default_factory=lambda: deque(maxlen=3))
    followers: OrderedDict[CallKey, Follower] = field(default_factory=OrderedDict)


class LearnedEdges:
    """What was learned, for each graph and tenant apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, CallSite]] = weakref.WeakKeyDictionary()

    def began(self, spec: Any, tenant: Hashable, record: CallRecord) -> None:
        """A call begins: what follows it is noted from now on."""
        with self._lock:
            self._site(spec, tenant, record.key).outcomes.append(record.followers)

    def observe(self, tenant: Hashable, before: CallRecord, record: CallRecord, answers: Answers) -> None:
        """Learn what the prompt of `record` took from the call `before` it and from the answers so far."""
        spec = before.spec() if before.spec else None
        if spec is None:  # the graph is gone
            return
        template = learn(record.messages, sources_of(before, answers))
        with self._lock:
            followers = self._site(spec, tenant, before.key).followers
            follower = followers.setdefault(record.key, Follower())
            follower.templates.append(template)
            follower.render = record.render
            follower.spec = record.spec
            follower.steps = _steps(before, record)
            before.followers.add(record.key)
            followers.move_to_end(record.key)
            if len(followers) > MAX_FOLLOWERS:
                followers.popitem(last=False)

    def expected(self, spec: Any, tenant: Hashable, record: CallRecord) -> tuple[bool, dict[CallKey, Follower]]:
        """The followers that earlier runs of a call saw lately, and whether all saw the same."""
        with self._lock:
            site = self._site(spec, tenant, record.key)
            past = [set(outcome) for outcome in site.outcomes if outcome and outcome is not record.followers]
            seen: set[CallKey] = set().union(*past)
            certain = all(outcome == seen for outcome in past)
            return certain, {key: follower for key, follower in site.followers.items() if key in seen}

    def _site(self, spec: Any, tenant: Hashable, key: CallKey) -> CallSite:
        sites = self._sites.setdefault(spec, OrderedDict())
        site = sites.setdefault((tenant, key), CallSite())
        sites.move_to_end((tenant, key))
        if len(sites) > MAX_CALL_SITES:
            sites.popitem(last=False)
        return site


def _steps(before: CallRecord, record: CallRecord) -> int | None:
    return record.step - before.step if before.key.site[:-1] == record.key.site[:-1] else None
