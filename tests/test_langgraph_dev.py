"""The gallery behind `langgraph dev`, on modelled engines: threads, streaming, interrupts, with langgraph-sdk."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

if any(importlib.util.find_spec(name) is None for name in ("langgraph_cli", "langgraph_api", "langgraph_sdk")):
    pytest.skip('needs langgraph dev: pip install "langgraph-cli[inmem]"', allow_module_level=True)

from langgraph_sdk import get_sync_client

ROOT = Path(__file__).parent.parent
GRAPHS = json.loads((ROOT / "langgraph.json").read_text(encoding="utf-8"))["graphs"]
TASK = {"task": "Explain tides.", "document": "The moon pulls at the sea."}
UP_WITHIN_S = 120


def free_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server that lives as long as this module's tests."""
    folder = tmp_path_factory.mktemp("dev")
    port, log = free_port(), folder / "log"
    own = {
        "PINGPONG_DEVICES": "fake:0,fake:1",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LANGSMITH_TRACING": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "langgraph_cli", "dev", "--no-browser", "--no-reload"]
    command += ["--port", str(port), "--config", str(ROOT / "langgraph.json")]
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(url, server, log)
            with get_sync_client(url=url, timeout=60) as ready:
                yield ready
        finally:
            server.terminate()
            server.wait(30)


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{url}/ok", timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    pytest.fail(f"langgraph dev did not come up:\n{log.read_text()[-3000:]}")


def test_every_graph_of_the_gallery_is_served(client: Any) -> None:
    served = {assistant["graph_id"] for assistant in client.assistants.search(limit=100)}
    assert served == set(GRAPHS)
    modules = {path.stem for path in (ROOT / "graphs").glob("*.py") if "def build(" in path.read_text(encoding="utf-8")}
    assert modules == served


@pytest.mark.parametrize(
    ("graph", "last"),
    [
        ("five_agents", "report"),
        ("panel", "summary"),
        ("research_agent", "report"),
        ("router", "answer"),
        ("subgraphs", "report"),
    ],
)
def test_a_graph_runs_to_its_end(client: Any, graph: str, last: str) -> None:
    result = client.runs.wait(client.threads.create()["thread_id"], graph, input=TASK)
    assert result["task"] == TASK["task"]
    assert len(result[last]) > 10


def test_answers_stream_with_certificates(client: Any) -> None:
    thread = client.threads.create()["thread_id"]
    said: dict[str, str] = {}
    certificates = {}
    for part in client.runs.stream(
        thread, "subgraphs", input=TASK, stream_mode="messages-tuple", stream_subgraphs=True
    ):
        assert part.event != "error", part.data
        if part.event.startswith("messages"):
            chunk, metadata = part.data
            node = metadata["langgraph_node"]
            said[node] = said.get(node, "") + chunk["content"]
            if certificate := chunk["response_metadata"].get("pingpong"):
                certificates[node] = certificate
    state = client.threads.get_state(thread)["values"]
    keys = {"planner": "plan", "researcher": "facts", "analyst": "analysis", "writer": "draft", "editor": "report"}
    assert said == {node: state[key] for node, key in keys.items()}
    assert {node: certificate["node"] for node, certificate in certificates.items()} == dict(
        zip(keys, keys, strict=True)
    )
    assert all(certificate["ids_equal"] for certificate in certificates.values())


def test_a_person_answers_an_interrupt(client: Any) -> None:
    thread = client.threads.create()["thread_id"]
    client.runs.wait(thread, "review_loop", input=TASK)
    asked = client.threads.get_state(thread)
    assert asked["next"] == ["approval"]
    assert asked["tasks"][0]["interrupts"][0]["value"]["draft"] == asked["values"]["draft"]
    client.runs.wait(thread, "review_loop", command={"resume": "Say it in half the words."})
    again = client.threads.get_state(thread)
    assert again["next"] == ["approval"]
    assert again["values"]["drafts"] == asked["values"]["drafts"] + 1
    assert again["values"]["draft"] != asked["values"]["draft"]
    result = client.runs.wait(thread, "review_loop", command={"resume": ""})
    assert client.threads.get_state(thread)["next"] == []
    assert result["draft"] == again["values"]["draft"]


def test_a_run_stops_before_a_node_and_goes_on(client: Any) -> None:
    thread = client.threads.create()["thread_id"]
    client.runs.wait(thread, "subgraphs", input=TASK, interrupt_before=["writing"])
    assert client.threads.get_state(thread)["next"] == ["writing"]
    stopped = client.threads.get_state(thread)["values"]
    result = client.runs.wait(thread, "subgraphs", input=None)
    assert "report" not in stopped
    assert {key: result[key] for key in stopped} == stopped
    assert result["report"]


def test_threads_keep_apart_and_remember(client: Any) -> None:
    one, other = (client.threads.create()["thread_id"] for _ in range(2))
    client.runs.wait(one, "router", input={"task": "Count the boats."})
    client.runs.wait(other, "router", input={"task": "Name the winds."})
    assert client.threads.get_state(one)["values"]["task"] == "Count the boats."
    history = client.threads.get_history(other)
    assert history[0]["next"] == []
    assert history[0]["values"]["task"] == "Name the winds."
    assert len(history) >= 3


def test_the_drawing_of_a_graph_is_langgraphs_own(client: Any) -> None:
    drawn = client.assistants.get_graph(assistant_id("router", client))
    assert {node["id"] for node in drawn["nodes"]} == {
        "__start__",
        "dispatcher",
        "researcher",
        "analyst",
        "writer",
        "__end__",
    }
    assert all(edge.get("data") is None for edge in drawn["edges"])


def assistant_id(graph: str, client: Any) -> str:
    (found,) = client.assistants.search(graph_id=graph)
    return str(found["assistant_id"])
