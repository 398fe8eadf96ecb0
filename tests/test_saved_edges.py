"""Learned edges in a file: a new process streams from its first run on, and no file changes a result."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph

from langgraph_pingpong import ChatPingPong, streaming_edges
from langgraph_pingpong.edges import saved
from langgraph_pingpong.edges.book import Outcome, Shaping
from langgraph_pingpong.edges.learned import CallSite, Follower
from langgraph_pingpong.edges.template import ListSlice, Literal, OneMessage, Reference, Stop, ToolRound
from langgraph_pingpong.errors import ConfigError
from langgraph_pingpong.growing_prompt import CallKey
from tests.attentive import attentive
from tests.test_prompt_sources import RULES, State, ask, chain, given, prefilled, run

WRITER, CRITIC = CallKey(("writer",)), CallKey(("inner", "critic"), 1, 2)
TEMPLATE = (
    OneMessage((("role", "system"), ("name", "x")), (Literal("Say "), Reference(WRITER, stripped=True))),
    ListSlice(("prompt",), -2),
    OneMessage((("role", "user"),), (Reference(("state", "drafts", 3)),)),
    ToolRound(),
    Stop(),
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def new_model() -> ChatPingPong:
    return attentive(ChatPingPong(devices=["fake:0", "fake:1"], max_tokens=160))


@pytest.fixture
def model() -> Iterator[ChatPingPong]:
    with new_model() as model:
        yield model


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "edges.json"


def end_of_process(file: Path) -> None:
    """What the exit of the interpreter does, and that the next one knows nothing."""
    saved._OPEN[file.resolve()].save()
    saved._OPEN.clear()


def sources(model: ChatPingPong, graph: Any, tenant: Any = None, number: int = 1) -> dict[str, Any]:
    _, seen = run(model, graph, given(number), {"configurable": {"tenant": tenant}})
    return {node: certificate["source"] for node, certificate in seen.items()}


def sites(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["sites"])


def site_of(template: Any = TEMPLATE, shaping: Shaping | None = None) -> CallSite:
    site = CallSite({0: [Outcome({WRITER, CRITIC})], 2: [Outcome()]})
    site.followers[CRITIC] = Follower((template, template[1:]), shaping or Shaping((TOOL,), {"calm": True}, "{{ x }}"))
    site.followers[WRITER] = Follower((template,), Shaping(), 2)
    return site


PROGRAM = """
import sys
from langgraph_pingpong import streaming_edges
from tests.attentive import attentive
from tests.test_prompt_sources import chain, given, run
from tests.test_saved_edges import new_model
with new_model() as model:
    result, seen = run(model, streaming_edges(chain(model), learned=sys.argv[1]), given(int(sys.argv[2])))
