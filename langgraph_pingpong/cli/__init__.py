"""The command line: `pingpong run GRAPH` and `pingpong serve`."""

from langgraph_pingpong.cli.main import app

__all__ = ["app"]
