"""Garbage collection in a program that serves.

vLLM and torch bring more than a million objects, and each full collection looks at all of them: 0.2 to 0.5 s in which
every answer stands still, several times a minute under load. So what exists once an engine is up is left out of
collections from then on, as vLLM's own server and its engines' processes do. What of that turns into garbage meanwhile
is found when the next engine starts, or one stops.
"""

from __future__ import annotations

import gc


def set_apart() -> None:
    """Leave all that exists now out of full collections; what is garbage already goes first.

    What was left out before is not looked at, so that the first call with tools, which brings little, takes no time.
    """
    gc.collect()
    gc.freeze()


def take_back() -> None:
    """Let collections look at everything again."""
    gc.unfreeze()


def collect() -> None:
    """Find what turned into garbage since it was set apart, such as a model that nobody holds, and its engines."""
    if gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
