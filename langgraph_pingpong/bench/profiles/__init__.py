"""The workloads that the benchmark runs. Each is documented, seeded, and has values for GPUs, CPUs and fake devices."""

from __future__ import annotations

from collections.abc import Mapping

from langgraph_pingpong.bench.profiles.chains import LONG_PREFILL, SWEEP
from langgraph_pingpong.bench.profiles.conversations import MESSAGES, MULTITURN
from langgraph_pingpong.bench.profiles.meshes import DEBATE, RAG
from langgraph_pingpong.bench.profiles.tool_agents import TOOL_AGENTS
from langgraph_pingpong.bench.profiles.work import Bench, Chain, Params, Profile, Work, parse_chains, parse_values

PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (LONG_PREFILL, SWEEP, MESSAGES, MULTITURN, DEBATE, RAG, TOOL_AGENTS)
}
"""Every profile by its name."""

__all__ = ["PROFILES", "Bench", "Chain", "Params", "Profile", "Work", "parse_chains", "parse_values"]
