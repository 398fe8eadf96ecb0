"""Whether a run is a result: complete, and its counts equal whoever counts. Else it is an error, not a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from langgraph_pingpong.bench.profiles import Work
from langgraph_pingpong.errors import RunFailed

Line = Mapping[str, Any]


def check_run(line: Line, work: Work, *, strict_tokens: bool, cold: bool) -> None:
    """Check one run.

    Args:
        line: the run.
        work: what it was to do.
        strict_tokens: whether every answer must have as many tokens as were asked for.
        cold: whether the caches were empty when it began.

    Raises:
        RunFailed: it is not complete, or contradicts itself.
    """
    where = f"{line['mode']}, run {line['run']}"
    _check_complete(where, line, work)
    _check_tokens(where, line["agents"], line["answers"])
    _check_turns(where, line.get("turns", ()))
    if strict_tokens:
        _check_asked(where, line["agents"], work.outputs)
    if cold and (warm := first_cached(line)):
        raise RunFailed(f"{where}: the first prompt found {warm} tokens in caches that were to be empty.")


def _check_complete(where: str, line: Line, work: Work) -> None:
    texts = [text for chain in line["texts"] for text in chain.values()]
    if len(line["agents"]) != work.calls:
        raise RunFailed(f"{where}: {len(line['agents'])} of {work.calls} answers were finished.")
    if len(texts) != work.calls or not all(agent["output_tokens"] for agent in line["agents"]):
        raise RunFailed(f"{where}: some answers are empty.")
    if line["e2e_ms"] <= 0 or not line["events"]:
        raise RunFailed(f"{where}: nothing was measured.")


def _check_turns(where: str, turns: Sequence[Line]) -> None:
    """Agents with tools run them: a graph also goes on when a call was malformed, and nobody waits for a tool then."""
    if without := sum(not turn["tools"] for turn in turns):
        raise RunFailed(f"{where}: {without} of {len(turns)} turns ran no tool.")


def _check_tokens(where: str, agents: Sequence[Line], answers: Sequence[Line]) -> None:
    """Tokens that the session reports, against those that came out of the engine for the same prompt."""
    reported = Counter(_counted(agent["device"], agent["prompt_sha256"], agent["output_tokens"]) for agent in agents)
    said = Counter(
        _counted(answer["device"], answer["prompt_sha256"], sum(count for _, count in answer["tokens"]))
        for answer in answers
        if answer["finish_reason"]
    )
    if wrong := reported - said:
        device, _, tokens = next(iter(wrong))
        raise RunFailed(f"{where}: an answer on {device} is reported with {tokens} tokens; the engine says otherwise.")


def _counted(device: str, sha256: str, tokens: int) -> tuple[str, str, int]:
    return device, sha256, tokens


def _check_asked(where: str, agents: Sequence[Line], outputs: Mapping[str, int]) -> None:
    for agent in agents:
        if agent["output_tokens"] != outputs.get(agent["node"], agent["output_tokens"]):
            raise RunFailed(
                f"{where}: {agent['node']} answered with {agent['output_tokens']} tokens, not {outputs[agent['node']]}."
            )


def first_cached(line: Line) -> int:
    """Tokens of the first prompt that were in the prefix cache."""
    for event in line["events"]:
        if event["name"] == "first_token":
            return event["data"]["cached"] or 0
    return 0
