"""What a prompt is made of: a template of one call's messages over texts that are known before the call.

A template is learned from one real prompt and the sources it may have drawn from: the answers of earlier calls, the
state, the prompt of the call before. It holds message lists by reference and texts as pieces, each either literal or
a reference. Filled with the sources of a later run it gives the prompt that run should make. No user code is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langgraph_pingpong.growing_prompt import CallKey, ToolResult

Message = Mapping[str, Any]
"""A message in OpenAI's form."""

Path = tuple[str | int, ...]
"""Where in state, input or prompt a text or a list of messages stands."""

MIN_REFERENCE = 8
"""Shorter texts are taken for literals, in characters: they occur by chance. Answers of calls are exempt."""

MAX_PIECES = 64
"""Pieces of one text; what lies beyond stays literal."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a prompt may be made of.

    `answers` maps a call to the text it gave, `texts` a path to a text, and `lists` a path to a list of messages.
    `turn` is the message that the call before answered with, if it called tools.
    """

    answers: Mapping[CallKey, str]
    texts: Mapping[Path, str]
    lists: Mapping[Path, Sequence[Message]]
    turn: Message | None = None


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands there as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Text of a source, the answer of a call or what stands at a path; `stripped` without white space around it."""

    source: CallKey | Path
    stripped: bool = False

    def resolve(self, sources: Sources) -> str | None:
        """The text, or None if this run has no such source."""
        at = self.source
        text = sources.answers.get(at) if isinstance(at, CallKey) else sources.texts.get(at)
        return text.strip() if text is not None and self.stripped else text


Piece = Literal | Reference


@dataclass(frozen=True, slots=True)
class OneMessage:
    """A message: `frame` is all of it but its content."""

    frame: tuple[tuple[str, Any], ...]
    content: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ListSlice:
    """Messages of a list, from `start` (negative: from its end) to its end."""

    path: Path
    start: int


@dataclass(frozen=True, slots=True)
class Stop:
    """From here on the prompt cannot be foreseen, for example because a tool was called."""


@dataclass(frozen=True, slots=True)
class ToolRound:
    """The answer of the call before, which called tools, and their results in the order of the calls."""

    results: bool = True


Part = OneMessage | ListSlice | Stop | ToolRound
Template = tuple[Part, ...]

AFTER_TOOLS: Template = (ListSlice(("prompt",), 0), ToolRound())
"""What follows a call that called tools, as long as nothing else is known: its own prompt, its answer, the results."""

Missing = Callable[[Hashable], str]
"""A stand-in for something that is not known, by its source."""


Places = dict[str | None, list[tuple[Path, int]]]


def learn(messages: Sequence[Message], sources: Sources) -> Template:
    """The template of a prompt over the given sources."""
    return tuple(_parts(list(messages), sources))


def _parts(messages: list[Message], sources: Sources) -> Iterator[Part]:
    candidates, places = list(_candidates(sources)), _places(sources)
    position = 0
    while position < len(messages):
        found = _longest_slice(messages, position, sources, places)
        if found is not None:
            part, length = found
            yield part
            position += length
        elif sources.turn and (length := _tool_round(messages, position, sources.turn)):
            yield ToolRound()
            position += length
        elif not isinstance(messages[position].get("content"), str) or messages[position].get("tool_calls"):
            yield Stop()
            return
        else:
            yield _one_message(messages[position], candidates)
            position += 1


def _places(sources: Sources) -> Places:
    """Where in the message lists each message stands. A content that is not a text counts as any such."""
    places: Places = {}
    for path, listed in sources.lists.items():
        for start, message in enumerate(listed):
            places.setdefault(_text_of(message), []).append((path, start))
    return places


def _text_of(message: Message) -> str | None:
    content = message.get("content")
    return content if isinstance(content, str) else None


def _longest_slice(
    messages: Sequence[Message], at: int, sources: Sources, places: Places
) -> tuple[ListSlice, int] | None:
    """The longest end of a message list that stands at a place; a whole list before a part of another."""
    found = []
    for path, start in places.get(_text_of(messages[at]), ()):
        listed = sources.lists[path]
        if list(messages[at : at + len(listed) - start]) == list(listed[start:]):
            found.append((len(listed) - start, start == 0, ListSlice(path, start and start - len(listed))))
    if not found:
        return None
    length, _, part = max(found, key=lambda hit: hit[:2])
    return part, length


def _tool_round(messages: Sequence[Message], at: int, turn: Message) -> int:
    """How many messages from a place on are an answer and the results of the tools that it called; 0 if it is not."""
    ids = [call["id"] for call in turn["tool_calls"]]
    results = messages[at + 1 : at + 1 + len(ids)]
    named = {key: value for key, value in messages[at].items() if key != "name"}  # `create_agent` adds the agent's name
    return 1 + len(ids) if named == turn and [result.get("tool_call_id") for result in results] == ids else 0


def _one_message(message: Message, candidates: Sequence[tuple[str, Reference]]) -> OneMessage:
    frame = tuple((key, value) for key, value in message.items() if key != "content")
    return OneMessage(frame, tuple(_split(message["content"], candidates, MAX_PIECES)))


def _candidates(sources: Sources) -> Iterator[tuple[str, Reference]]:
    """Texts that may occur in a prompt, the most telling first: answers, then the longest."""
    answers = [(text, Reference(call)) for call, text in sources.answers.items() if text.strip()]
    texts = [(text, Reference(path)) for path, text in sources.texts.items() if len(text.strip()) >= MIN_REFERENCE]
    seen: set[str] = set()
    for text, reference in (*_longest_first(answers), *_longest_first(texts)):
        if text not in seen:
            yield text, reference
        if text.strip() not in seen and text != text.strip():
            yield text.strip(), Reference(reference.source, stripped=True)
        seen |= {text, text.strip()}


def _longest_first(candidates: Iterable[tuple[str, Reference]]) -> list[tuple[str, Reference]]:
    return sorted(candidates, key=lambda candidate: -len(candidate[0]))


def _split(text: str, candidates: Sequence[tuple[str, Reference]], budget: int) -> list[Piece]:
    """Cut a text at the first candidate that occurs in it, then each side in the same way."""
    if not text:
        return []
    for index, (value, reference) in enumerate(candidates):
        at = text.find(value)
        if at >= 0 and budget > 1:
            before = _split(text[:at], candidates[index:], budget // 2)
            after = _split(text[at + len(value) :], candidates[index:], budget // 2)
            return [*before, reference, *after]
    return [Literal(text)]


def fill(template: Template, sources: Sources, missing: Missing) -> list[Message]:
    """The prompt for these sources; `missing` stands in for what they lack, and for all that cannot be foreseen."""
    messages: list[Message] = []
    for part in template:
        if isinstance(part, OneMessage):
            content = "".join(_text(piece, sources, missing) for piece in part.content)
            messages.append({**dict(part.frame), "content": content})
        elif isinstance(part, ListSlice) and part.path in sources.lists:
            messages.extend(sources.lists[part.path][part.start :])
        elif isinstance(part, ToolRound) and sources.turn:
            messages += [sources.turn, *(_result(call, missing) for call in sources.turn["tool_calls"])]
        else:
            return [*messages, {"role": "user", "content": missing("rest")}]
    return messages


def _result(call: Mapping[str, Any], missing: Missing) -> Message:
    content = missing(ToolResult(call["id"]))
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}


def _text(piece: Piece, sources: Sources, missing: Missing) -> str:
    if isinstance(piece, Literal):
        return piece.text
    text = piece.resolve(sources)
    return missing(piece.source) if text is None else text
