"""What the user types, turned into what a run needs: the graph's builder, its options, its input."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from langgraph_pingpong.errors import ConfigError

Build = Callable[..., Any]
"""`build(model, **options)`, which returns a compiled graph."""


def load_build(graph: str) -> Build:
    """The callable that an import string `module[:attribute]` names; the current folder can be imported from.

    Raises:
        ConfigError: there is no such module or attribute, or it cannot be called.
    """
    module_name, _, attribute = graph.partition(":")
    attribute = attribute or "build"
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _import(module_name, graph)
    build = getattr(module, attribute, None)
    if build is None:
        raise ConfigError(f"The module {module_name!r} has no {attribute!r}: write GRAPH as module:attribute.")
    if not callable(build):
        raise ConfigError(f"{module_name}:{attribute} is not a function build(model, **options).")
    return build  # type: ignore[no-any-return]


def _import(name: str, graph: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{graph!r} is not an import string: write it like package.module:build.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself is the user's typing error; one that it imports is a bug with a traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"There is no module {error.name!r} here or among the installed packages.") from None


def build_graph(build: Build, model: object, options: Mapping[str, Any]) -> Any:
    """The compiled graph.

    Raises:
        ConfigError: `build` refused a value of its options, or returned something else.
    """
    try:
        graph = build(model, **options)
    except ValueError as error:
        if not options:  # nobody typed anything that could be wrong
            raise
        typed = " ".join(f"--set {name}={value}" for name, value in options.items())
        raise ConfigError(f"The graph refused {typed}: {error}") from None
    if not hasattr(graph, "astream"):
        kind = type(graph).__name__
        hint = ": end it with return builder.compile()" if hasattr(graph, "compile") else ""
        raise ConfigError(f"{getattr(build, '__name__', 'build')} returned a {kind}, not a compiled graph{hint}.")
    return graph


def parse_options(build: Build, pairs: Iterable[str]) -> dict[str, Any]:
    """Options for `build` from 'name=value' texts, each as the type that `build` annotates.

    Raises:
        ConfigError: a text has no '=', a name is unknown, a value is of the wrong type, or a name is missing.
    """
    given = dict(_split(pair) for pair in pairs)
    parameters = _parameters(build)
    named = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_any and (unknown := [name for name in given if name not in named]):
        raise ConfigError(f"The graph has no option {unknown[0]!r}; it has {', '.join(sorted(named)) or 'none'}.")
    if missing := [name for name, p in named.items() if p.default is p.empty and name not in given]:
        raise ConfigError(f"The graph needs a value: --set {missing[0]}=...")
    hints = _hints(build)
    return {name: _value(name, text, hints.get(name)) for name, text in given.items()}


def _parameters(build: Build) -> list[inspect.Parameter]:
    """Those that follow the model."""
    try:
        _, *parameters = inspect.signature(build).parameters.values()
    except ValueError:  # it has no signature, or no parameter
        name = getattr(build, "__name__", build)
        raise ConfigError(f"{name} cannot be called as build(model, **options).") from None
    return parameters


def _split(pair: str) -> tuple[str, str]:
    name, equals, text = pair.partition("=")
    if not (equals and name):
        raise ConfigError(f"--set {pair} is not of the form name=value.")
    return name, text


def _hints(build: Build) -> dict[str, Any]:
    """The annotations; none where one of them exists for type checkers only."""
    try:
        return get_type_hints(build)
    except (NameError, TypeError):
        return {}


def _value(name: str, text: str, hint: Any) -> Any:
    """The text as the annotated type; without one, as JSON where it is JSON."""
    if hint is None:
        try:
            return json.loads(text)
        except ValueError:
            return text
    adapter = TypeAdapter[Any](hint)
    try:
        return adapter.validate_python(text)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
    try:
        return adapter.validate_json(text)
    except ValidationError:
        raise ConfigError(f"--set {name}={text} does not fit: {problem}.") from None


def read_input(file: Path | None, task: str | None) -> dict[str, str]:
    """The graph's input: the file's text as `document`, the task as `task`.

    Raises:
        ConfigError: neither is given, or the file cannot be read as text.
    """
    if file is None and task is None:
        raise ConfigError("Nothing to work on: give --input FILE, --task TEXT, or both.")
    given = {} if task is None else {"task": task}
    if file is None:
        return given
    try:
        return {**given, "document": file.read_text(encoding="utf-8")}
    except UnicodeDecodeError:
        raise ConfigError(f"--input {file} is not UTF-8 text.") from None
    except OSError as error:
        raise ConfigError(f"--input {file} cannot be read: {error.strerror}.") from None
