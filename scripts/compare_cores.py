"""Whether one CPU core that multiplies matrices slows another that reads weights, as prefills and decodes do.

    python scripts/compare_cores.py

No engine takes part: what engines lose beside each other and this does not show is lost to their programs, which run on
the same cores.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.synchronize import Event

from rich.console import Console

SIZE = 1536, 576
MATRICES = 150
"""265 MB in bfloat16, as much as SmolLM2-135M has, and far more than any cache holds."""

SECONDS = 6.0
PREFILLS = 512, 1536


def decode(core: int, times: multiprocessing.Queue[float]) -> None:
    """Read all weights for one token again and again; tells how long each time took, in ms."""
    multiply = _weights(core, tokens=1)
    steps, started = 0, time.monotonic()
    while (took := time.monotonic() - started) < SECONDS:
        multiply()
        steps += 1
    times.put(1000 * took / steps)


def prefill(core: int, tokens: int, up: Event, stop: Event) -> None:
    """Multiply with many tokens until told to stop."""
    multiply = _weights(core, tokens)
    up.set()
    while not stop.is_set():
        multiply()


def _weights(core: int, tokens: int):  # type: ignore[no-untyped-def]
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)
    weights = [torch.randn(*SIZE).to(torch.bfloat16) for _ in range(MATRICES)]
    x = torch.randn(tokens, SIZE[1]).to(torch.bfloat16)
    return lambda: [torch.nn.functional.linear(x, each) for each in weights]


def main() -> None:
    """Print a line for each case, twice."""
    console, context = Console(highlight=False), multiprocessing.get_context("spawn")
    times = context.Queue()
    for tokens in (0, *PREFILLS) * 2:
        up, stop = context.Event(), context.Event()
        other = context.Process(target=prefill, args=(1, tokens, up, stop)) if tokens else None
        if other:
            other.start()
            up.wait()
        reader = context.Process(target=decode, args=(0, times))
        reader.start()
        beside = f"beside prefills of {tokens} tokens" if tokens else "alone"
        console.print(f"{beside}: {times.get():.1f} ms")
        reader.join()
        stop.set()
        if other:
            other.join()


if __name__ == "__main__":
    main()
