"""The same promise on two real vLLM servers: equal prompts, equal texts, and prompts prefilled ahead of their calls."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from graphs.briefs import read_text
from graphs.five_agents import CHAIN, build
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.config import ServerAddress
from langgraph_pingpong.engines.server_processes import LocalServers
from langgraph_pingpong.errors import WrongServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NODES = [node for node, *_ in CHAIN]
TASK = {"task": "Explain this document to a new reader.", "document": read_text("documents/bakery_oven.md")}


@pytest.fixture(scope="module")
def runs(server_model: ChatPingPong) -> dict[str, Any]:
    """The five agents, cold with edges off and cold with edges on: results, certificates and digests of prompts."""
    found: dict[str, Any] = {}
    for overlap in ("off", "on"):
        server_model.reset_prefix_cache()
        events: list[Any] = []
        with server_model.trace.subscribed(events.append):
            model = server_model.model_copy(update={"overlap": overlap})
            result = build(model, brief_tokens=300, max_tokens=96, last_max_tokens=8).invoke(TASK)
        certificates = [event.data["certificate"] for event in events if event.name == "finish"]
        digests = [event.data["prompt_sha256"] for event in events if event.name == "generate.started"]
        found[overlap] = {"result": result, "certificates": certificates, "digests": digests}
    return found


def test_texts_and_prompts_are_equal_on_and_off(runs: dict[str, Any]) -> None:
    assert runs["on"]["result"] == runs["off"]["result"]
    assert runs["on"]["digests"] == runs["off"]["digests"]
    for run in runs.values():
        assert [certificate["node"] for certificate in run["certificates"]] == NODES
        assert all(certificate["ids_equal"] for certificate in run["certificates"])


def test_downstream_prompts_were_prefilled(runs: dict[str, Any]) -> None:
    downstream = runs["on"]["certificates"][1:]
    for certificate in downstream:
        assert certificate["fallback"] is None
        assert certificate["cached"] > 200  # also where the call came before the append was acknowledged
        if not certificate["ready"]:
            assert certificate["cached"] >= certificate["static"] + certificate["streamed"] - 31
        assert certificate["wasted"] == 0
    assert sum(certificate["static"] for certificate in downstream) > 200
    assert {certificate["cached"] for certificate in runs["off"]["certificates"]} == {0}


def test_neighbours_are_on_different_servers(runs: dict[str, Any], servers: LocalServers) -> None:
    one, other = (str(ServerAddress(url)) for url in servers.base_urls)
    for run in runs.values():
        assert [certificate["device"] for certificate in run["certificates"]] == [one, other, one, other, one]


def test_a_server_and_an_engine_here_answer_alike(server_model: ChatPingPong, real_model: ChatPingPong) -> None:
    prompt = "Name three animals of a tide pool."
    server_model.reset_prefix_cache()
    real_model.reset_prefix_cache()
    assert server_model.invoke(prompt).text == real_model.invoke(prompt).text


def test_leaving_a_stream_ends_the_request_on_the_server(server_model: ChatPingPong, servers: LocalServers) -> None:
    for _ in server_model.bind(max_tokens=4000).stream("Tell a very long story."):
        break
    server_model.bind(max_tokens=2).batch(["Hi.", "Ho.", "Hey."])  # the count is brought up to date by later steps
    assert [running(url) for url in servers.base_urls] == [0.0, 0.0]


def running(base_url: str) -> float:
    """Requests that the server is working on, by its own metrics."""
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        metrics = client.get(ServerAddress(base_url).at_root("/metrics"), cast_to=str)
    (count,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", metrics, re.MULTILINE)
    return float(count)


def test_another_model_is_refused_before_anything_is_sent(servers: LocalServers, server_model: ChatPingPong) -> None:
    tokenizer = server_model._serving().template.tokenizer
    with (
        pytest.raises(WrongServer, match=r"serves .*SmolLM2.*, and this side has the model org/another"),
        ChatPingPong(model="org/another", base_urls=servers.base_urls, tokenizer=tokenizer),
    ):
        pass


def test_structured_output_works_as_ever(server_model: ChatPingPong) -> None:
    schema = {"title": "Animal", "type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    answer = server_model.bind(max_tokens=60).invoke(
        "How many legs has a crab?",
        response_format={"type": "json_schema", "json_schema": {"name": "Animal", "schema": schema}},
    )
    assert re.fullmatch(r'\s*\{\s*"legs"\s*:\s*-?\d+.*', answer.text, re.DOTALL)
