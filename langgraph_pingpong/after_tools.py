"""From the tools that an answer called to what the session does about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from langchain_core.messages import AIMessage, convert_to_openai_messages

from langgraph_pingpong.answers import calling_message
from langgraph_pingpong.edges import RunningTask
from langgraph_pingpong.edges.langgraph_streams import watch_stream
from langgraph_pingpong.edges.tool_results import listen, wrote
from langgraph_pingpong.engines.base import Said
from langgraph_pingpong.planning import PlannedCall
from langgraph_pingpong.tokens import Message
from langgraph_pingpong.tool_round import AwaitedTools


class AfterTools:
    """What is to be waited for after a call of a graph: told its answer first, asked then."""

    def __init__(self, task: RunningTask | None, planned: PlannedCall | None) -> None:
        self._owner = task.owner if task else None
        self._watch: Callable[[], None] | None = partial(watch_stream, task, wrote) if task and planned else None
        self._planned = planned
        self._message: AIMessage | None = None

    def end(self, said: Sequence[Said]) -> str:
        """The answer is complete; returns its text."""
        text = "".join(each.content for each in said)
        turn = self._prepare(said)
        if self._planned is not None:  # before the node goes on: its next call draws on this answer
            self._planned.end(text, turn)
        return text

    def _prepare(self, said: Sequence[Said]) -> Message | None:
        """Get ready for the results of the tools that were called; returns the answer as the next prompt holds it."""
        watch, self._watch = self._watch, None  # nothing of the task is kept
        try:
            self._message = calling_message(said) if self._owner is not None else None
            if self._message is None:
                return None
            if watch is not None:
                watch()
            return cast("Message", convert_to_openai_messages(self._message))
        except Exception:  # noqa: BLE001 - what follows tools is a hint: the answer stands without
            self._message = None
            return None

    def __call__(self) -> AwaitedTools | None:
        """The tools that the answer called; None if it called none."""
        if self._message is None:
            return None
        calls = self._message.tool_calls
        names = {call["id"] or "": call["name"] for call in calls}
        plan = self._planned.plan_after_tools if self._planned else None
        return AwaitedTools(names, partial(listen, self._owner, calls), plan)
