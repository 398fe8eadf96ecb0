"""Finds scripts that start engines without a main guard, before they start themselves again.

Engines are child processes started by spawn, which imports the main script anew. Without the guard that import
would start engines too.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
from types import FrameType

from langgraph_pingpong.errors import MissingMainGuard


def check_main_guard() -> None:
    """Refuse to start engines from unguarded top-level code of the main script.

    Raises:
        MissingMainGuard: the calling code would run again in every engine process, or this is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise MissingMainGuard("This process is an engine that is still importing the main script.")
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    line = _running_line(sys._getframe())
    if path is None or line is None:
        return
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError):
        return
    if not _is_guarded(tree, line):
        raise MissingMainGuard(f"{path}, line {line}, starts engines at the top level of the script.")


def _running_line(frame: FrameType | None) -> int | None:
    """The line of the main script's top level that leads here; None if the call did not come from there."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_guarded(tree: ast.Module, line: int) -> bool:
    for statement in tree.body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return isinstance(statement, ast.If) and _mentions_name(statement.test)
    return True


def _mentions_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
