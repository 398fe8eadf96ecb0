"""Edges: which calls of the model come next, and what their prompts will be."""

from langgraph_pingpong.edges.declared import AgentNode, agent_node
from langgraph_pingpong.edges.langgraph_internals import running_task
from langgraph_pingpong.edges.langgraph_loops import graphs_around, when_graph_ends
from langgraph_pingpong.edges.langgraph_streams import custom_stream
from langgraph_pingpong.edges.options import NodeOptions, options_of, streaming_edges
from langgraph_pingpong.edges.rehearsal import REHEARSAL, Rehearsal
from langgraph_pingpong.edges.tasks import RunningTask
from langgraph_pingpong.edges.tool_results import streaming_tool

__all__ = [
    "REHEARSAL",
    "AgentNode",
    "NodeOptions",
    "Rehearsal",
    "RunningTask",
    "agent_node",
    "custom_stream",
    "graphs_around",
    "options_of",
    "running_task",
    "streaming_edges",
    "streaming_tool",
    "when_graph_ends",
]
