"""Events of small runs, made by hand."""

from __future__ import annotations

from typing import Any

from langgraph_pingpong.trace import Event


def event(name: str, at: float, node: str, device: str = "d0", run: str = "r", **data: Any) -> Event:
    return Event(name, 10 + at / 1000, run, node, device, data)


def called(node: str, ms: float, device: str = "d0", run: str = "r") -> Event:
    return event("generate.started", ms, node, device, run, prompt_tokens=100, prompt_sha256="x")


def first(node: str, ms: float, device: str = "d0", run: str = "r", ttft: float = 10) -> Event:
    return event("first_token", ms, node, device, run, ttft_ms=ttft, cached=0)


def finish(node: str, ms: float, device: str = "d0", run: str = "r", upstream: str | None = None) -> Event:
    return event("finish", ms, node, device, run, certificate={"output_tokens": 7, "upstream": upstream})


def append(node: str, ms: float, to: float, tokens: int, device: str = "d1", **more: Any) -> list[Event]:
    return [
        event("append.started", ms, node, device, tokens=tokens, **more),
        event("append.complete", to, node, device, tokens=tokens, cached=0, ms=to - ms, **more),
    ]


def pingpong(**upstream: str) -> list[Event]:
    """A speaks on d0 while B is prefilled on d1: a static piece, one with words of A's, one that is cut short."""
    return [
        called("A", 0),
        first("A", 20),
        *append("B", 21, 40, 64, **upstream),
        *append("B", 50, 55, 96, **upstream),
        finish("A", 60),
        event("append.started", 60, "B", "d1", tokens=128, **upstream),
        event("finalize", 62, "B", "d1", static=70, streamed=26, wasted=0, ready=0, **upstream),
        called("B", 62, "d1"),
        first("B", 70, "d1"),
        finish("B", 90, "d1", upstream="A"),
    ]
