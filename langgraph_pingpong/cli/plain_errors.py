"""How a command ends when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from langgraph_pingpong.errors import ConfigError, PingPongError


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show errors that say what to change without a traceback; all others keep theirs."""
    try:
        yield
    except PingPongError as error:
        Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted.")
        raise typer.Exit(130) from None
