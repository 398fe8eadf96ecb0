"""What `langgraph dev` serves: every graph of the gallery, all on the same engines.

PINGPONG_DEVICES or PINGPONG_BASE_URLS say where (as `pingpong run` takes them), PINGPONG_MODEL which model. Without
them it is the default model on this machine's devices. Engines start with the first run.
"""

from __future__ import annotations

import os

from graphs import five_agents as _five_agents
from graphs import panel as _panel
from graphs import research_agent as _research_agent
from graphs import review_loop as _review_loop
from graphs import router as _router
from graphs import subgraphs as _subgraphs
from langgraph_pingpong import ChatPingPong


def _listed(name: str) -> list[str] | None:
    """The parts of a variable of the environment; None if it is not set."""
    value = os.environ.get(name)
    return value.split(",") if value else None


MODEL = ChatPingPong(
    model=os.environ.get("PINGPONG_MODEL") or None,
    devices=_listed("PINGPONG_DEVICES"),
    base_urls=_listed("PINGPONG_BASE_URLS"),
    temperature=0.0,
)

five_agents = _five_agents.build(MODEL)
review_loop = _review_loop.build(MODEL, approve=True)
router = _router.build(MODEL)
panel = _panel.build(MODEL)
research_agent = _research_agent.build(MODEL)
subgraphs = _subgraphs.build(MODEL)
