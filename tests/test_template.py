"""Templates of prompts: learned from one prompt, filled for another."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_pingpong.edges.template import ListSlice, Literal, OneMessage, Reference, Sources, Stop, fill, learn

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
LONG = st.text(st.characters(codec="utf-8"), min_size=8, max_size=60)


def message(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def unknown(path: object) -> str:
    raise AssertionError(f"{path!r} should be known")


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
    sources = Sources({"a": answer}, {"x": text, "y": other}, {"h": [message(c, "assistant") for c in history]})
    assert fill(learn(messages, sources), sources, unknown) == messages


def test_answers_state_and_history_are_referred_to() -> None:
    history = [message("Hello."), message("Hi there.", "assistant")]
    sources = Sources({"writer": "The tide is low."}, {"task": "Describe the shore."}, {"messages": history})
    messages = [
        message("You are a critic.", "system"),
        *history,
        message("Task: Describe the shore.\nText: The tide is low.\nJudge."),
    ]
    system, slice_, last = learn(messages, sources)
    assert system == OneMessage((("role", "system"),), (Literal("You are a critic."),))
    assert slice_ == ListSlice("messages", 0)
    assert isinstance(last, OneMessage)
    assert last.content == (
        Literal("Task: "),
        Reference("text", "task"),
        Literal("\nText: "),
        Reference("answer", "writer"),
        Literal("\nJudge."),
    )


def test_a_later_run_is_foreseen() -> None:
    learned = Sources({"writer": "The tide is low."}, {"task": "Describe the shore."}, {"messages": [message("One.")]})
    prompt = [message("Rules.", "system"), message("One."), message("Describe the shore.: The tide is low.")]
    later = Sources(
        {"writer": "A storm came."}, {"task": "Describe the sea."}, {"messages": [message("Two."), message("Three.")]}
    )
    assert fill(learn(prompt, learned), later, unknown) == [
        message("Rules.", "system"),
        message("Two."),
        message("Three."),
        message("Describe the sea.: A storm came."),
    ]


def test_stripped_answers_are_recognised() -> None:
    sources = Sources({"a": "\n The tide is low. \n"}, {}, {})
    (one,) = learn([message("Say: The tide is low.!")], sources)
    assert isinstance(one, OneMessage)
    assert Reference("answer", "a", stripped=True) in one.content
    assert fill((one,), Sources({"a": " High. "}, {}, {}), unknown) == [message("Say: High.!")]


def test_short_texts_are_literals() -> None:
    (one,) = learn([message("yes or no")], Sources({}, {"x": "no"}, {}))
    assert isinstance(one, OneMessage)
    assert one.content == (Literal("yes or no"),)


def test_what_is_missing_is_stood_in_for() -> None:
    sources = Sources({"a": "The tide is low."}, {}, {"h": [message("Hello.")]})
    template = learn([message("Hello."), message("Now: The tide is low. Go.")], sources)
    assert fill(template, Sources({}, {}, {"h": []}), lambda path: f"<{path}>") == [message("Now: <a> Go.")]
    assert fill(template, Sources({}, {}, {}), lambda path: f"<{path}>") == [message("<rest>")]


def test_tool_calls_end_a_template() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert learn([message("Hello there."), call, message("More.")], Sources({}, {}, {}))[1:] == (Stop(),)
