"""The command line, on modelled engines. The graphs it runs are in this module: `test_cli:chain` and others."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from typer.testing import CliRunner, Result
from typing_extensions import TypedDict

from langgraph_pingpong import FakeEngine, agent_node
from langgraph_pingpong.cli import app
from langgraph_pingpong.cli.loading import parse_options
from langgraph_pingpong.cli.report import Run, compare_table, hold_together
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.errors import ConfigError, EngineDead

if TYPE_CHECKING:
    from langgraph_pingpong import ChatPingPong

HERE = Path(__file__).parent
ROOT = HERE.parent
PINGPONG = Path(sys.executable).with_name("pingpong")
DEVICES = ("--devices", "fake:0,fake:1")
FIVE = ("graphs.five_agents", "--set", "brief_tokens=200", "--set", "max_tokens=60", "--input")
DOCUMENT = str(ROOT / "graphs" / "texts" / "document.md")

SLOW = {"time_scale": 1.0, "decode_speed": 250.0, "prefill_speed": 500_000.0}
"""Slow enough that a plan is ready long before an answer ends."""

COUNTER = itertools.count()


# -- graphs ------------------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    task: str
    plan: str
    report: str
    number: int


def chain(model: ChatPingPong, *, tone: str = "plain", extra: Any = None, before: str = "") -> Any:
    """A planner, then a writer, and `extra` after them."""
    builder = StateGraph(State)
    plan = ChatPromptTemplate.from_messages([("system", f"{before}You plan. " * 20), ("human", "{task}")])
    report = ChatPromptTemplate.from_messages([("system", f"You are {tone}. " * 20), ("human", "{plan}")])
    builder.add_node("planner", agent_node(model, prompt=plan, writes="plan"))
    builder.add_node("writer", agent_node(model, prompt=report, writes="report"))
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "writer")
    builder.add_node("last", extra or (lambda _: {}))
    builder.add_edge("writer", "last")
    builder.add_edge("last", END)
    return builder.compile()


def counting(model: ChatPingPong) -> Any:
    """Writes something else into the state in every run, without any model."""
    return chain(model, extra=lambda _: {"number": next(COUNTER)})


def two_faced(model: ChatPingPong) -> Any:
    """Has other prompts with overlap than without."""
    return chain(model, before=f"Overlap is {model.overlap}. ")


def broken(model: ChatPingPong) -> Any:
    return chain(model, extra=lambda _: 1 // 0)


def foreign(model: ChatPingPong) -> Any:
    """Ends with a model that is not ours."""
    other = FakeListChatModel(responses=["said by another model"])
    return chain(model, extra=lambda _: {"report": other.invoke("?").text})


def history(model: ChatPingPong) -> Any:
    """Plain functions over messages, a checkpointer, and one node that has its turn twice."""
    builder = StateGraph(MessagesState)
    builder.add_node("speaker", lambda state: {"messages": [model.invoke([("human", "Hi."), *state["messages"]])]})
    builder.add_edge(START, "speaker")
    builder.add_conditional_edges("speaker", lambda state: END if len(state["messages"]) > 1 else "speaker")
    return builder.compile(checkpointer=InMemorySaver())


def endless(model: ChatPingPong, nap_s: float) -> Any:
    """A plain function that calls the model after a nap, for minutes; says when it starts and when engines stop."""
    start, stop = FakeEngine.start, FakeEngine.stop

    async def slow_start(self: FakeEngine) -> None:
        self.time_scale, self.decode_speed = 1.0, 0.5
        await start(self)

    async def loud_stop(self: FakeEngine) -> None:
        typer.echo(f"stopped {self.device}")
        await stop(self)

    def node(state: State) -> State:
        typer.echo("node runs")
        time.sleep(nap_s)
        return {"plan": model.invoke(state["task"]).text}

    FakeEngine.start, FakeEngine.stop = slow_start, loud_stop  # type: ignore[method-assign]
    return StateGraph(State).add_node("planner", node).add_edge(START, "planner").compile()


def uncompiled(model: ChatPingPong) -> Any:
    return StateGraph(State)


def needy(model: ChatPingPong, topic: str) -> Any:
    return chain(model)


# -- helpers -----------------------------------------------------------------------------------------------------


def pingpong(*args: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["run", *args, *DEVICES], env={"COLUMNS": "80", **env})


def chain_run(graph: str, *args: str, **env: str) -> Result:
    return pingpong(f"test_cli:{graph}", "--task", "Say it.", *args, **env)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change settings of every engine that starts."""
    start = FakeEngine.start

    def change(**settings: Any) -> None:
        async def tuned_start(self: FakeEngine) -> None:
            for name, value in settings.items():
                setattr(self, name, value)
            await start(self)

        monkeypatch.setattr(FakeEngine, "start", tuned_start)

    return change


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices whose engines were stopped."""
    devices: list[str] = []
    stop = FakeEngine.stop

    async def noted_stop(self: FakeEngine) -> None:
        devices.append(self.device)
        await stop(self)

    monkeypatch.setattr(FakeEngine, "stop", noted_stop)
    return devices


def events(file: Path, name: str, overlap: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["name"] == name and line["run"].startswith(f"overlap-{overlap}")]


def certificates(file: Path, overlap: str = "") -> list[dict[str, Any]]:
    return [event["data"]["certificate"] for event in events(file, "finish", overlap)]


def table(output: str) -> dict[str, list[str]]:
    """The rows of the table, by their first cell."""
    _, _, body = output.rpartition("─\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in body.splitlines() if re.search(r"\S\s{2,}\S", line)]
    return {cells[0]: cells[1:] for cells in rows}


def no_traceback(result: Result) -> bool:
    return isinstance(result.exception, SystemExit) and "Traceback" not in result.output


# -- one run -----------------------------------------------------------------------------------------------------


def test_the_table_shows_what_the_certificates_say(tmp_path: Path, tune: Callable[..., None]) -> None:
    tune(**SLOW)
    result = pingpong(*FIVE, DOCUMENT, "--task", "Explain.", "--trace", str(tmp_path / "t.jsonl"))
    assert result.exit_code == 0, result.output
    found = certificates(tmp_path / "t.jsonl", "on")
    assert [each["node"] for each in found] == ["researcher", "analyst", "critic", "planner", "writer"]
    rows = table(result.stdout)
    for each in found:
        prefilled = f"{each['static']:,} + {each['streamed']:,}"
        times = [f"{each['ttft_ms']:,.0f}", f"{each['total_ms']:,.0f}"]
        assert rows[each["node"]] == [each["device"], f"{each['prompt_tokens']:,}", prefilled, *times]
    assert all(each["static"] > 200 and each["streamed"] > 0 for each in found[1:])
    end_to_end = float(rows["end to end"][0].replace(",", ""))
    assert end_to_end >= sum(each["total_ms"] for each in found) - 1


def test_each_agent_is_shown_with_its_answer_and_its_speed(tmp_path: Path, tune: Callable[..., None]) -> None:
    tune(reply=lambda prompt: "the plan" if "You plan." in prompt else "a report of [bold]two[/bold] lines\nhere")
    result = chain_run("chain", "--trace", str(tmp_path / "t.jsonl"))
    planner, writer = certificates(tmp_path / "t.jsonl")
    shown = result.stdout.splitlines()
    at = shown.index("the plan")
    assert shown[at - 1].startswith(f"planner · {planner['device']} · first token after ")
    assert f" · {planner['output_tokens']} tokens · " in shown[at - 1]
    assert shown[at + 2].startswith(f"writer · {writer['device']} · ")
    assert shown[at + 3 : at + 5] == ["a report of [bold]two[/bold] lines", "here"]


def test_a_terminal_shows_progress_while_agents_speak(tune: Callable[..., None]) -> None:
    tune(**SLOW)
    result = chain_run("chain", TTY_COMPATIBLE="1", NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout).replace("\r", "\n")
    assert re.search(r"^planner · fake:0 · \d+ tokens · \d\.\d s · \d+ tokens/s", plain, re.MULTILINE)
    assert re.search(r"^writer · fake:1 · \d+ tokens prefilled ahead", plain, re.MULTILINE)
    assert result.stdout.count("first token after") == 2


def test_overlap_off_prefills_nothing(tmp_path: Path, tune: Callable[..., None]) -> None:
    tune(**SLOW)
    result = chain_run("chain", "--overlap", "off", "--trace", str(tmp_path / "t.jsonl"))
    assert result.exit_code == 0
    assert "Nothing was prefilled ahead" not in result.stdout
    assert table(result.stdout)["writer"][2] == "0 + 0"
    assert not events(tmp_path / "t.jsonl", "append.started")
    assert len(certificates(tmp_path / "t.jsonl", "off")) == 2


def test_one_device_is_told_that_nothing_overlaps() -> None:
    result = CliRunner().invoke(app, ["run", "test_cli:chain", "--task", "x", "--devices", "fake:0"])
    assert "Nothing was prefilled ahead: that takes two devices" in result.stdout


def test_a_context_of_less_than_nothing_is_refused() -> None:
    result = chain_run("chain", "--max-model-len", "-5")
    assert (result.exit_code, "Invalid value for '--max-model-len'" in result.stderr) == (2, True)


def test_options_reach_the_graph_and_settings_the_model(tune: Callable[..., None]) -> None:
    asked: list[Any] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "words"

    tune(reply=reply)
    assert chain_run("chain", "--set", "tone=1950s").exit_code == 0
    assert "Say it." in asked[0]
    assert "You are 1950s." in asked[1]


def test_the_input_file_becomes_the_document(tmp_path: Path, tune: Callable[..., None]) -> None:
    asked: list[str] = []
    tune(reply=lambda prompt: asked.append(prompt) or "words")
    (tmp_path / "note.txt").write_text("Grüße vom Watt", encoding="utf-8")
    assert pingpong(*FIVE, str(tmp_path / "note.txt"), "--task", "Sum up.").exit_code == 0
    assert "Document:\nGrüße vom Watt" in asked[0]
    assert "Task: Sum up." in asked[0]


def test_answers_of_other_models_are_shown_too() -> None:
    result = chain_run("foreign")
    assert "said by another model" in result.stdout
    assert set(table(result.stdout)) == {"planner", "writer", "end to end"}


# -- comparison --------------------------------------------------------------------------------------------------


def test_compare_runs_both_ways_on_the_same_engines(
    tmp_path: Path, tune: Callable[..., None], stopped: list[str]
) -> None:
    tune(**SLOW)
    result = pingpong(*FIVE, DOCUMENT, "--task", "Explain.", "--compare", "--trace", str(tmp_path / "t.jsonl"))
    assert result.exit_code == 0, result.output
    assert "prompt ids equal: yes\ntext equal: yes\n" in result.stdout
    assert sorted(stopped) == ["fake:0", "fake:1"]
    off, on = certificates(tmp_path / "t.jsonl", "off"), certificates(tmp_path / "t.jsonl", "on")
    assert len({event["run"] for event in events(tmp_path / "t.jsonl", "finish")}) == 2
    assert on[0]["cached"] == 0  # the run before left nothing in the cache
    rows = table(result.stdout)
    for before, after in zip(off, on, strict=True):
        times = [f"{run[name]:,.0f}" for name in ("ttft_ms", "total_ms") for run in (before, after)]
        saved = before["total_ms"] - after["total_ms"]
        tokens = [f"{after['prompt_tokens']:,}", f"{after['static'] + after['streamed']:,}"]
        share = f"{saved / before['total_ms']:.0%}"
        assert rows[after["node"]] == [after["device"], *tokens, *times, f"{saved:,.0f}", share]


def test_messages_of_two_runs_are_equal_whatever_their_ids() -> None:
    result = chain_run("history", "--compare")
    assert result.exit_code == 0, result.output
    assert "prompt ids equal: yes\ntext equal: yes\n" in result.stdout
    assert {"speaker", "speaker (2)"} <= set(table(result.stdout))


def test_a_graph_that_writes_something_else_each_time_is_seen() -> None:
    result = chain_run("counting", "--compare")
    assert result.exit_code == 0
    assert "prompt ids equal: yes\ntext equal: no\nEvery answer is equal" in result.stdout


def test_an_engine_that_says_something_else_is_seen(tune: Callable[..., None]) -> None:
    answers = itertools.count()
    tune(reply=lambda prompt: f"answer {next(answers)}")
    result = chain_run("chain", "--compare")
    assert result.exit_code == 0
    assert "prompt ids equal: yes (up to the answer of planner)\ntext equal: no\n" in result.stdout
    assert "The texts part in the answer of planner: a prompt prefilled in pieces" in result.stdout


def test_sampled_answers_are_not_blamed_on_rounding(tune: Callable[..., None]) -> None:
    answers = itertools.count()
    tune(reply=lambda prompt: f"answer {next(answers)}")
    result = chain_run("chain", "--compare", "--temperature", "0.7")
    assert "without --seed, sampled answers always differ" in result.stdout


def test_other_prompts_fail_the_comparison() -> None:
    result = chain_run("two_faced", "--compare")
    assert result.exit_code == 1
    assert "prompt ids equal: no\n" in result.stdout
    assert no_traceback(result)


def test_an_engine_that_got_another_prompt_fails_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = FakeEngine.generate

    async def confused(self: FakeEngine, request: Request) -> AsyncIterator[Delta]:
        async for delta in generate(self, request):
            yield replace(delta, prompt_token_ids=delta.prompt_token_ids and (1, 2, 3))

    monkeypatch.setattr(FakeEngine, "generate", confused)
    result = chain_run("chain", "--compare")
    assert result.exit_code == 1
    assert "prompt ids equal: no\ntext equal: yes\n" in result.stdout


def certificate(node: str, **changes: Any) -> dict[str, Any]:
    return {
        "node": node, "device": "fake:0", "prompt_tokens": 10, "static": 4, "streamed": 2, "ids_equal": True,
        "ttft_ms": 5.0, "total_ms": 10.0, **changes,
    }  # fmt: skip


def test_agents_that_run_at_the_same_time_may_swap_their_order() -> None:
    off = Run("off", prompts=[("worker", "1"), ("worker", "2")])
    on = Run("on", prompts=[("worker", "2"), ("worker", "1")])
    assert hold_together(off, on).ids_equal


@pytest.mark.parametrize("more", ["off", "on"])
def test_a_call_that_only_one_run_made_is_a_difference(more: str) -> None:
    short, long = Run("x", prompts=[("a", "1")]), Run("x", prompts=[("a", "1"), ("b", "2")])
    assert not hold_together(*((long, short) if more == "off" else (short, long))).ids_equal


def test_a_turn_that_only_one_run_had_keeps_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    Console().print(compare_table(Run("off"), Run("on", certificates=[certificate("late")])))
    assert table(capsys.readouterr().out)["late"] == ["fake:0", "10", "6", "-", "5", "-", "10", "-", "-"]


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["test_cli:chain"], "give --input FILE, --task TEXT, or both"),
        (["test_cli:chain", "--input", "nowhere.md"], "--input nowhere.md cannot be read: No such file"),
        (["test_cli:chain", "--input", "."], "--input . cannot be read"),
        (["test_cli:chain", "--input", sys.executable], "is not UTF-8 text"),
        (["no_such_module", "--task", "x"], "There is no module 'no_such_module'"),
        (["graphs.nothing", "--task", "x"], "There is no module 'graphs.nothing'"),
        (["graphs/five_agents.py", "--task", "x"], "is not an import string"),
        (["test_cli:nobody", "--task", "x"], "The module 'test_cli' has no 'nobody'"),
        (["test_cli", "--task", "x"], "The module 'test_cli' has no 'build'"),
        (["test_cli:DEVICES", "--task", "x"], "test_cli:DEVICES is not a function"),
        (["test_cli:State", "--task", "x"], "State cannot be called as build(model, **options)"),
        (["test_cli:uncompiled", "--task", "x"], "not a compiled graph: end it with return builder.compile()"),
        (["test_cli:needy", "--task", "x"], "The graph needs a value: --set topic=..."),
        (["test_cli:chain", "--task", "x", "--set", "tune=a"], "has no option 'tune'; it has before, extra, tone"),
        (["test_cli:chain", "--task", "x", "--set", "tone"], "--set tone is not of the form name=value"),
        (["test_cli:chain", "--task", "x", "--compare", "--overlap", "off"], "leave out --overlap"),
        (["test_cli:chain", "--task", "x", "--trace", "no/folder/t.jsonl"], "--trace no/folder/t.jsonl cannot be"),
        (["test_cli:chain", "--task", "x", "--devices", "gpu:0"], "Unknown device 'gpu:0'"),
        (["graphs.five_agents", "--task", "x"], "The state has no document"),
        (
            ["graphs.router", "--task", "x", "--set", "brief_tokens=5"],
            "The graph refused --set brief_tokens=5: A brief",
        ),
    ],
)
def test_wrong_input_is_one_clear_line(args: list[str], says: str, stopped: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", *DEVICES, *args])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert says in result.stderr
    assert no_traceback(result)


def test_an_engine_error_is_shown_with_its_hint(tune: Callable[..., None], stopped: list[str]) -> None:
    tune(fail_generate=EngineDead("The engine on fake:0 died."), fail_after_tokens=8)
    result = chain_run("chain")
    assert result.exit_code == 1
    died = "The engine on fake:0 died."
    assert (
        result.stderr == f"Error: No engine is left for this call. fake:1: {died} fake:0: {died}\n{EngineDead.hint}\n"
    )
    assert "planner · fake:0 · not complete" in result.stdout  # what had been said is not lost
    assert sorted(stopped) == ["fake:0", "fake:1"]


def test_other_errors_come_through_after_the_engines_are_closed(stopped: list[str]) -> None:
    result = chain_run("broken")
    assert isinstance(result.exception, ZeroDivisionError)
    assert sorted(stopped) == ["fake:0", "fake:1"]


def test_a_module_that_lacks_a_dependency_is_not_taken_for_a_typing_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = pingpong("lacking", "--task", "x")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "a_package_nobody_has"


# -- options -----------------------------------------------------------------------------------------------------


def typed(
    model: Any,
    *,
    count: int = 1,
    share: float = 1.0,
    deep: bool = False,
    name: str = "",
    limit: int | None = 3,
    words: list[str] | None = None,
    anything=None,  # type: ignore[no-untyped-def]
) -> None: ...


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("count=2048", 2048),
        ("share=0.5", 0.5),
        ("deep=true", True),
        ("name=7", "7"),
        ("name=a=b", "a=b"),
        ("limit=5", 5),
        ("limit=null", None),
        ('words=["a", "b"]', ["a", "b"]),
        ("anything=12", 12),
        ("anything=blue", "blue"),
    ],
)
def test_options_take_the_type_that_the_graph_annotates(pair: str, value: object) -> None:
    name = pair.partition("=")[0]
    assert parse_options(typed, [pair]) == {name: value}
    assert type(parse_options(typed, [pair])[name]) is type(value)


@pytest.mark.parametrize("pair", ["count=many", "share=half", "deep=deeply", "limit=none", "words=a"])
def test_options_of_the_wrong_type_are_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {pair} does not fit"):
        parse_options(typed, [pair])


def test_a_graph_with_open_options_takes_any_name() -> None:
    assert parse_options(lambda model, **options: None, ["depth=3"]) == {"depth": 3}


# -- the command itself ------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"pingpong {version('langgraph-pingpong')}\n"
    help_text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).stdout
    for option in ("--input", "--task", "--set", "--compare", "--trace", "--devices", "--no-defer"):
        assert option in help_text


def test_importing_the_command_line_imports_no_engine() -> None:
    code = "import sys, langgraph_pingpong.cli; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_installed_command_runs_a_graph_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from test_cli import chain as build\n")
    command = [str(PINGPONG), "run", "mine", "--task", "Say it.", "--compare", "--trace", "t.jsonl", *DEVICES]
    done = run_command(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "prompt ids equal: yes\ntext equal: yes\n" in done.stdout
    assert len(certificates(tmp_path / "t.jsonl", "off")) == len(certificates(tmp_path / "t.jsonl", "on")) == 2


def test_the_installed_command_shows_the_traceback_of_a_bug_in_the_graph(tmp_path: Path) -> None:
    done = run_command([str(PINGPONG), "run", "test_cli:broken", "--task", "x", *DEVICES], tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def run_command(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(HERE)])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("nap_s", [1.0, 0.0], ids=["before its call", "during its call"])
def test_an_interrupt_ends_a_node_that_cannot_be_cancelled(tmp_path: Path, nap_s: float) -> None:
    command = [str(PINGPONG), "run", "test_cli:endless", "--set", f"nap_s={nap_s}", "--task", "x", *DEVICES]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert "node runs\n" in process.stdout
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=20)  # the answer alone would take minutes
        finally:
            process.kill()
    assert process.returncode == 130
    assert output.count("stopped fake:0") == output.count("stopped fake:1") == 1
    assert errors == "Interrupted.\n"
