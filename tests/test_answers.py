"""Messages that are made of all deltas at once are those that the chunks of each delta merge into."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk, message_chunk_to_message

from langgraph_pingpong.answers import Answer, AnswerChunks
from langgraph_pingpong.engines.base import Delta, Said, TokenLogprob, ToolCallPart

CALL = ToolCallPart(0, "call 0", "tide", '{"place": "Oslo"}')
LOGPROBS = ((), (TokenLogprob("a", -0.5),))

said = st.builds(Said, st.text(max_size=3), st.sampled_from(["", "", "hm"]))
some = st.lists(st.tuples(said, st.sampled_from(LOGPROBS)), max_size=8)
calling = st.builds(lambda before, after: [*before, (Said(tool_calls=(CALL,)), ()), *after], some, some)
deltas = some | calling


def answers_of(index: int, row: Sequence[tuple[Said, tuple[TokenLogprob, ...]]]) -> list[Answer]:
    some = [(Delta(each.content, (1,), index=index, logprobs=logprobs), each, None) for each, logprobs in row]
    return [*some, (Delta(finish_reason="stop", index=index), Said(), None)]


@given(deltas, deltas)
def test_they_are_equal(first: list, second: list) -> None:  # type: ignore[type-arg]
    rows = [answers_of(index, row) for index, row in enumerate((first, second))]
    between = [answer for pair in zip(*rows, strict=False) for answer in pair]
    left = [answer for row in rows for answer in row[min(map(len, rows)) :]]
    whole = AnswerChunks("m", lambda _: None).result([*between, *left])
    for row, generation in zip(rows, whole.generations, strict=True):
        made = AnswerChunks("m", lambda _: None)
        chunks = [chunk.message for answer in row for chunk in made.chunks(*answer)]
        merged = message_chunk_to_message(functools.reduce(AIMessageChunk.__add__, chunks))
        assert generation.message.model_dump(exclude={"id"}) == merged.model_dump(exclude={"id"})


def test_content_said_token_by_token_is_one_chunk() -> None:
    taken: list[int] = []

    class Counting(AnswerChunks):
        def chunks(self, *answer):  # type: ignore[no-untyped-def]
            taken.append(1)
            return super().chunks(*answer)

    row = [(Delta("x", (1,)), Said("x"), None) for _ in range(100)]
    result = Counting("m", lambda _: None).result([*row, (Delta(finish_reason="stop"), Said(), None)])
    assert (result.generations[0].text, len(taken)) == ("x" * 100, 2)
