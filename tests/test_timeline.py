"""Timelines: bars, arrows and first tokens from events made by hand, the picture, the page in a real browser."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from langgraph_pingpong.cli import app
from langgraph_pingpong.errors import NotATrace
from langgraph_pingpong.trace import Event, JsonLines, read_events
from langgraph_pingpong.viz.layout import colours_of, ink_on, panels_of, thinned, tinted
from langgraph_pingpong.viz.timeline import Span, Timeline, runs_of, timeline_of
from tests.browser import open_page
from tests.traced_runs import append, called, event, finish, first, pingpong

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "docs" / "traces" / "demo-cpu.jsonl"


def near(span: Span) -> tuple[Any, ...]:
    return span.device, span.kind, span.node, round(span.start, 6), round(span.end, 6), span.tokens


# -- from events to bars ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [{"upstream": "A"}, {}], ids=["told by the edge", "told by the certificate"])
def test_bars_arrows_and_first_tokens(upstream: dict[str, str]) -> None:
    timeline = timeline_of(pingpong(**upstream), "t")
    assert list(map(near, timeline.spans)) == [
        ("d0", "prefill", "A", 0, 20, 100),
        ("d0", "decode", "A", 20, 60, 7),
        ("d1", "append", "B", 21, 40, 64),
        ("d1", "append", "B", 50, 55, 96),
        ("d1", "append", "B", 60, 62, 128),
        ("d1", "prefill", "B", 62, 70, 100),
        ("d1", "decode", "B", 70, 90, 7),
    ]
    flows = [(near(flow.source)[2:4], near(flow.target)[1:4], flow.whole) for flow in timeline.flows]
    assert flows == [
        (("A", 20), ("append", "B", 50), False),  # the static piece has no words of A's in it
        (("A", 20), ("append", "B", 60), False),
        (("A", 20), ("prefill", "B", 62), True),
    ]
    assert [(one.node, round(one.at, 6), one.ttft_ms) for one in timeline.first_tokens] == [
        ("A", 20, 10),
        ("B", 70, 10),
    ]
    assert (timeline.title, timeline.nodes, timeline.devices, round(timeline.end, 6)) == (
        "t",
        ["A", "B"],
        ["d0", "d1"],
        90,
    )


def test_without_edges_the_answer_is_handed_over_whole() -> None:
    events = [called("A", 0), first("A", 5), finish("A", 20), called("B", 21), first("B", 25), finish("B", 30)]
    (flow,) = timeline_of(events).flows
    assert (flow.source.node, flow.target.node, flow.whole) == ("A", "B", True)
    assert [round(ms, 6) for ms in (flow.leaves, flow.arrives)] == [20, 21]


def test_answers_begun_ahead_are_in_vain_or_taken_over() -> None:
    begun = {"prompt_tokens": 90, "ended": False}
    events = [
        called("A", 0),
        first("A", 5),
        event("speculation.started", 6, "B", "d1", **begun),
        event("speculation.dropped", 9, "B", "d1", tokens=0),
        event("speculation.started", 10, "B", "d1", **begun),  # older traces did not tell of its end
        *append("B", 13, 14, 96),
        finish("A", 20),
        event("speculation.started", 20, "B", "d1", **begun),
        event("finalize", 25, "B", "d1", static=90, streamed=10, wasted=0, ready=1),
        called("B", 25, "d1"),
        first("B", 26, "d1"),
        finish("B", 30, "d1", upstream="A"),
    ]
    ahead = [near(span)[1:5] for span in timeline_of(events).spans if span.node == "B"]
    assert ahead == [
        ("aborted", "B", 6, 9),
        ("aborted", "B", 10, 13),
        ("append", "B", 13, 14),
        ("prefill", "B", 20, 26),
        ("decode", "B", 26, 30),
    ]


def test_edges_that_nobody_claims_have_bars_and_no_arrows() -> None:
    events = [
        called("A", 0),
        first("A", 5),
        *append("B", 6, 8, 64, upstream="A"),
        event("append.started", 9, "B", "d1", tokens=96, upstream="A"),
        event("edge.dropped", 12, "B", "d1", reason="not called", source="declared", wasted=64, upstream="A"),
        finish("A", 20),
    ]
    timeline = timeline_of(events)
    assert [near(span)[1:5] for span in timeline.spans if span.node == "B"] == [
        ("append", "B", 6, 8),
        ("append", "B", 9, 12),
    ]
    assert not timeline.flows


def test_an_answer_that_moves_has_bars_on_both_devices() -> None:
    events = [called("A", 0), first("A", 5), event("failover", 8, "A", "d1", left="d0", said=2), finish("A", 20, "d1")]
    bars = [("d0", "prefill", 0, 5), ("d0", "decode", 5, 8), ("d1", "decode", 8, 20)]
    assert [(*near(span)[:2], *near(span)[3:5]) for span in timeline_of(events).spans] == bars
    moved_early = [called("A", 0), event("failover", 3, "A", "d1", left="d0", said=0), first("A", 9, "d1")]
    bars = [("d0", "prefill", 0, 3), ("d1", "prefill", 3, 9), ("d1", "decode", 9, 9)]
    assert [(*near(span)[:2], *near(span)[3:5]) for span in timeline_of(moved_early).spans] == bars


def test_an_answer_that_fails_ends_there() -> None:
    events = [
        called("A", 0),
        first("A", 5),
        event("generate.failed", 8, "A", error="x"),
        called("A", 9),
        first("A", 12),
    ]
    bars = [("prefill", 0, 5), ("decode", 5, 8), ("prefill", 9, 12), ("decode", 12, 12)]
    assert [(near(span)[1], *near(span)[3:5]) for span in timeline_of(events).spans] == bars


def test_what_is_not_over_ends_with_its_run_or_now() -> None:
    events = [called("A", 0), first("A", 5), called("B", 6, run="other"), finish("B", 40, run="third")]
    assert [near(span)[2:5] for span in timeline_of(events).spans] == [("A", 0, 5), ("A", 5, 5), ("B", 6, 6)]
    now = timeline_of(events, until=10.1)
    assert [near(span)[2:5] for span in now.spans] == [("A", 0, 5), ("A", 5, 100), ("B", 6, 100)]
    assert timeline_of([], "t") == Timeline("t")
    assert timeline_of([event("engine.died", 0, "", error="x")]).spans == []


def test_runs_that_alternate_are_kept_apart() -> None:
    events = sorted(
        [
            each
            for run in ("x", "y")
            for each in (called("A", 0, run=run), first("A", 5, run=run), finish("A", 9, run=run))
        ]
        + [called("B", 10, "d1", "y"), first("B", 12, "d1", "y"), finish("B", 14, "d1", "y")],
        key=lambda each: each.t,
    )
    timeline = timeline_of(events)
    assert [(flow.source.run, flow.target.run) for flow in timeline.flows] == [("y", "y")]
    (lane, _) = timeline.lanes(["d0", "d1"])
    assert [[span.run for span in row] for row in lane.calls] == [["x", "x"], ["y", "y"]]


def test_compared_runs_are_told_apart_by_their_names() -> None:
    names = ["overlap-on-1a", "overlap-off-2b", "overlap-on-3c", "overlap-on-"]
    parts = runs_of([event("x", 0, "A", run=name) for name in names], "file")
    assert {part: [each.run for each in events] for part, events in parts.items()} == {
        "overlap off": ["overlap-off-2b"],
        "overlap on": ["overlap-on-1a", "overlap-on-3c", "overlap-on-"],
    }
    assert list(parts) == ["overlap off", "overlap on"]
    assert list(runs_of([event("x", 0, "A", run="9f"), event("x", 0, "A", run="8e")], "file")) == ["file"]


# -- where bars lie --------------------------------------------------------------------------------------------


def test_no_two_bars_of_a_panel_overlap() -> None:
    events = [*pingpong(), *append("C", 22, 45, 64), called("C", 65, "d1"), first("C", 75, "d1"), finish("C", 95, "d1")]
    serial = timeline_of([called("A", 0), first("A", 5), finish("A", 20)])
    panel, other = panels_of([timeline_of(sorted(events, key=lambda each: each.t)), serial])
    bars = list(panel.bars.values())
    assert len(bars) == len(panel.timeline.spans) == 10
    for place, one in enumerate(bars):
        top, bottom = panel.lanes[one.span.device]
        assert top <= one.y - one.height / 2 < one.y + one.height / 2 <= bottom
        for two in bars[place + 1 :]:
            apart = abs(one.y - two.y) >= (one.height + two.height) / 2
            assert apart or one.span.end <= two.span.start or two.span.end <= one.span.start
    assert list(other.lanes) == list(panel.lanes) == ["d0", "d1"]
    assert other.height < panel.height


def test_arrows_go_from_edge_to_edge_and_not_within_a_row() -> None:
    panel = panels_of([timeline_of(pingpong())])[0]
    (start, end) = panel.arrow(panel.timeline.flows[0]) or (0, 0)
    bars = panel.bars[panel.timeline.flows[0].source], panel.bars[panel.timeline.flows[0].target]
    assert (start, end) == (bars[0].y + bars[0].height / 2, bars[1].y - bars[1].height / 2)
    serial = [called("A", 0), first("A", 5), finish("A", 20), called("B", 21), first("B", 25), finish("B", 30)]
    (alone,) = panels_of([timeline_of(serial)])
    assert alone.arrow(alone.timeline.flows[0]) is None


def test_many_arrows_are_thinned_out() -> None:
    pieces = [each for place in range(30) for each in append("B", 21 + place, 21.5 + place, 96 + place)]
    events = [*pingpong()[:2], *pieces, *pingpong()[-6:]]
    flows = timeline_of(events).flows
    few = list(thinned(flows, 8))
    assert (len(flows), sum(flow.whole for flow in few)) == (32, 1)
    assert 4 < len(few) <= 9


def test_colours() -> None:
    one, two = timeline_of(pingpong()), timeline_of([called("C", 0), first("C", 1)])
    colours = colours_of([one, two])
    assert list(colours) == ["A", "B", "C"] and len(set(colours.values())) == 3
    assert (tinted("#000000", 0.2), tinted("#ff0000", 1)) == ("#cccccc", "#ff0000")
    assert (ink_on("#0072b2"), ink_on("#f0e442")) == ("white", "black")


# -- files of events -------------------------------------------------------------------------------------------


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = JsonLines(path)
    for each in pingpong():
        lines(each)
    lines.close()
    assert read_events(path) == pingpong()
    path.write_text(path.read_text() + '{"name": "fin')  # the program was killed while it wrote
    assert read_events(path) == pingpong()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no event"),
        ("{}\n", "something else"),
        ("[1]\n", "something else"),
        ('{"setup": {}}\n', "something else"),
        ("hello\n", "something else"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "t.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NotATrace, match=told):
        read_events(path)


# -- the command -----------------------------------------------------------------------------------------------


def timeline(*args: object) -> Result:
    return CliRunner().invoke(app, ["timeline", *map(str, args)])


def traced(path: Path, events: Sequence[Event]) -> Path:
    path.write_text("".join(each.to_json() + "\n" for each in events))
    return path


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_written_and_the_same_each_time(tmp_path: Path, suffix: str, begins: bytes) -> None:
    for name in ("a", "b"):
        done = timeline(DEMO, "--out", tmp_path / f"new/{name}.{suffix}")
        assert (done.exit_code, done.output) == (0, f"Wrote {tmp_path}/new/{name}.{suffix}\n")
    assert (tmp_path / f"new/a.{suffix}").read_bytes().startswith(begins)
    if suffix == "png":
        assert (tmp_path / "new/a.png").read_bytes() == (tmp_path / "new/b.png").read_bytes()


def test_the_picture_shows_serial_above_pingpong_on_one_scale(tmp_path: Path) -> None:
    from langgraph_pingpong.cli.timeline import read
    from langgraph_pingpong.viz.timeline_png import draw

    timelines = read([DEMO])
    assert [len(each.spans) for each in timelines] == [10, 24]
    figure = draw(timelines)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() and above.get_xlim()[1] >= max(each.end for each in timelines)
    titles = [axes.get_title(loc="left") for axes in (above, below)]
    assert re.fullmatch(r"overlap off: [\d,]+ ms", titles[0]) and re.fullmatch(
        r"overlap on: [\d,]+ ms, 17% less", titles[1]
    )
    for axes, each in zip((above, below), timelines, strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu:0", "cpu:1"]
        assert sum(len(bars) for bars in axes.containers) == len(each.spans)
        texts = {text.get_text() for text in axes.texts}
        assert {"researcher", "analyst", "critic", "planner", "writer"} <= texts
        assert {f"{one.ttft_ms:,.0f} ms" for one in each.first_tokens} <= texts
        assert sum(1 for text in axes.texts if getattr(text, "arrow_patch", None)) == len(each.flows)


def test_names_are_text_in_the_picture() -> None:
    from langgraph_pingpong.viz.timeline_png import draw

    odd = "_x^{2}$ and $\\frac$"
    figure = draw([timeline_of([called(odd, 0, odd), first(odd, 5, odd), finish(odd, 200, odd)], odd)])
    figure.canvas.draw()
    (axes,) = figure.axes
    shown = [axes.get_title(loc="left"), axes.get_yticklabels()[0].get_text(), figure.legends[1].texts[0].get_text()]
    assert [text.strip().replace("\\$", "$") for text in shown] == [odd] * 3


def test_a_long_trace_is_read_in_time() -> None:
    events = [each for number in range(1500) for each in small(number)]
    started = time.process_time()
    made = timeline_of(events)
    assert (len(made.spans), len(made.flows)) == (1500 * 7, 1500 * 3)
    assert time.process_time() - started < 5


def small(number: int) -> list[Event]:
    return [Event(e.name, e.t + number, f"r{number}", e.node, e.device, e.data) for e in pingpong(upstream="A")]


def test_two_traces_are_held_against_each_other(tmp_path: Path) -> None:
    from langgraph_pingpong.cli.timeline import read

    one = traced(tmp_path / "before.jsonl", [called("A", 0), first("A", 5), finish("A", 20)])
    two = traced(tmp_path / "after.jsonl", pingpong())
    assert [each.title for each in read([one, two])] == ["before: 20 ms", "after: 90 ms, 350% more"]
    three = traced(tmp_path / "off.jsonl", [called("A", 0, run="overlap-off-1"), first("A", 5, run="overlap-off-1")])
    assert next(each.title for each in read([three, one])) == "off, overlap off: 5 ms"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([DEMO, "--out", "t.gif"], "has to end in .html, .png, .svg, .pdf"),
        ([DEMO, DEMO, DEMO, "--out", "t.png"], "not 3"),
        (["nowhere.jsonl", "--out", "t.png"], "cannot be read"),
        (["nothing.jsonl", "--out", "t.png"], "nothing to draw"),
        ([DEMO, "--out", "nothing.jsonl/t.png"], "cannot be written"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[Any], told: str) -> None:
    monkeypatch.chdir(tmp_path)
    traced(tmp_path / "nothing.jsonl", [event("engine.died", 0, "", error="x")])
    done = timeline(*args)
    assert done.exit_code == 2
    assert told in done.stderr.replace("\n", " ")


def test_without_plotly_the_page_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    done = timeline(DEMO, "--out", tmp_path / "t.html")
    assert done.exit_code == 2
    assert 'pip install "langgraph-pingpong[viz]"' in done.stderr


# -- the page --------------------------------------------------------------------------------------------------

ACTS = """
<script>
window.addEventListener("load", async () => {
  const chart = document.getElementById("timeline"), said = {};
  const bars = () => [...chart.querySelectorAll(".barlayer .point path")].map(bar => bar.getBoundingClientRect().width);
  said.before = bars();
  const place = chart.data.findIndex(each => each.type === "bar" && each.text[0] === "critic");
  Plotly.Fx.hover(chart, [{curveNumber: place, pointNumber: 0}], "xy");
  said.hover = chart.querySelector(".hoverlayer").textContent;
  await Plotly.relayout(chart, {"xaxis.range": [0, 5000]});
  said.ranges = Object.keys(chart._fullLayout).filter(key => /^xaxis/.test(key))
    .map(key => chart._fullLayout[key].range.map(Math.round));
  said.after = bars();
  said.zoomsWithTheWheel = chart._context.scrollZoom;
  const result = document.createElement("pre");
  result.id = "said";
  result.textContent = JSON.stringify(said);
  document.body.append(result);
});
</script>
"""
"""Does with the chart what a reader does with the mouse, and puts what came of it into the page."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("plotly", reason="plotly is not installed: it comes with the extra viz")
    path = tmp_path_factory.mktemp("page") / "t.html"
    done = timeline(DEMO, "--out", path)
    assert done.exit_code == 0, done.output
    return path


