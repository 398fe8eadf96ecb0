"""Variables of the environment that are others while an engine is built, and the user's own values of them.

The environment is the whole process's. While one model's engine is built, which takes up to minutes, another model may
count its devices: what it reads must be what the user has set, not what the engine is shown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

_LOCK = threading.Lock()
_own: dict[str, str | None] = {}
"""The user's own values of what is replaced now; None is not set."""
_users: dict[str, int] = {}
"""How many have replaced each of them, as several threads may: the last one to leave puts the user's back."""


def own_value(name: str) -> str | None:
    """What the user has set a variable to, None if nothing; also while it is replaced."""
    with _LOCK:
        return _own_value(name)


@contextmanager
def environment_with(values: Mapping[str, str], replaced: Collection[str] = ()) -> Iterator[None]:
    """Set variables for as long as this lasts; a value that the user has set stays, but for those to be `replaced`."""
    with _LOCK:
        for name, value in values.items():
            _replace(name, value, whatever=name in replaced)
    try:
        yield
    finally:
        with _LOCK:
            for name in values:
                _put_back(name)


def _own_value(name: str) -> str | None:
    return _own[name] if name in _own else os.environ.get(name)


def _replace(name: str, value: str, *, whatever: bool) -> None:
    own = _own.setdefault(name, os.environ.get(name))
    _users[name] = _users.get(name, 0) + 1
    if whatever or own is None:
        os.environ[name] = value


def _put_back(name: str) -> None:
    _users[name] -= 1
    if _users[name]:
        return
    del _users[name]
    if (own := _own.pop(name)) is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = own
