"""Ends an engine's process when the program that started it is gone.

A program that is killed, or ended by SIGTERM, cannot shut its engines down, and vLLM's engine processes wait for such a
parent for ever, with all their memory. vLLM runs the entry points of the group `vllm.general_plugins` in each of its
processes, and so this one, which does nothing where the variable below does not name the parent. (A user's
`VLLM_PLUGINS` that leaves it out switches it off.) The processes that an engine itself has started end with it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "PINGPONG_PARENT"
"""The environment variable that holds the process id of the program that starts engines."""

LOOK_EVERY_S = 1.0
"""The pause between two looks at the parent, in seconds."""

GIVE_UP_AFTER_S = 10.0
"""How long an engine may take to end when asked to, in seconds; then it is killed."""


def end_with_parent() -> None:
    """The entry point: from now on this process ends with its parent, if that has started it as an engine."""
    if os.environ.get(PARENT) == str(parent := os.getppid()):
        threading.Thread(target=_watch, args=(parent,), name="pingpong-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:  # it changes when the parent ends
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GIVE_UP_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)
