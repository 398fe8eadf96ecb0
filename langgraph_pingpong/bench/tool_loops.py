"""How long an agent's model takes to its first token after a tool has returned, with edges off and on.

    python -m langgraph_pingpong.bench.tool_loops --output docs/results/tool-loops-cpu

`create_agent` calls one tool, by a grammar, reads its result, and answers. Tools wait, and return a text of that many
tokens: all of it at their end ("at its end"), or piece by piece while they wait ("streams"). In "new prompt" a graph of
a node that calls the tool, a `ToolNode`, and a node of another prompt: a document of that many tokens stands before
the conversation, and the tool returns one sentence. Each run has another text, so that nothing of it is cached; what
stands before it in an agent's prompt is, from the call before. Runs with edges off and on alternate, each mode with a
cache of its own. Time counts from the moment the tool's function returns.

How much is hidden depends on how much a device prefills while the tool runs. On CPU cores that is little; a model of
fewer layers stands for a faster device: `--engine-args '{"load_format": "dummy", "hf_overrides": {"num_hidden_layers":
4}}'`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

import typer
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langgraph_pingpong.bench.common import (
    MODES,
    EngineArgs,
    ModelName,
    Output,
    alternate,
    circumstances,
    table,
    told,
    write_lines,
)
from langgraph_pingpong.bench.texts import Library
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import default_devices
from langgraph_pingpong.edges import streaming_tool
from langgraph_pingpong.serving import engine_pool
from langgraph_pingpong.trace import Event

Line = dict[str, Any]
KINDS = ("at its end", "streams", "new prompt")
PIECES = 15
_CALL, _ANSWER = {"max_tokens": 64}, {"max_tokens": 8}


class _CallFirst(AgentMiddleware[Any, Any]):
    """Lets a small model call the tool, by its name, and then answer."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(request.messages[-1], ToolMessage):
            return handler(request.override(model_settings=_ANSWER))
        return handler(request.override(tool_choice="look_up", model_settings=_CALL))


class _Asked(MessagesState):
    document: str


@dataclass
class Scene:
    """One kind of tool: its graph, and when the tool returned last.

    The tool takes `seconds`; its result, or the document, has so many `tokens`, and the agent's own brief `brief`.
    """

    model: ChatPingPong
    library: Library
    kind: str
    seconds: float
    tokens: int
    brief: int = 500
    text: str = ""
    returned: float = 0.0

    def __post_init__(self) -> None:
        self._graph = self._two_nodes() if self.kind == "new prompt" else self._agent()

    def run(self, number: int, tenant: str) -> str:
        """Run the graph on the text of that number; returns what it answered."""
        self.text = self.library.text("Found", self.tokens, self.kind, self.seconds, number)
        inputs: Line = {
            "messages": [HumanMessage(f"Look up how low the tide is, and tell me. This is question {number}.")]
        }
        if self.kind == "new prompt":
            inputs["document"] = self.text
        return str(self._graph.invoke(inputs, {"configurable": {"tenant": tenant}})["messages"][-1].text)

    def _agent(self) -> Any:
        brief = self.library.text("Your task", self.brief)
        return create_agent(self.model, [self._tool()], system_prompt=brief, middleware=[_CallFirst()])

    def _two_nodes(self) -> Any:
        model, look_up = self.model, self._tool()
        caller = model.bind_tools([look_up], tool_choice="look_up").bind(**_CALL)

        def ask(state: _Asked) -> Any:
            return {"messages": [caller.invoke(state["messages"])]}

        def answer(state: _Asked) -> Any:
            document = [("system", f"Answer with what is in here.\n{state['document']}"), *state["messages"]]
            return {"messages": [model.bind_tools([look_up]).bind(**_ANSWER).invoke(document)]}

        builder = StateGraph(_Asked).add_node("ask", ask).add_node("tools", ToolNode([look_up]))
        builder.add_node("answer", answer)
        builder.add_edge(START, "ask").add_edge("ask", "tools").add_edge("tools", "answer")
        return builder.compile()

    def _tool(self) -> Any:
        @tool
        def look_up(place: Literal["Oslo", "Lima"]) -> str:
            """Look up how low the tide is at a place."""
            time.sleep(self.seconds)
            return self._return(f"At {place} it is low." if self.kind == "new prompt" else self.text)

        @tool("look_up")
        @streaming_tool
        def look_up_piecewise(place: Literal["Oslo", "Lima"]) -> Iterator[str]:
            """Look up how low the tide is at a place."""
            size = -(-len(self.text) // PIECES)
            for start in range(0, len(self.text), size):
                time.sleep(self.seconds / PIECES)
                yield self.text[start : start + size]
            self._return("")

        return look_up_piecewise if self.kind == "streams" else look_up

    def _return(self, text: str) -> str:
        self.returned = time.monotonic()
        return text


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    cells: Annotated[
        str, typer.Option(help="kind:seconds that the tool takes, comma-separated")
    ] = "streams:1,new prompt:1,streams:3,at its end:1",
    tokens: Annotated[int, typer.Option(min=64, help="of a result, or of a document")] = 1500,
    brief: Annotated[int, typer.Option(min=16, help="tokens of the agent's own, before the conversation")] = 500,
    runs: Annotated[int, typer.Option(min=1, help="of each cell and mode, beside one to warm up")] = 3,
    devices: Annotated[str, typer.Option(help="comma-separated; empty: the machine's")] = "",
    dtype: Annotated[str, typer.Option()] = "float32",
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
) -> None:
    """Time the first token after a tool, with edges off and on."""
    places = devices.split(",") if devices else default_devices()
    named = {"model": model or "SmolLM2-135M-Instruct", "dtype": dtype, "engine_args": engine_args}
    lines: list[Line] = [{"setup": circumstances("tool_loops", places, **named, tokens=tokens, brief=brief)}]
    with engine_pool(model or None, devices=places, dtype=dtype, engine_args=json.loads(engine_args)) as pool:
        plain = ChatPingPong(model=model or None, pool=pool, temperature=0.0)
        chat = {mode: plain.model_copy(update={"overlap": mode}) for mode in MODES}
        library = Library(lambda text: len(chat["off"].get_token_ids(text)), seed=7)
        for kind, _, seconds in (cell.partition(":") for cell in cells.split(",")):
            scenes = {mode: Scene(chat[mode], library, kind, float(seconds), tokens, brief) for mode in MODES}
            for number in range(-1, runs):
                pair = {mode: timed(chat[mode], scenes[mode], number, mode) for mode in alternate(number)}
                if number >= 0:
                    lines.append({"kind": kind, "seconds": float(seconds), "run": number, **pair})
                    write_lines(output.with_suffix(".jsonl"), lines)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


