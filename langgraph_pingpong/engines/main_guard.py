"""Finds scripts that start engines without a main guard, before they start themselves again.

Engines are child processes started by spawn, which imports the main script anew. Without the guard that import
would start engines too.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
import threading
from types import FrameType, ModuleType

from langgraph_pingpong.errors import MissingMainGuard


def check_main_guard() -> None:
    """Refuse to start engines from unguarded top-level code of the main script.

    It is the main thread's stack that is looked at, since the call may come from a thread that works for it.

    Raises:
        MissingMainGuard: the main script would run again in every engine process, or this is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise MissingMainGuard("This process is an engine that is still importing the main script.")
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    line = _running_line(sys._current_frames().get(threading.main_thread().ident or 0), main)
    if path is None or line is None or _runs_a_package(main):
        return
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError):
        return
    if not _is_guarded(tree, line):
        raise MissingMainGuard(f"{path}, line {line}, starts engines at the top level of the script.")


def _runs_a_package(main: ModuleType) -> bool:
    """Whether it is `python -m package`: spawn does not import a `__main__` of that kind."""
    name = getattr(getattr(main, "__spec__", None), "name", "")
    return name == "__main__" or name.endswith(".__main__")


def _running_line(frame: FrameType | None, main: ModuleType) -> int | None:
    """The line of the main script's top level that is being run; None if its top level is done or was never run."""
    line = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main):
            line = frame.f_lineno  # the outermost wins: others are texts that the script executes
        frame = frame.f_back
    return line


def _is_guarded(tree: ast.Module, line: int) -> bool:
    return any(
        isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or 0) and _mentions_name(node.test)
        for node in ast.walk(tree)
    )


def _mentions_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
