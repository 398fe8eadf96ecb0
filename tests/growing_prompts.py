"""Growing prompts for the tests: found the way the package finds them, with made-up answers of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langgraph_pingpong.growing_prompt import CallKey, GrowingPrompt, Probes, Segment, prompt_segments
from langgraph_pingpong.tokens import ChatTemplate

WRITER = CallKey(("writer",))
CRITIC = CallKey(("critic",))


def segments_of(render: Callable[[str], str]) -> list[Segment]:
    """The segments of a prompt that is made of the writer's answer."""
    probes = Probes()
    return prompt_segments([render(probes.of(WRITER, variant)) for variant in (0, 1)], probes)


def growing_with(tokens: ChatTemplate, use: Callable[[str], list[dict[str, Any]]]) -> GrowingPrompt:
    """The growing prompt of a node that makes these messages of what the writer says."""
    return GrowingPrompt(tokens, segments_of(lambda text: tokens.render(use(text))))


def is_probe(text: str) -> bool:
    """Whether a text was made up to find out how a prompt uses an answer."""
    return text.strip()[:2] in ("Zq", "Kx") and text.strip()[2:5].isdigit()