def test_the_page_opens_offline_in_a_browser(page: Path, tmp_path: Path) -> None:
    opened = open_page(page, tmp_path / "profile")
    assert opened.console == []
    bars = re.findall(r'<g class="barlayer.*?(?=<g class="scatterlayer)', opened.dom, re.DOTALL)
    assert [part.count('class="point"') for part in bars] == [10, 24]
    for name in ("researcher", "analyst", "critic", "planner", "writer", "first token", "text of the upstream"):
        assert f">{name}</text>" in opened.dom
    assert ">cpu:0</text>" in opened.dom
    assert "overlap off: " in opened.dom and "17% less" in opened.dom
    assert "Share" not in re.findall(r'data-title="([^"]*)"', opened.dom)


def test_the_page_zooms_and_tells_more_under_the_mouse(page: Path, tmp_path: Path) -> None:
    acting = tmp_path / "acting.html"
    acting.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{ACTS}</body>"), encoding="utf-8")
    opened = open_page(acting, tmp_path / "profile")
    assert opened.console == []
    found = re.search(r'<pre id="said">(.*?)</pre>', opened.dom)
    assert found is not None
    said = json.loads(found[1])
    assert said["zoomsWithTheWheel"] is True
    assert re.fullmatch(r"critic: answer[\d,.]+ ms on cpu:0, 64 tokensfrom [\d,]+ to [\d,]+ ms", said["hover"])
    assert said["ranges"] == [[0, 5000], [0, 5000]]  # one scale
    assert len(said["before"]) == 34 and max(said["before"]) > 100
    assert said["after"][0] > 3 * said["before"][0]


