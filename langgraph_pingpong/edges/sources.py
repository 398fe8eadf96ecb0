"""Prompt sources: from a call that is being answered to the calls that follow it, with their prompts.

Asked in the order of trust: declared, dry run, learned. For a call that several foresee, the first counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable

from langgraph_pingpong.edges.agents import model_of_agent
from langgraph_pingpong.edges.book import CallRecord, RunBook, Shaping, sources_of
from langgraph_pingpong.edges.declared import AgentNode, Declared
from langgraph_pingpong.edges.langgraph_internals import (
    entered,
    input_of,
    next_tasks,
    node_of,
    rehearsal_config,
    spec_of,
    state_of,
)
from langgraph_pingpong.edges.learned import Expected, Memory
from langgraph_pingpong.edges.options import options_of
from langgraph_pingpong.edges.rehearsal import rehearse, returned
from langgraph_pingpong.edges.sequences import model_sequence
from langgraph_pingpong.edges.tasks import UNKNOWN, NextTask, RunningTask
from langgraph_pingpong.edges.template import Message, Template, fill
from langgraph_pingpong.growing_prompt import (
    CallKey,
    Probes,
    Segment,
    ToolResult,
    agreed,
    known_beginning,
    prompt_segments,
)

NO_MORE: Mapping[str, Any] = {}

RenderMessages = Callable[[Sequence[BaseMessage]], str]
RendererOf = Callable[[Any, Mapping[str, Any]], RenderMessages | None]
"""How the prompts of a model are rendered, given further keyword arguments; None if it is served elsewhere."""

RenderShaped = Callable[[Sequence[Message], Shaping], str]
"""How prompts are rendered that are known by what shapes them."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A call that is expected next, and the segments of its prompt. `source` tells who foresaw it.

    Of one that is not `certain`, since a conditional edge may lead elsewhere, they end where the first answer begins.
    """

    key: CallKey
    step: int | None
    source: str
    segments: Sequence[Segment]
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Known:
    """A call within its run, and how prompts are rendered: what learned edges are asked about."""

    record: CallRecord
    book: RunBook
    probes: Probes
    render: RenderShaped

    def answers(self, variant: int) -> dict[CallKey, str]:
        """The answers of finished calls, and made-up ones of those under way."""
        made_up = {key: self.probes.of(key, variant) for key in self.book.running()}
        return {**self.book.answers(), **made_up}


@dataclass(frozen=True, slots=True)
class Moment(Known):
    """A call that is being answered: what all prompt sources are asked about."""

    task: RunningTask
    renderer_of: RendererOf

    def made_up(self, key: CallKey, variant: int) -> AIMessage:
        """A made-up answer as a message. It has an id, as real ones have: a reducer would draw one, which shows."""
        return AIMessage(self.probes.of(key, variant), id=f"made-up-{key}")


def foresee(moment: Moment, memory: Memory, tenant: Hashable) -> list[Ahead]:
    """The calls expected after the one of `moment`, each from the source that is trusted most.

    Those that are certain come first, then those that earlier runs saw most often.
    """
    expected = memory.expected(tenant, moment.record)
    failure: Exception | None = None
    try:
        told = [*_decided(_rehearsed(moment), expected)]
    except Exception as error:  # noqa: BLE001 - what was learned needs neither the user's code nor copies of the state
        told, failure = [], error
    found: dict[CallKey, Ahead] = {}
    for ahead in (*told, *_learned(moment, memory, expected)):
        found.setdefault(ahead.key, ahead)
    if failure is not None and not found:
        raise failure
    return sorted(found.values(), key=lambda ahead: (not ahead.certain, -expected.times.get(ahead.key, 0)))


def foresee_after_tools(known: Known, memory: Memory, tenant: Hashable) -> list[Ahead]:
    """The calls expected after one that is over and has called tools, likeliest first: their prompts hold the results.

    Nothing is known of the graph but what was learned, and of that only what is no rehearsal: tools are running.
    """
    likely = [
        (key, follower)
        for key, follower in memory.after_tools(tenant, known.record)
        if not any(options_of(spec).off for spec in memory.nodes_at(key.site))
    ]
    certain = len(likely) == 1
    found = []
    for key, follower in likely:
        segments = agreed([_segments(known, template, follower.shaping) for template in follower.templates])
        found.append(Ahead(key, None, "tools", segments if certain else known_beginning(segments), certain))
    return found


def _decided(foreseen: Iterable[Ahead], expected: Expected) -> Iterator[Ahead]:
    """Ends of conditional edges in the light of earlier runs: if all of these took the same, it is taken for certain.

    Once they did so twice, the others are left out.
    """
    usual = expected.followers if expected.certain else {}
    for ahead in foreseen:
        if ahead.certain or ahead.key in usual:
            yield replace(ahead, certain=True)
        elif not (usual and expected.runs > 1):
            yield replace(ahead, segments=known_beginning(ahead.segments))


# -- declared and dry run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call foreseen with one variant of made-up answers."""

    key: CallKey
    step: int
    source: str
    text: str
    certain: bool = True


def _rehearsed(moment: Moment) -> Iterator[Ahead]:
    """Calls of nodes whose prompt is declared or may be found by a dry run."""
    first, second = (list(_calls(moment, variant)) for variant in (0, 1))
    seen = {call.key: call for call in second}
    for call in first:
        if other := seen.get(call.key):
            segments = prompt_segments((call.text, other.text), moment.probes)
            yield Ahead(call.key, call.step, call.source, segments, call.certain)


