"""What computing and reading KV takes, when a test decides it and not a clock on a busy machine."""

from __future__ import annotations

from langgraph_pingpong.kv_planner import Costs, Line


class FixedLine(Line):
    """The same for each token, whatever is measured."""

    def __init__(self, each_s: float) -> None:
        super().__init__()
        super().observe(1, each_s)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""


def fixed_costs(prefill_s: float, pull_s: float) -> Costs:
    """Seconds a token."""
    return Costs(FixedLine(prefill_s), FixedLine(pull_s))
