"""What a request to end does to a command that has engines or servers to shut down."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals(exit_code: Callable[[int], int]) -> Iterator[None]:
    """Leave the block, and so its context managers, at SIGTERM or when the terminal closes.

    Raises:
        SystemExit: such a signal came; `exit_code` tells the code from its number.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(exit_code(number))

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
