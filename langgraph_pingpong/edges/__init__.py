"""Edges: which calls of the model come next, and what their prompts will be."""

from langgraph_pingpong.edges.declared import AgentNode, Predicted, agent_node, predict
from langgraph_pingpong.edges.langgraph_internals import RunningTask, running_task

__all__ = ["AgentNode", "Predicted", "RunningTask", "agent_node", "predict", "running_task"]
