"""Learned edges in a file, so that a new process streams from its first run on.

A file is merged with what it holds by then and replaced as a whole, so that several processes can share one. What is
in it only ever makes hints: a file from another state of the graph costs prefills that nobody uses.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from langgraph_pingpong.edges.book import Outcome
from langgraph_pingpong.edges.learned import MAX_CALL_SITES, At, CallSite, Follower, Memory, Site, give_memory
from langgraph_pingpong.errors import ConfigError
from langgraph_pingpong.growing_prompt import CallKey

logger = logging.getLogger(__name__)

FORMAT = "langgraph-pingpong learned edges"
VERSION = 1

MAX_BYTES = 4_000_000
"""The largest file that is written; of more, what was used least recently is left out."""

SAVE_AFTER_S = 5.0
"""How long after something was learned the file is written, in seconds, with all that was learned meanwhile."""

LOCK_WITHIN_S = 2.0
"""How long the file is waited for while another process writes it, in seconds."""


@dataclass
class SavedSite:
    """A call of one tenant and what followed it."""

    tenant: str | int | None
    call: CallKey
    outcomes: dict[int, list[frozenset[CallKey]]]
    followers: list[tuple[CallKey, Follower]]


@dataclass
class SavedFile:
    """All that a file holds, what was used last at the end."""

    format: Literal["langgraph-pingpong learned edges"]
    version: Literal[1]
    sites: list[SavedSite]


_SITE = TypeAdapter(SavedSite)
_FILE = TypeAdapter(SavedFile)


class SavedEdges(Memory):
    """A memory that begins with what a file holds, and keeps it up to date."""

    def __init__(self, path: Path) -> None:
        """Read the file if there is one.

        Raises:
            ConfigError: it holds something else, or cannot be read.
        """
        super().__init__()
        self.path = path
        self._sites.update((_at(site), _loaded(site)) for site in _read(path))
        self._unsaved: OrderedDict[At, None] = OrderedDict()
        self._timer: threading.Timer | None = None
        self._saving = threading.Lock()
        self._warned = False

    def _changed(self, at: At) -> None:
        """Note what to save, and see to it that it is saved: soon, or when the interpreter exits."""
        self._unsaved[at] = None
        self._unsaved.move_to_end(at)
        if self._timer is None:
            atexit.register(self.save)
            self._timer = threading.Timer(SAVE_AFTER_S, self.save)
            self._timer.daemon = True
            self._timer.start()

    def save(self) -> None:
        """Write what was learned since the last time. What cannot be written is warned of once."""
        with self._saving:
            sites = self._take_unsaved()
            try:
                if sites:
                    _merge(self.path, sites)
            except (OSError, ConfigError) as error:
                if not self._warned:
                    logger.warning("Learned edges are not saved in %s: %s", self.path, error)
                self._warned = True
                self._keep_unsaved(sites)

    def _take_unsaved(self) -> list[SavedSite]:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            sites = [(at, self._sites[at]) for at in self._unsaved if at in self._sites]
            # What is not settled is written as it is now, and once more with the next change or at exit.
            self._unsaved = OrderedDict.fromkeys(at for at, site in sites if not site.settled)
            atexit.unregister(self.save)
            if self._unsaved:
                atexit.register(self.save)
            return [_saved(at, site) for at, site in sites]

    def _keep_unsaved(self, sites: Iterable[SavedSite]) -> None:
        """Try again with the next change or at exit."""
        with self._lock:
            self._unsaved = OrderedDict.fromkeys((*map(_at, sites), *self._unsaved))
            atexit.register(self.save)


_OPEN: weakref.WeakValueDictionary[Path, SavedEdges] = weakref.WeakValueDictionary()
_OPENING = threading.Lock()


def learn_in(graph: Any, file: str | os.PathLike[str]) -> None:
    """Let a compiled graph and the graphs within it learn in a file. Graphs of one process share what it holds.

    Raises:
        ConfigError: the file holds something else, or cannot be read, or has no folder.
    """
    path = Path(file).resolve()
    if not path.parent.is_dir():
        raise ConfigError(f"learned={str(file)!r}: there is no folder {path.parent}; make it first.")
    with _OPENING:
        memory = _OPEN.get(path) or SavedEdges(path)
        _OPEN[path] = memory
    for site, spec in _nodes(graph):
        memory.add_node(site, spec)
        give_memory(spec, memory)


def _nodes(*graphs: Any, place: Site = ()) -> Iterator[tuple[Site, Any]]:
    """Every node of the last of the graphs, which lie within each other, and of those within it."""
    yield from (((*place, name), spec) for name, spec in graphs[-1].nodes.items())
    for name, inner in graphs[-1].get_subgraphs():
        if isinstance(getattr(inner, "nodes", None), dict) and inner not in graphs:  # a graph may run itself
            yield from _nodes(*graphs, inner, place=(*place, name))


# -- the file ------------------------------------------------------------------------------------------------


def _at(site: SavedSite) -> At:
    return site.tenant, site.call


def _loaded(site: SavedSite) -> CallSite:
    outcomes = {number: [Outcome(set(each)) for each in past] for number, past in site.outcomes.items()}
    return CallSite(outcomes, OrderedDict(site.followers))


def _saved(at: At, site: CallSite) -> SavedSite:
    outcomes = {
        number: [frozenset(outcome.followers) for outcome in past if outcome.settled]
        for number, past in site.outcomes.items()
    }
    return SavedSite(*at, outcomes, list(site.followers.items()))  # type: ignore[arg-type]


def _read(path: Path) -> list[SavedSite]:
    """What a file holds; nothing if there is none, it is empty, damaged or of another version.

    Raises:
        ConfigError: it holds something else, which must not be overwritten, or cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give learned= another path.") from error
    if not data:
        return []
    if FORMAT.encode() not in data[:200]:
        raise ConfigError(f"{path} holds something else than learned edges: give learned= another path, or remove it.")
    try:
        return _FILE.validate_json(data).sites
    except ValidationError:
        logger.warning("%s is damaged or was written by another version: edges are learned anew.", path)
        return []