def test_the_page_loads_nothing_and_uploads_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
    assert '"showSendToCloud": false' in text


def test_names_are_text_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    evil = "<script>x</script>%{x}&"
    path = traced(tmp_path / "t.jsonl", [called(evil, 0), first(evil, 5), finish(evil, 20)])
    assert timeline(path, "--out", tmp_path / "t.html").exit_code == 0
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert evil not in text and "<script>x" not in text


def test_a_browser_that_is_asked_tells_of_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<html><body><script>console.error("said"); document.body.append("made");'
        'setTimeout(() => { throw new Error("thrown") }, 50); fetch("http://127.0.0.1:9/x")</script></body></html>'
    )
    opened = open_page(bad, tmp_path / "profile")
    assert "made</body>" in opened.dom
    assert opened.console[0] == "said"
    assert any("Uncaught Error: thrown" in each for each in opened.console)
    assert len(opened.console) >= 3  # what the network was asked for


# -- the picture in the documentation --------------------------------------------------------------------------


def test_the_committed_picture_is_made_of_the_committed_trace(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.image import imread

    drawn_with = re.search(r"^matplotlib==(.*)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    if drawn_with is None or matplotlib.__version__ != drawn_with[1]:
        pytest.skip("letters of another version of matplotlib lie elsewhere by a pixel")
    assert timeline(DEMO, "--out", tmp_path / "t.png").exit_code == 0
    assert (imread(tmp_path / "t.png") == imread(ROOT / "docs" / "img" / "timeline.png")).all(), "run make pictures"
