"""Small graphs, one for each thing that LangGraph can do, and a way to run them with edges on and off.

`SCENARIOS` holds them; `run(scenario, overlap)` gives a record of all that could be seen, with every certificate.
"""

from tests.graph_gallery import branches, chains, fan
from tests.graph_gallery.running import RoundRecord, RunRecord, run
from tests.graph_gallery.scene import SCENARIOS, Scenario, Scene

__all__ = ["SCENARIOS", "RoundRecord", "RunRecord", "Scenario", "Scene", "branches", "chains", "fan", "run"]
