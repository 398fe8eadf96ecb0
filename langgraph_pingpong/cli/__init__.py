"""The command line: `pingpong run GRAPH`."""

from langgraph_pingpong.cli.main import app

__all__ = ["app"]