def _calls(moment: Moment, variant: int) -> Iterator[_Call]:
    node = node_of(moment.task)
    if node is None or not moment.record.alone:
        return
    outcome = _outcome(moment, node, variant)
    if isinstance(outcome, _Call):
        yield outcome
        return
    if outcome is UNKNOWN:
        return

    def sibling(site: tuple[str, ...], push: int | None, other: Runnable[Any, Any]) -> Any:
        declared = _declared(other)
        return declared.update(moment.made_up(CallKey(site, 0, push), variant)) if declared else UNKNOWN

    for task in next_tasks(moment.task, outcome, sibling):
        for ahead in entered(task):
            if not any(options_of(spec).off for spec in ahead.specs) and (call := _told_call(moment, ahead)):
                yield call


def _outcome(moment: Moment, node: Runnable[Any, Any], variant: int) -> Any:
    """What the node returns for a made-up answer, or the next call it makes; `UNKNOWN` if that cannot be told."""
    answer = moment.made_up(moment.record.key, variant)
    declared = _declared(node)
    if declared and (update := declared.update(answer)) is not UNKNOWN:
        return update
    if not options_of(spec_of(moment.task)).dry_run:
        return UNKNOWN
    key, answers = moment.record.key, moment.book.answers()
    earlier = [answers[past] for n in range(key.number) if (past := CallKey(key.site, n, key.push)) in answers]
    config = rehearsal_config(moment.task, state_of(moment.task))
    result, rehearsal = rehearse(node, input_of(moment.task), config, [*earlier, answer.text])
    if returned(result):
        return result
    following = CallKey(key.site, key.number + 1, key.push)
    return _recorded(moment, rehearsal.recorded, following, moment.task.step, "dry run") or UNKNOWN


def _told_call(moment: Moment, ahead: NextTask) -> _Call | None:
    """The first call of a task; none if a node that may not be next needs what only its own branch provides."""
    try:
        call = _first_call(moment, ahead)
    except Exception:
        if ahead.certain:
            raise
        return None
    return call and replace(call, certain=ahead.certain)


def _first_call(moment: Moment, ahead: NextTask) -> _Call | None:
    key = CallKey(ahead.site, 0, ahead.push)
    declared = _declared(ahead.node)
    if declared and (messages := declared.messages(_input_of(ahead))) is not None:
        return _recorded(moment, (declared.model, messages, NO_MORE), key, ahead.step, "declared")
    source = _may_rehearse(moment, ahead)
    if source is None:
        return None
    given = _input_of(ahead)
    config = rehearsal_config(moment.task, given if isinstance(given, Mapping) else {})
    _, rehearsal = rehearse(ahead.node, given, config)
    return _recorded(moment, rehearsal.recorded, key, ahead.step, source)


def _input_of(ahead: NextTask) -> Any:
    """What a task will be given; the user's own code, which may change it, gets a copy."""
    own = isinstance(ahead.node, AgentNode) or any(options_of(spec).dry_run for spec in ahead.specs)
    return copy.deepcopy(ahead.input) if own else ahead.input


def _may_rehearse(moment: Moment, ahead: NextTask) -> str | None:
    """The source under which a node may be run ahead of time: LangChain's own code always may; None if it may not."""
    model = model_of_agent(ahead.node)
    if model is not None and moment.renderer_of(model, NO_MORE):
        return "declared"
    return "dry run" if any(options_of(spec).dry_run for spec in ahead.specs) else None


def _declared(node: Runnable[Any, Any]) -> Declared | None:
    """What a node declares of itself; None if it is an ordinary one."""
    return node if isinstance(node, AgentNode) else model_sequence(node)


def _recorded(moment: Moment, recorded: Any, key: CallKey, step: int, source: str) -> _Call | None:
    if recorded is None:
        return None
    model, messages, kwargs = recorded
    render = moment.renderer_of(model, kwargs)
    return _Call(key, step, source, render(messages)) if render else None


# -- learned -------------------------------------------------------------------------------------------------


def _learned(moment: Moment, memory: Memory, expected: Expected) -> Iterator[Ahead]:
    """Calls that followed this one in earlier runs; of uncertain ones only what is known already."""
    for key, follower in expected.followers.items():
        if any(options_of(spec).off for spec in memory.nodes_at(key.site)):
            continue
        segments = agreed([_segments(moment, template, follower.shaping) for template in follower.templates])
        step = None if follower.steps is None else moment.record.step + follower.steps
        known = segments if expected.certain else known_beginning(segments)
        yield Ahead(key, step, "learned", known, expected.certain)


def _missing(probes: Probes, variant: int, what: Hashable) -> str:
    return probes.of(what if isinstance(what, ToolResult) else ("missing", what), variant)


def _segments(moment: Known, template: Template, shaping: Shaping) -> list[Segment]:
    texts = []
    for variant in (0, 1):
        sources = sources_of(moment.record, moment.answers(variant))
        missing = partial(_missing, moment.probes, variant)
        texts.append(moment.render(fill(template, sources, missing), shaping))
    return prompt_segments(texts, moment.probes)
