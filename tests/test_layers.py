"""Imports point down, hosts stay where they belong, and nothing happens at import."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import langgraph_pingpong

PACKAGE = Path(langgraph_pingpong.__file__).parent

LAYERS = """
errors certificate
trace segments signals environment heap keys engines.base exact same_device kv_budget going_first
growing config model_files default_model loop engines.main_guard engines.orphans engines.prompt_scheduler speculation
tokens placement
health growing_prompt evictions kv_handles kv_planner
anchors kv_transfer
pool
failover
streaming_edge edges
engines.fake_kv engines.vllm_kv
engines.fake_engine engines.vllm_appends engines.vllm_calls engines.vllm_setup engines.vllm_text
engines.vllm_outputs engines.server_answers
outgoing
tool_round
engines.vllm_engine engines.vllm_parsers engines.server_engine engines.server_processes session
serving planning prompts tools
run_ends custom_events
calls answers whole_calls run_metadata identity
calling
after_tools
settings
variants
counting
anchoring
chat_model
observe
bench viz cli
"""
"""From the bottom up. A module imports from lower layers, and from its own without a circle."""

HOSTS = {
    "langgraph": ("edges", "bench"),
    "langgraph_sdk": (),
    "langchain": ("bench.tool_loops",),
    "vllm": (
        *("engines.vllm_engine", "engines.vllm_appends", "engines.vllm_kv", "engines.vllm_parsers"),
        *("engines.prompt_scheduler", "engines.vllm_setup", "engines.vllm_text"),
        *("engines.vllm_calls", "engines.vllm_outputs"),
    ),
    "openai": ("engines.server_engine", "engines.server_answers", "engines.server_processes"),
    "torch": ("default_model", "bench"),
    "transformers": ("tokens", "model_files", "default_model", "engines.fake_engine", "bench.doctor"),
    "matplotlib": ("viz",),
    "plotly": ("viz",),
    "tokenizers": ("segments", "default_model", "engines.fake_engine"),
    "pydantic": ("settings", "variants", "tools", "edges.saved", "chat_model", "cli", "bench"),
    "typer": ("cli", "bench"),
    "opentelemetry": ("observe", "bench.overhead"),
    "prometheus_client": ("observe", "bench.overhead"),
    "rich": ("cli", "bench", "viz", "default_model"),
}
"""Which modules may import a host, there included what is below them."""

BELOW_THE_HOSTS = (
    "trace",
    "segments",
    "growing",
    "config",
    "model_files",
    "tokens",
    "loop",
    "pool",
    "placement",
    "health",
    "kv_handles",
    "kv_planner",
    "kv_transfer",
    "failover",
    "session",
    "engines",
)
"""Modules that know nothing of LangChain. `errors` knows its name for a prompt that is too long."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if name_of(path)}


def imported(node: ast.AST, at_runtime: bool) -> Iterator[str]:
    """The modules that a piece of code imports, by their full names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not (at_runtime and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from imported(child, at_runtime)


@cache
def imports(module: str) -> frozenset[str]:
    """What it imports when it runs."""
    return frozenset(imported(ast.parse(MODULES[module].read_text(encoding="utf-8")), at_runtime=True))


def own_imports(module: str) -> set[str]:
    """The modules of this package among them."""
    names = {name.removeprefix("langgraph_pingpong.") for name in imports(module) if "langgraph_pingpong" in name}
    return names & MODULES.keys() - {module}


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def layer(module: str) -> int:
    for number, line in enumerate(LAYERS.split("\n")):
        if within(module, tuple(line.split())):
            return number
    if module == "engines":
        return layer("engines.base")
    raise AssertionError(f"{module} has no layer: give it a place in LAYERS")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert {name for name in own_imports(module) if layer(name) > layer(module)} == set()


def test_there_is_no_circle() -> None:
    left = {module: own_imports(module) for module in MODULES}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_are_imported_only_where_they_belong(host: str) -> None:
    users = {module for module in MODULES if any(name.split(".")[0] == host for name in imports(module))}
    assert {module for module in users if not within(module, HOSTS[host])} == set()


@pytest.mark.parametrize("module", [module for module in MODULES if within(module, BELOW_THE_HOSTS)])
def test_the_lower_layers_know_nothing_of_langchain(module: str) -> None:
    assert {name for name in imports(module) if name.startswith(("langchain", "langgraph."))} == set()


def test_errors_know_one_name_of_langchain() -> None:
    names = {name for name in imports("errors") if name.startswith("langchain")}
    assert names == {"langchain_core.exceptions", "langchain_core.exceptions.ContextOverflowError"}


def test_private_names_of_langgraph_are_in_one_module() -> None:
    users = {
        module
        for module in MODULES
        if any("langgraph.pregel" in name or "langgraph._" in name for name in imports(module))
    }
    assert users == {"edges.langgraph_internals", "edges.langgraph_streams"}


@pytest.mark.parametrize(
    "code",
    [
        "import langgraph_pingpong, langgraph_pingpong.cli",
        "from langgraph_pingpong import *; ChatPingPong(devices=['cpu:0', 'cpu:1']).bind(stop=['x']).with_retry()",
    ],
)
def test_nothing_heavy_is_imported_before_an_engine_starts(code: str) -> None:
    check = "\nimport sys; print(sorted({'vllm', 'torch', 'transformers', 'openai'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code + check], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, langgraph_pingpong; print([m for m in sys.modules if m.startswith('langgraph_pingpong.')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_public_names_exist_and_others_do_not() -> None:
    for name in langgraph_pingpong.__all__:
        assert getattr(langgraph_pingpong, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Chat'"):
        langgraph_pingpong.Chat  # noqa: B018
