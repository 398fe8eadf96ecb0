"""Small graphs, one for each thing that LangGraph can do, and a way to run them with edges on and off.

`SCENARIOS` holds them; `run(scenario, overlap)` gives a record of all that could be seen, with every certificate.
"""

from tests.graph_gallery import (
    agents,
    branches,
    calls,
    chains,
    fan,
    functional,
    human,
    kept,
    protocol,
    state,
    streaming,
    subgraphs,
)
from tests.graph_gallery.running import RoundRecord, RunRecord, run
from tests.graph_gallery.scene import SCENARIOS, Scenario, Scene

MODULES = (chains, calls, branches, fan, subgraphs, functional, human, state, streaming, agents, protocol, kept)
"""Where the scenarios are."""

__all__ = ["MODULES", "SCENARIOS", "RoundRecord", "RunRecord", "Scenario", "Scene", "run"]
