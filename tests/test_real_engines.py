"""What the package promises, on two real vLLM engines with a real model."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
from langgraph.graph.state import CompiledStateGraph

from graphs import panel, review_loop, subgraphs
from graphs.briefs import read_text
from graphs.five_agents import CHAIN, build
from langgraph_pingpong import ChatPingPong
from langgraph_pingpong.engines.base import Request
from langgraph_pingpong.trace import Event
from tests.conftest import wait_until
from tests.engines_fixture import DEVICES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NODES = [node for node, *_ in CHAIN]
DOCUMENTS = [
    "document.md",
    *(f"documents/{name}.md" for name in ("bakery_oven", "clinic_telephone", "river_gauge", "school_bicycles")),
]
TASK = "Explain this document to a new reader."


def chain(
    model: ChatPingPong, overlap: str = "on", *, brief_tokens: int = 400, max_tokens: int = 24
) -> CompiledStateGraph[Any]:
    switched = model.model_copy(update={"overlap": overlap})
    return build(switched, brief_tokens=brief_tokens, max_tokens=max_tokens, last_max_tokens=12)


def inputs(document: str = DOCUMENTS[1]) -> dict[str, str]:
    return {"task": TASK, "document": read_text(document)}


@contextmanager
def recorded(model: ChatPingPong) -> Iterator[list[Event]]:
    events: list[Event] = []
    with model.trace.subscribed(events.append):
        yield events


def certificates(events: list[Event]) -> list[dict[str, Any]]:
    return [event.data["certificate"] for event in events if event.name == "finish"]


@pytest.fixture(scope="session")
def cold_runs(real_model: ChatPingPong) -> list[dict[str, Any]]:
    """Five documents, each run cold with edges off and cold with edges on."""
    runs = []
    for document in DOCUMENTS:
        run: dict[str, Any] = {}
        for overlap in ("off", "on"):
            real_model.reset_prefix_cache()
            with recorded(real_model) as events:
                run[overlap] = chain(real_model, overlap).invoke(inputs(document))
            run[f"{overlap} certificates"] = certificates(events)
            run[f"{overlap} events"] = events
        runs.append(run)
    return runs


def test_text_is_equal_on_and_off(cold_runs: list[dict[str, Any]]) -> None:
    for run in cold_runs:
        assert run["on"] == run["off"]
        assert len({run["on"][key] for key in ("findings", "analysis", "critique", "plan", "report")}) > 1


def test_every_prompt_has_the_ids_of_its_full_rendering(cold_runs: list[dict[str, Any]]) -> None:
    for run in cold_runs:
        for overlap in ("off", "on"):
            assert [c["node"] for c in run[f"{overlap} certificates"]] == NODES
            assert all(c["ids_equal"] for c in run[f"{overlap} certificates"])
        lengths = [[c["prompt_tokens"] for c in run[f"{overlap} certificates"]] for overlap in ("off", "on")]
        assert lengths[0] == lengths[1]


def test_edges_prefill_most_of_a_prompt_and_waste_nothing(cold_runs: list[dict[str, Any]]) -> None:
    for run in cold_runs:
        assert all(c["static"] == c["streamed"] == c["appends"] == 0 for c in run["off certificates"])
        for upstream, certificate in zip(NODES, run["on certificates"][1:], strict=False):
            assert certificate["upstream"] == upstream
            assert certificate["wasted"] == 0
            assert certificate["static"] > 300
            if not certificate["ready"]:  # else all of the prompt was computed, the last token included
                assert certificate["cached"] >= certificate["static"] + certificate["streamed"] - 31
            assert certificate["fallback"] is None


def test_neighbours_are_on_different_devices(cold_runs: list[dict[str, Any]]) -> None:
    for run in cold_runs:
        for overlap in ("off", "on"):
            devices = [c["device"] for c in run[f"{overlap} certificates"]]
            assert devices == [*DEVICES, *DEVICES, DEVICES[0]]


def test_downstream_ttft_is_under_half(cold_runs: list[dict[str, Any]]) -> None:
    off, on = (
        mean(c["ttft_ms"] for run in cold_runs for c in run[f"{overlap} certificates"][1:]) for overlap in ("off", "on")
    )
    assert on < off / 2, f"mean TTFT of downstream nodes: {on:.0f} ms with edges, {off:.0f} ms without"


def test_appends_start_after_the_upstreams_first_token(cold_runs: list[dict[str, Any]]) -> None:
    for run in cold_runs:
        first_token = {e.node: e.t for e in run["on events"] if e.name == "first_token"}
        upstream = dict(zip(NODES[1:], NODES, strict=False))
        appends = [e for e in run["on events"] if e.name == "append.started"]
        assert {e.node for e in appends} == set(NODES[1:])
        assert all(e.t >= first_token[upstream[e.node]] for e in appends)


@pytest.mark.parametrize(
    ("shape", "build_it", "ahead"),
    [
        ("a loop", partial(review_loop.build, most_drafts=2), {"critic"}),
        ("three at once", panel.build, set()),  # their short answers may leave no time
        ("graphs within a graph", subgraphs.build, {"researcher", "analyst", "editor"}),
    ],
)
def test_graphs_of_other_shapes_are_equal_on_and_off(
    real_model: ChatPingPong, shape: str, build_it: Callable[..., CompiledStateGraph[Any]], ahead: set[str]
) -> None:
    """`ahead` are the nodes whose prompts are known ahead in a first run, and that there is time for."""
    states, prompts, early = {}, {}, {}
    for overlap in ("off", "on"):
        real_model.reset_prefix_cache()
        graph = build_it(real_model.model_copy(update={"overlap": overlap}), brief_tokens=60, max_tokens=10)
        with recorded(real_model) as events:
            states[overlap] = graph.invoke({"task": "Explain tides to a child."})
        asked = [(e.node, e.data["prompt_sha256"]) for e in events if e.name == "generate.started"]
        prompts[overlap] = sorted(asked)  # nodes that run at once start in any order
        said = certificates(events)
        assert len(said) == len(asked) and all(c["ids_equal"] for c in said)
        early[overlap] = {c["node"] for c in said if c["static"] + c["streamed"] > 0}
    assert prompts["on"] == prompts["off"]
    assert states["on"] == states["off"]
    assert early["off"] == set()
    assert ahead <= early["on"], f"{shape}: only {early['on']} were prefilled ahead"


def test_every_way_of_calling_gives_the_same(real_model: ChatPingPong) -> None:
    """Sync, async twice in a row, sync within a running loop, and from a thread, all in one process."""
    graph = chain(real_model, brief_tokens=100, max_tokens=12)
    expected = chain(real_model, "off", brief_tokens=100, max_tokens=12).invoke(inputs())

    async def sync_within_a_loop() -> dict[str, Any]:
        result: dict[str, Any] = graph.invoke(inputs())
        return result

    results = [
        graph.invoke(inputs()),
        asyncio.run(graph.ainvoke(inputs())),
        asyncio.run(graph.ainvoke(inputs())),
        asyncio.run(sync_within_a_loop()),
    ]
    thread = threading.Thread(target=lambda: results.append(graph.invoke(inputs())))
    thread.start()
    thread.join()
    assert results == [expected] * 5


def test_streamed_chunks_add_up(real_model: ChatPingPong) -> None:
    prompt = "Name three animals of a tide pool."
    whole = real_model.invoke(prompt)
    chunks = list(real_model.stream(prompt))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    assert len(chunks) > 10
    assert merged.text == whole.text
    assert merged.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "length"
    assert merged.response_metadata["model_name"] == whole.response_metadata["model_name"]
    assert merged.usage_metadata is not None and whole.usage_metadata is not None
    assert merged.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert merged.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 24
    assert merged.usage_metadata["total_tokens"] == merged.usage_metadata["input_tokens"] + 24


def test_parameters_are_bound_per_call(real_model: ChatPingPong) -> None:
    model = real_model.model_copy(update={"max_tokens": 12})
    prompt = "Name three animals of a tide pool."
    plain = model.invoke(prompt)
    assert model.bind(max_tokens=3).invoke(prompt).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    word = plain.text.split()[2]
    stopped = model.invoke(prompt, stop=[word])
    assert stopped.text == plain.text[: plain.text.index(word)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    seeded = [model.invoke(prompt, temperature=1.0, seed=seed).text for seed in (7, 7, 8)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert model.invoke(prompt, temperature=2.0, top_k=1).text == plain.text
    assert model.invoke(prompt, temperature=2.0, top_p=1e-6).text == plain.text


def test_batch(real_model: ChatPingPong) -> None:
    prompts = [f"Count to {n}." for n in (3, 5, 7)]
    assert [m.text for m in real_model.batch(prompts)] == [real_model.invoke(p).text for p in prompts]


def test_growing_prefix_leaves_no_one_token_answer(real_model: ChatPingPong) -> None:
    """A prefill's limit of one token, and the token it samples, show up nowhere in the answer."""
    serving = real_model._serving()
    prompt = serving.template.prompt_ids([{"role": "user", "content": read_text(DOCUMENTS[1])}])

    async def answer(prefilled: int) -> tuple[tuple[int, ...], str | None, int]:
        engine = serving.pool.engines[0]
        await engine.reset_prefix_cache()
        if prefilled:
            await engine.prefill(Request(prompt[: prefilled // 2]))
            await engine.prefill(Request(prompt[:prefilled]))
        ids: list[int] = []
        request = Request(prompt, {"max_tokens": 32, "ignore_eos": True, "temperature": 0.0})
        cached = 0
        async for delta in engine.generate(request):
            ids += delta.token_ids
            cached = delta.num_cached_tokens or cached
            reason = delta.finish_reason
            if delta.prompt_token_ids is not None:
                assert delta.prompt_token_ids == prompt
        return tuple(ids), reason, cached

    cold, warm = (serving.pool.loop.run(answer(tokens)) for tokens in (0, 256))
    assert cold[:2] == warm[:2]
    assert len(cold[0]) == 32 and cold[1] == "length"
    assert (cold[2], warm[2]) == (0, 256)


def test_only_whole_blocks_are_reused(real_model: ChatPingPong) -> None:
    serving = real_model._serving()
    engine = serving.pool.engines[0]
    ids = serving.template.prompt_ids([{"role": "user", "content": read_text("document.md")}])
    block = engine.block_size

    async def hit(prefilled: int, prompt: int) -> int:
        await engine.reset_prefix_cache()
        await engine.prefill(Request(ids[:prefilled]))
        return await engine.prefill(Request(ids[:prompt]))

    hits = [
        serving.pool.loop.run(hit(block * 6 + 4, block * 10)),
        serving.pool.loop.run(hit(block * 6, block * 6)),
        serving.pool.loop.run(hit(block - 1, block * 3)),
    ]
    assert hits == [block * 6, block * 5, 0]


def test_leaving_a_stream_early_frees_the_engines(real_model: ChatPingPong) -> None:
    engines = real_model._serving().pool.engines
    for chunk in real_model.bind(max_tokens=200).stream("Tell a long story."):
        assert chunk is not None
        break
    assert [engine.num_unfinished for engine in engines] == [0, 0]
    assert real_model.invoke("Say hello.", max_tokens=4).usage_metadata["output_tokens"] <= 4  # type: ignore[index]


SCRIPT = """
    import gc, json, os, signal
    from langgraph_pingpong import ChatPingPong

    def stream(model):
        return model.stream("Tell a long story.", max_tokens=400)

    {guard}
        import psutil
        model = ChatPingPong(devices={devices}, max_tokens=4, temperature=0.0, max_model_len=512).start()
        children = [p.pid for p in psutil.Process().children()]
        apart = gc.get_freeze_count()
        said = [model.invoke("Hi").text]
        try:
            for _ in stream(model):
                os.killpg(0, signal.SIGINT)
        except KeyboardInterrupt:
            unfinished = [engine.num_unfinished for engine in model._serving().pool.engines]
        said += [model.invoke("Hi").text, model.invoke("Hi").text]
        print(json.dumps({{"said": said, "children": children, "unfinished": unfinished, "apart": apart}}))
        left_open = stream(model)
        next(left_open)
"""


def test_guarded_script_survives_an_interrupt_and_ends_cleanly(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group of processes at a terminal or in a notebook; it ends calls, not engines."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(guard='if __name__ == "__main__":', devices=DEVICES[:1])))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else is said, whatever ends at which moment
    assert result["said"][0]
    assert len(set(result["said"])) == 1
    assert result["unfinished"] == [0]
    assert len(result["children"]) >= 2
    assert result["apart"] > 500_000, "full collections look at all that vLLM and torch brought"
    assert "Traceback" not in done.stderr
    wait_until(lambda: not any(map(psutil.pid_exists, result["children"])), 10.0, "end of every process it started")