print(seen["writer"]["source"], seen["writer"]["wasted"], result["report"])
"""


class TestWarmStart:
    def test_another_process_streams_from_its_first_run_on(self, model: ChatPingPong, file: Path) -> None:
        def process(number: int) -> list[str]:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(file), str(number)], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.split(maxsplit=2)

        first, second = process(1), process(2)
        assert (first[0], second[0], second[1]) == ("None", "learned", "0")
        plain = chain(model.model_copy(update={"overlap": "off"}))
        assert [first[2].strip(), second[2].strip()] == [plain.invoke(given(n))["report"] for n in (1, 2)]

    def test_a_new_graph_and_model_go_on(self, model: ChatPingPong, file: Path) -> None:
        run(model, streaming_edges(chain(model), learned=file), given(1))
        end_of_process(file)
        with new_model() as other:
            _, seen = run(other, streaming_edges(chain(other), learned=str(file)), given(2))
        assert (seen["writer"]["source"], seen["writer"]["wasted"]) == ("learned", 0)
        assert prefilled(seen["writer"]) > 0.85

    def test_tools_and_template_variables_are_kept(self, model: ChatPingPong, file: Path) -> None:
        def build() -> Any:
            bound = model.bind_tools([TOOL], chat_template_kwargs={"mood": "calm"})

            def writer(state: State) -> Any:
                return {"report": bound.invoke(f"{RULES} {state['plan']}").text}

            return streaming_edges(chain(model, writer), learned=file)

        run(model, build(), given(1))
        end_of_process(file)
        _, seen = run(model, build(), given(2))
        assert (seen["writer"]["source"], seen["writer"]["wasted"]) == ("learned", 0)
        assert prefilled(seen["writer"]) > 0.85

    def test_a_models_own_chat_template_is_kept(self, model: ChatPingPong, file: Path) -> None:
        own = "{% for m in messages %}{{ m.content }}|{% endfor %}"
        other = ChatPingPong(pool=model._serving().pool, chat_template=own)

        def writer(state: State) -> Any:
            return {"report": ask(other, "You write.", state["plan"])}

        def build() -> Any:
            return streaming_edges(chain(model, writer), learned=file)

        run(other, build(), given(1))
        end_of_process(file)
        _, seen = run(other, build(), given(2))
        assert (seen["writer"]["source"], seen["writer"]["wasted"]) == ("learned", 0)
        assert prefilled(seen["writer"]) > 0.85

    def test_inner_graphs_are_saved_too(self, model: ChatPingPong, file: Path) -> None:
        def build() -> Any:
            builder = StateGraph(State)
            builder.add_node("inner", chain(model))
            builder.add_node("judge", lambda s: {"a": ask(model, "You judge.", s["report"])})
            for edge in ((START, "inner"), ("inner", "judge"), ("judge", END)):
                builder.add_edge(*edge)
            return streaming_edges(builder.compile(), learned=file)

        sources(model, build())
        end_of_process(file)
        assert sources(model, build()) == {"planner": None, "writer": "learned", "judge": "learned"}

    def test_graphs_of_one_process_share_a_file(self, model: ChatPingPong, file: Path) -> None:
        graphs = [streaming_edges(chain(model), learned=file) for _ in range(2)]
        assert [sources(model, graph)["writer"] for graph in graphs] == [None, "learned"]

    def test_without_a_file_graphs_stay_apart(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        assert sources(model, chain(model))["writer"] is None

    def test_off_counts_for_what_a_file_holds(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        end_of_process(file)
        assert sources(model, streaming_edges(chain(model), learned=file, off="writer"))["writer"] is None

    def test_a_graph_within_itself(self, model: ChatPingPong, file: Path) -> None:
        graphs: list[Any] = []
        graphs.append(chain(model, lambda s: graphs[0] and {"report": ask(model, "You write.", s["plan"])}))
        graphs[0].nodes["writer"].subgraphs = graphs
        assert streaming_edges(graphs[0], learned=file) is graphs[0]


class TestTenants:
    def test_stay_apart(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file), "one")
        end_of_process(file)
        graph = streaming_edges(chain(model), learned=file)
        seen = [sources(model, graph, tenant)["writer"] for tenant in ("two", None, 1, "one")]
        assert seen == [None, None, None, "learned"]

    @pytest.mark.parametrize("tenant", [7, "7", None])
    def test_come_back_as_they_were(self, model: ChatPingPong, file: Path, tenant: Any) -> None:
        sources(model, streaming_edges(chain(model), learned=file), tenant)
        end_of_process(file)
        graph = streaming_edges(chain(model), learned=file)
        others = [other for other in (7, "7", None) if other != tenant]
        assert [sources(model, graph, other)["writer"] for other in (*others, tenant)] == [None, None, "learned"]

    def test_what_json_cannot_hold_is_not_saved(self, model: ChatPingPong, file: Path) -> None:
        graph = streaming_edges(chain(model), learned=file)
        for tenant in (("a", 1), "b", frozenset("c"), 1.5):
            sources(model, graph, tenant)
        end_of_process(file)
        assert [site["tenant"] for site in sites(file)] == ["b"]


class TestWrongFiles:
    """Whatever is in the file, results are those of the plain graph."""

    def test_prompts_have_changed(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        end_of_process(file)

        def report(model: ChatPingPong, state: State) -> str:
            return ask(model, "You do something else.", f"{state['plan']}\n{state['task']} at last.")

        plain = model.model_copy(update={"overlap": "off"})
        graph = streaming_edges(chain(model, lambda s: {"report": report(model, s)}), learned=file)
        seen = []
        for number in range(4):
            result, certificates = run(model, graph, given(number))
            seen.append(certificates["writer"])
            state: State = {**given(number), "plan": ask(plain, "You plan.", given(number)["task"])}
            assert (result["plan"], result["report"]) == (state["plan"], report(plain, state))
        assert seen[0]["source"] == "learned" and seen[0]["wasted"] > 100
        assert [certificate["wasted"] for certificate in seen[2:]] == [0, 0]
        assert prefilled(seen[3]) > 0.8

    def test_nodes_were_renamed(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        end_of_process(file)
        builder = StateGraph(State)
        builder.add_node("planner", lambda s: {"plan": ask(model, "You plan.", s["task"])})
        builder.add_node("author", lambda s: {"report": ask(model, "You write.", s["plan"])})
        for edge in ((START, "planner"), ("planner", "author"), ("author", END)):
            builder.add_edge(*edge)
        graph = streaming_edges(builder.compile(), learned=file)
        plain = model.model_copy(update={"overlap": "off"})
        result, seen = run(model, graph, given(2))
        plan = ask(plain, "You plan.", given(2)["task"])
        assert (result["plan"], result["report"]) == (plan, ask(plain, "You write.", plan))
        assert seen["author"]["source"] is None
        assert sources(model, graph)["author"] == "learned"

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[: len(data) // 2],
            lambda data: data.replace('"version":1', '"version":999'),
            lambda data: data.replace('"followers"', '"else"'),
            lambda data: data.replace('"call":{', '"call":[{'),
        ],
    )
    def test_a_damaged_file_is_replaced(
        self, model: ChatPingPong, file: Path, caplog: pytest.LogCaptureFixture, damage: Any
    ) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        end_of_process(file)
        file.write_text(damage(file.read_text()))
        with caplog.at_level(logging.WARNING):
            graph = streaming_edges(chain(model), learned=file)
        assert sum(f"{file} is damaged or was written by" in line for line in caplog.messages) == 1
        assert [sources(model, graph)["writer"] for _ in range(2)] == [None, "learned"]
        end_of_process(file)
        assert sources(model, streaming_edges(chain(model), learned=file))["writer"] == "learned"

    def test_an_empty_file_is_as_none(self, model: ChatPingPong, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        file.touch()
        graph = streaming_edges(chain(model), learned=file)
        assert [sources(model, graph)["writer"] for _ in range(2)] == [None, "learned"]
        assert not [line for line in caplog.messages if str(file) in line]

    @pytest.mark.parametrize("content", [b'{"users": []}', b"plain text", b"\x80\x81\xff"])
    def test_a_foreign_file_is_refused_and_left_alone(self, model: ChatPingPong, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="something else than learned edges: give learned= another path"):
            streaming_edges(chain(model), learned=file)
        assert file.read_bytes() == content

    def test_a_file_that_became_foreign_is_left_alone(
        self, model: ChatPingPong, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        file.write_text("precious")
        end_of_process(file)
        assert file.read_text() == "precious"
        assert sum(f"not saved in {file}" in line for line in caplog.messages) == 1

    @pytest.mark.parametrize(("path", "message"), [("none/edges.json", "no folder"), (".", "cannot be read")])
    def test_a_path_that_cannot_be_is_refused(
        self, model: ChatPingPong, tmp_path: Path, path: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            streaming_edges(chain(model), learned=tmp_path / path)

    def test_a_folder_that_cannot_be_written_is_warned_of_once(
        self, model: ChatPingPong, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(saved.tempfile, "mkstemp", refuse)
        graph = streaming_edges(chain(model), learned=file)
        for expected in (None, "learned", "learned"):
            assert sources(model, graph)["writer"] == expected
            saved._OPEN[file.resolve()].save()
        assert sum(f"not saved in {file}" in line for line in caplog.messages) == 1
        assert list(file.parent.iterdir()) == []
        monkeypatch.undo()
        end_of_process(file)
        assert len(sites(file)) == 1


class TestWriting:
    def test_only_the_owner_can_read_it(self, model: ChatPingPong, file: Path) -> None:
        sources(model, streaming_edges(chain(model), learned=file))
        end_of_process(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [entry.name for entry in file.parent.iterdir()] == [file.name]

    def test_it_is_written_soon_and_not_at_once(
        self, model: ChatPingPong, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(saved, "SAVE_AFTER_S", 0.5)
        graph = streaming_edges(chain(model), learned=file)
        started = time.monotonic()
        sources(model, graph)
        while not file.exists():
            assert time.monotonic() - started < 10
            time.sleep(0.01)
        assert time.monotonic() - started >= 0.5
        saved._OPEN[file.resolve()].save()
        assert [site["followers"][0][0]["site"] for site in sites(file)] == [["writer"]]

    def test_every_part_comes_back_as_it_was(self, file: Path) -> None:
        memory = saved.SavedEdges(file)
        memory._sites["one", WRITER] = memory._sites[None, CRITIC] = site_of()
        memory._changed(("one", WRITER))
        memory._changed((None, CRITIC))
        memory.save()
        assert list(saved.SavedEdges(file)._sites.items()) == list(memory._sites.items())

    @pytest.mark.parametrize("variable", [{1, 2}, object(), (1, 2), "\ud800"])
    def test_what_would_not_come_back_is_left_out(self, file: Path, variable: Any) -> None:
        memory = saved.SavedEdges(file)
        memory._sites["good", WRITER] = site_of()
        memory._sites["bad", WRITER] = site_of(shaping=Shaping((), {"x": variable}))
        for tenant in ("good", "bad"):
            memory._changed((tenant, WRITER))
        memory.save()
        assert [site["tenant"] for site in sites(file)] == ["good"]

    def test_the_file_is_bounded_and_the_newest_stay(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(saved, "MAX_BYTES", 20_000)
        memory = saved.SavedEdges(file)
        for number in range(60):
            memory._sites[number, WRITER] = site_of((OneMessage((), (Literal("x" * 400),)),))
            memory._changed((number, WRITER))
        memory.save()
        tenants = [site["tenant"] for site in sites(file)]
        assert 5 < len(tenants) < 30
        assert tenants == list(range(60))[-len(tenants) :]
        assert file.stat().st_size < 21_000

    def test_processes_that_write_at_once_lose_nothing(self, file: Path) -> None:
        """Each holds a memory of its own, as two processes do; the lock is the same one."""
        memories = [saved.SavedEdges(file) for _ in range(4)]

        def write(writer: int) -> None:
            for number in range(10):
                memories[writer]._sites[f"{writer}.{number}", WRITER] = site_of()
                memories[writer]._changed((f"{writer}.{number}", WRITER))
                memories[writer].save()
                assert sites(file)  # whole at any moment

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {site["tenant"] for site in sites(file)} == {f"{w}.{n}" for w in range(4) for n in range(10)}

    def test_who_keeps_the_folder_locked_does_not_stop_a_process_from_ending(self, file: Path) -> None:
        """As in `flock folder python program.py`."""
        handle = os.open(file.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            subprocess.run([sys.executable, "-c", PROGRAM, str(file), "1"], check=True, timeout=60)
        finally:
            os.close(handle)
        assert sites(file)

    def test_an_outcome_that_was_not_known_yet_is_saved_later(self, file: Path) -> None:
        class Loop:
            pass

        loop, memory = Loop(), saved.SavedEdges(file)
        site = memory._sites["one", WRITER] = site_of()
        site.outcomes[1] = [Outcome(graph=weakref.ref(loop))]
        memory._changed(("one", WRITER))
        memory.save()
        assert sites(file)[0]["outcomes"]["1"] == []
        del loop
        memory.save()
        assert sites(file)[0]["outcomes"]["1"] == [[]]