def _merge(path: Path, sites: Iterable[SavedSite]) -> None:
    """Put these sites into the file, beside what other processes have put there."""
    with _alone(path.parent):
        lines = {_at(site): _SITE.dump_json(site) for site in _read(path)}
        for site in sites:
            lines.pop(_at(site), None)
            if line := _dumped(site):
                lines[_at(site)] = line
        _replace(path, _within_bounds(lines.values()))


def _dumped(site: SavedSite) -> bytes | None:
    """A site as JSON; None if it would not come back as it is."""
    try:
        line = _SITE.dump_json(site, warnings="error")
        return line if _SITE.validate_json(line) == site else None
    except ValueError:  # pydantic's own are such
        return None


def _within_bounds(lines: Iterable[bytes]) -> list[bytes]:
    """The newest lines that fit, in their order."""
    kept: list[bytes] = []
    room = MAX_BYTES
    for line in reversed(list(lines)):
        if len(line) <= room and len(kept) < MAX_CALL_SITES:
            kept.append(line)
            room -= len(line)
    return kept[::-1]


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Write the file beside its place, readable for its owner only, and move it there: it is whole at any moment."""
    head = f'{{"format":"{FORMAT}","version":{VERSION},"sites":[\n'.encode()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(head + b",\n".join(lines) + b"\n]}\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, so that none overwrites what another has just added.

    Where there is no such lock, or somebody keeps it, the last one wins: something is learned once more.
    """
    handle = None
    with contextlib.suppress(ImportError, OSError):
        handle = os.open(folder, os.O_RDONLY)
        _lock(handle)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int) -> None:
    """Wait for the lock, but not for ever: the exit of the interpreter waits with us.

    Raises:
        OSError: somebody keeps it, or there are no locks here.
    """
    import fcntl

    until = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.01)
