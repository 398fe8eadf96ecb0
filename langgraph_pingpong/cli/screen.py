"""Shows what agents say while they say it: live on a terminal, agent after agent where output is a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from langgraph_pingpong.trace import Event

_TAIL_LINES = 6
_TAIL_CHARACTERS = 2000


@dataclass
class Answer:
    """What one agent has said so far."""

    node: str
    device: str
    since: float = field(default_factory=time.monotonic)
    text: str = ""
    complete: bool = False
    certificate: dict[str, Any] | None = None
    """What the trace says of it; other models than ours give none."""

    def progress(self, count_tokens: Callable[[str], int]) -> str:
        """Where it speaks, how much it has said and how fast, since its first token."""
        tokens, seconds = count_tokens(self.text), time.monotonic() - self.since
        rate = f"{tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        return _dotted(self.device, f"{tokens} tokens", f"{seconds:.1f} s", rate)

    def summary(self) -> str:
        """The same once it is complete, as measured."""
        if self.certificate is None:
            return _dotted(self.device, "" if self.complete else "not complete")
        tokens, ttft_ms = self.certificate["output_tokens"], self.certificate["ttft_ms"]
        seconds = (self.certificate["total_ms"] - ttft_ms) / 1000
        rate = f"{(tokens - 1) / seconds:.0f} tokens/s" if tokens > 1 and seconds > 0 else ""
        return _dotted(self.device, f"first token after {ttft_ms:,.0f} ms", f"{tokens} tokens", rate)


def _dotted(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


class Screen:
    """Shows one run. Subscribe it to the trace, and give it every message of the graph's stream."""

    def __init__(self, console: Console, count_tokens: Callable[[str], int]) -> None:
        self._console = console
        self._count_tokens = count_tokens
        self._answers: dict[str | None, Answer] = {}
        self._devices: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        # Transient: what stays on the screen is printed above it, complete, when an agent has finished.
        self._live = Live(get_renderable=self._draw, console=console, transient=True, refresh_per_second=8)

    @property
    def answers(self) -> list[tuple[str, str]]:
        """Node and text of each answer, in the order in which they began."""
        return [(answer.node, answer.text) for answer in self._answers.values()]

    def __call__(self, event: Event) -> None:
        """Take note of an event; called in the engines' thread, so nothing is printed here."""
        if event.name == "generate.started":
            self._devices[event.node] = event.device
            self._waiting[event.node] = f"{event.device} · reads {event.data['prompt_tokens']:,} tokens"
        elif event.name == "append.complete":
            self._waiting[event.node] = f"{event.device} · {event.data['tokens']:,} tokens prefilled ahead"
        elif event.name in ("first_token", "append.failed", "edge.dropped"):
            self._waiting.pop(event.node, None)

    def hear(self, node: str, message: BaseMessage) -> None:
        """Take a message of a node: a piece of an answer, a whole one, or something else, which is not shown."""
        from langchain_core.messages import AIMessage  # takes a second to import, which --help need not wait

        if not isinstance(message, AIMessage):
            return
        answer = self._answers.get(message.id)
        if answer is None:
            answer = self._answers[message.id] = Answer(node, self._devices.get(node, ""))
        if answer.complete:
            return
        answer.text += message.text
        answer.complete = getattr(message, "chunk_position", "last") == "last"
        answer.certificate = message.response_metadata.get("pingpong")
        if answer.complete:
            self._print(answer)

    def _print(self, answer: Answer) -> None:
        if self._live.is_started:
            self._live.refresh()  # takes the answer out of the live part before it is printed above it
        title = Text.assemble((answer.node, "bold cyan"), (f" · {answer.summary()}", "dim"))
        # A terminal wraps at words; a file gets the text as it is.
        wrap = self._console.is_terminal
        self._console.print(Group(title, Text(answer.text.strip()), Text()), soft_wrap=not wrap)

    def _draw(self) -> Group:
        lines: list[Text] = []
        for answer in list(self._answers.values()):
            if not answer.complete:
                lines += [self._line(answer.node, answer.progress(self._count_tokens)), *self._tail(answer.text)]
        return Group(*lines, *(self._line(*waiting) for waiting in list(self._waiting.items())))

    def _line(self, node: str, doing: str) -> Text:
        return Text.assemble((node, "cyan"), (f" · {doing}", "dim"), overflow="ellipsis", no_wrap=True)

    def _tail(self, text: str) -> list[Text]:
        lines = Text(text[-_TAIL_CHARACTERS:].strip()).wrap(self._console, self._console.width)
        return list(lines)[-_TAIL_LINES:]

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for answer in self._answers.values():
            if not answer.complete:
                self._print(answer)
