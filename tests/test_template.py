"""Templates of prompts: learned from one prompt, filled for another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_pingpong.edges.template import ListSlice, Literal, OneMessage, Reference, Sources, Stop, fill, learn
from langgraph_pingpong.growing_prompt import CallKey

WRITER = CallKey(("writer",))
HISTORY, TASK, X, Y = ("state", "messages"), ("state", "task"), ("x",), ("y", 0)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
LONG = st.text(st.characters(codec="utf-8"), min_size=8, max_size=60)


def message(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def unknown(path: object) -> str:
    raise AssertionError(f"{path!r} should be known")


def stand_in(source: object) -> str:
    return f"<{source.node if isinstance(source, CallKey) else source}>"


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4), LONG, LONG, LONG, st.lists(TEXTS, max_size=3))
def test_a_template_filled_with_its_own_sources_is_the_prompt(
    before: list[str], answer: str, text: str, other: str, history: list[str]
) -> None:
    messages = [
        *(message(content) for content in before),
        *(message(content, "assistant") for content in history),
        message(f"{text}\n{answer}\n{other}{answer}"),
    ]
    sources = Sources({WRITER: answer}, {X: text, Y: other}, {HISTORY: [message(c, "assistant") for c in history]})
    assert fill(learn(messages, sources), sources, unknown) == messages


def test_answers_state_and_history_are_referred_to() -> None:
    history = [message("Hello."), message("Hi there.", "assistant")]
    sources = Sources({WRITER: "The tide is low."}, {TASK: "Describe the shore."}, {HISTORY: history})
    messages = [
        message("You are a critic.", "system"),
        *history,
        message("Task: Describe the shore.\nText: The tide is low.\nJudge."),
    ]
    system, slice_, last = learn(messages, sources)
    assert system == OneMessage((("role", "system"),), (Literal("You are a critic."),))
    assert slice_ == ListSlice(HISTORY, 0)
    assert isinstance(last, OneMessage)
    assert last.content == (
        Literal("Task: "),
        Reference(TASK),
        Literal("\nText: "),
        Reference(WRITER),
        Literal("\nJudge."),
    )


def test_a_later_run_is_foreseen() -> None:
    learned = Sources({WRITER: "The tide is low."}, {TASK: "Describe the shore."}, {HISTORY: [message("One.")]})
    prompt = [message("Rules.", "system"), message("One."), message("Describe the shore.: The tide is low.")]
    later = Sources(
        {WRITER: "A storm came."}, {TASK: "Describe the sea."}, {HISTORY: [message("Two."), message("Three.")]}
    )
    assert fill(learn(prompt, learned), later, unknown) == [
        message("Rules.", "system"),
        message("Two."),
        message("Three."),
        message("Describe the sea.: A storm came."),
    ]


def test_stripped_answers_are_recognised() -> None:
    sources = Sources({WRITER: "\n The tide is low. \n"}, {}, {})
    (one,) = learn([message("Say: The tide is low.!")], sources)
    assert isinstance(one, OneMessage)
    assert Reference(WRITER, stripped=True) in one.content
    assert fill((one,), Sources({WRITER: " High. "}, {}, {}), unknown) == [message("Say: High.!")]


def test_short_texts_are_literals() -> None:
    (one,) = learn([message("yes or no")], Sources({}, {X: "no"}, {}))
    assert isinstance(one, OneMessage)
    assert one.content == (Literal("yes or no"),)


def test_what_is_missing_is_stood_in_for() -> None:
    sources = Sources({WRITER: "The tide is low."}, {}, {HISTORY: [message("Hello.")]})
    template = learn([message("Hello."), message("Now: The tide is low. Go.")], sources)
    assert fill(template, Sources({}, {}, {HISTORY: []}), stand_in) == [message("Now: <writer> Go.")]
    assert fill(template, Sources({}, {}, {}), stand_in) == [message("<rest>")]


def test_tool_calls_end_a_template() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert learn([message("Hello there."), call, message("More.")], Sources({}, {}, {}))[1:] == (Stop(),)