def timed(model: ChatPingPong, scene: Scene, number: int, mode: str) -> Line:
    """One run: what it answered, and what happened after the tool."""
    events: list[Event] = []
    with model.trace.subscribed(events.append):
        started = time.monotonic()
        answer = scene.run(number, mode)
        total = time.monotonic() - started
    first = [event for event in events if event.name == "first_token"][-1]
    return {
        "answer": answer,
        "prompts": [event.data["prompt_sha256"] for event in events if event.name == "generate.started"],
        "first_ms": (first.t - scene.returned) * 1000,
        "total_ms": total * 1000,
        "certificate": [event for event in events if event.name == "finish"][-1].data["certificate"],
    }


def summary(lines: Sequence[Line]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, runs = lines[0]["setup"], lines[1:]
    rows = []
    for kind, seconds in dict.fromkeys((run["kind"], run["seconds"]) for run in runs):
        cell = [run for run in runs if (run["kind"], run["seconds"]) == (kind, seconds)]
        off, on = (median(run[mode]["first_ms"] for run in cell) for mode in ("off", "on"))
        turns = (median(run[mode]["total_ms"] for run in cell) for mode in ("off", "on"))
        certificates = [run["on"]["certificate"] for run in cell]
        ahead = median(each["static"] + each["streamed"] for each in certificates)
        wasted = sum(each["wasted"] for each in certificates)
        alike = sum(all(run["off"][what] == run["on"][what] for what in ("answer", "prompts")) for run in cell)
        rows.append(
            [
                kind,
                f"{seconds:g}",
                *(f"{ms:.0f}" for ms in (off, on)),
                f"{on / off:.2f}",
                *(f"{ms:.0f}" for ms in turns),
                f"{ahead:.0f} of {median(each['prompt_tokens'] for each in certificates):.0f}",
                str(wasted),
                f"{alike} of {len(cell)}",
            ]
        )
    head = ["result", "tool s", "TTFT off ms", "on", "on / off", "turn off ms", "on", "prefilled", "wasted", "equal"]
    explained = (
        f"TTFT counts from the tool's return; medians. Results have {setup['tokens']} tokens, briefs {setup['brief']}. "
        "`prefilled` is what the edge had computed, or found cached, of the prompt when its call came. `equal`: runs "
        "whose answers, and the ids of both prompts, are those of edges off."
    )
    parts = ["# The first token after a tool", told(setup), explained, table(head, rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    typer.run(main)
