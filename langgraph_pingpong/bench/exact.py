"""Compares answers with edges off and on, in both modes of `exact`, and writes down every run.

    python -m langgraph_pingpong.bench.exact --runs 100 --output docs/results/exact-cpu

A chain of two agents is run with edges off and on, alternating, over passages of real texts, each run another one;
every other pair of runs begins with empty caches, and the others find what earlier runs left. OUTPUT.jsonl gets a line
a run as it comes, with both answers of each agent, every token's log-probability and the certificates; OUTPUT.md is a
summary made from it. Where the answers to one prompt part, the line has the first token that differs, and how far
apart the two candidates' log-probabilities are: more than 0.1 may be a wrong hit in the cache. (Where logits are bf16,
one step of them is 0.125 at their usual size.)
With --more a file that is there already is gone on with, up to as many runs.
On GPUs: `--devices cuda:0,cuda:1 --model FOLDER --engine-args '{...}' --minutes 4`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from typing_extensions import TypedDict

from langgraph_pingpong.bench.common import MODES, EngineArgs, ModelName, Output, alternate, circumstances, table, told
from langgraph_pingpong.chat_model import ChatPingPong
from langgraph_pingpong.config import default_devices

NODES = ("researcher", "critic")

NEAR_TIE = 0.1
"""How far two candidates' log-probabilities may be apart for a rounding to tip the choice between them."""

LIKELIEST = 5
"""How many candidates are written down for each token."""

PASSAGE_WORDS = 90

SOURCES = ("planner.md", "writer.md", "document.md", "reference/interviews.md", "reference/risk_checklist.md")
"""Texts that passages are taken from; none is part of an agent's brief as far as it is used here."""

Line = dict[str, Any]


class _State(TypedDict, total=False):
    passage: str
    researcher: str
    critic: str


def main(  # noqa: PLR0913 - a parameter an option
    output: Output,
    runs: Annotated[int, typer.Option(min=1, help="compared runs in each mode: one with edges off and one on")] = 100,
    minutes: Annotated[
        float, typer.Option(help="begin no more runs of a mode after so long; engines' start aside")
    ] = 60,
    modes: Annotated[str, typer.Option(help="comma-separated, of bits and ids")] = "bits,ids",
    devices: Annotated[str, typer.Option(help="comma-separated; empty: what the machine has")] = "",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=4, help="of each answer")] = 32,
    brief_tokens: Annotated[int, typer.Option(help="of each agent's brief")] = 220,
    max_model_len: Annotated[int, typer.Option(help="in tokens; 0: the model's own")] = 2048,
    model: ModelName = "",
    engine_args: EngineArgs = "{}",
    more: Annotated[bool, typer.Option("--more", help="go on with OUTPUT.jsonl")] = False,
) -> None:
    """Compare answers with edges off and on, in both modes of `exact`, and write down every run."""
    names = devices.split(",") if devices else list(default_devices())
    settings = {"dtype": dtype, "model": model or "SmolLM2-135M-Instruct", "engine_args": engine_args}
    lengths = {"max_tokens": max_tokens, "brief_tokens": brief_tokens}
    output.parent.mkdir(parents=True, exist_ok=True)
    engines = {
        "devices": names,
        "dtype": dtype,
        "model": model or None,
        "max_model_len": max_model_len or None,
        "engine_args": json.loads(engine_args),
    }
    path = output.with_suffix(".jsonl")
    lines = _read(path) if more else []
    with path.open("a" if more else "w", encoding="utf-8") as file:
        _write({"setup": circumstances("exact", names, **settings, **lengths)}, lines, file)
        for exact in modes.split(","):
            have = sum(line.get("exact") == exact for line in lines)
            with ChatPingPong(**{**engines, "exact": exact}, temperature=0.0, max_tokens=max_tokens) as chat_model:
                for line in _compared(chat_model, range(have, runs), minutes, brief_tokens):
                    _write({"exact": exact, **line}, lines, file)
    output.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


def _read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(line: Line, lines: list[Line], file: TextIO) -> None:
    lines.append(line)
    print(json.dumps(line, ensure_ascii=False), file=file, flush=True)


def _compared(model: ChatPingPong, numbers: range, minutes: float, brief_tokens: int) -> Iterator[Line]:
    graphs = {mode: _chain(model.model_copy(update={"overlap": mode}), brief_tokens) for mode in MODES}
    began = time.monotonic()
    for number in numbers:
        if time.monotonic() - began > minutes * 60:
            return
        yield {"run": number, **_run_pair(model, graphs, number)}


def _run_pair(model: ChatPingPong, graphs: dict[str, Any], number: int) -> Line:
    pair: Line = {}
    cold = number % 4 < 2
    for mode in alternate(number):
        if cold:
            model.reset_prefix_cache()
        pair[mode] = _run(model, graphs[mode], passage(number))
    answers = zip(NODES, pair["off"]["answers"], pair["on"]["answers"], strict=True)
    compared = [compare(node, off, on) for node, off, on in answers]
    for answer in (answer for mode in MODES for answer in pair[mode]["answers"]):
        answer["logprobs"] = [each["logprob"] for each in answer.pop("tokens")]
    return {"cache": "cold" if cold else "warm", "compared": compared, **pair}


def _chain(model: ChatPingPong, brief_tokens: int) -> Any:
    from langchain_core.prompts import ChatPromptTemplate
    from langgraph.graph import END, START, StateGraph

    from graphs.briefs import brief
    from langgraph_pingpong import agent_node

    told = model.bind(logprobs=True, top_logprobs=LIKELIEST)
    builder = StateGraph(_State)
    reads = dict(zip(NODES, ("passage", NODES[0]), strict=True))
    for node in NODES:
        prompt = ChatPromptTemplate.from_messages(
            [("system", "{brief}"), ("human", f"Text:\n{{{reads[node]}}}\n\nWhat does the {node} say of it?")]
        ).partial(brief=brief(node, brief_tokens, model.get_num_tokens))
        builder.add_node(node, agent_node(told, prompt=prompt, writes=node))
    for source, target in zip((START, *NODES), (*NODES, END), strict=True):
        builder.add_edge(source, target)
    return builder.compile()


def passage(number: int) -> str:
    """Some sentences' worth of words of a real text; each number gives another one."""
    from graphs.briefs import read_text

    words = read_text(SOURCES[number % len(SOURCES)]).split()
    start = number // len(SOURCES) * 47 % (len(words) - PASSAGE_WORDS)
    return " ".join(words[start : start + PASSAGE_WORDS])


class _Answers(BaseCallbackHandler):
    """Writes down each answer's text, and its tokens with their log-probabilities."""

    def __init__(self) -> None:
        self.said: list[Line] = []

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        generation = response.generations[0][0]
        assert isinstance(generation, ChatGeneration)
        tokens = generation.message.response_metadata["logprobs"]["content"]
        said = [
            {
                "token": each["token"],
                "logprob": each["logprob"],
                "top": {other["token"]: other["logprob"] for other in each["top_logprobs"]},
            }
            for each in tokens
        ]
        self.said.append({"text": generation.text, "tokens": said})


def _run(model: ChatPingPong, graph: Any, text: str) -> Line:
    heard, events = _Answers(), []  # type: ignore[var-annotated]
    with model.trace.subscribed(events.append):
        started = time.monotonic()
        graph.invoke({"passage": text}, {"callbacks": [heard]})
        e2e_ms = (time.monotonic() - started) * 1000
    prompts = [event.data["prompt_sha256"] for event in events if event.name == "generate.started"]
    certificates = [event.data["certificate"] for event in events if event.name == "finish"]
    answers = [{**said, "prompt": prompt} for said, prompt in zip(heard.said, prompts, strict=True)]
    return {"e2e_ms": e2e_ms, "answers": answers, "certificates": certificates}


def compare(node: str, off: Line, on: Line) -> Line:
    """Two answers of a node: equal where? Only answers to one prompt can be compared."""
    if off["prompt"] != on["prompt"]:
        return {"node": node, "prompts_equal": False}
    tokens = [[each["token"] for each in answer["tokens"]] for answer in (off, on)]
    line = {
        "node": node,
        "prompts_equal": True,
        "texts_equal": off["text"] == on["text"],
        "tokens_equal": tokens[0] == tokens[1],
        "logprobs_equal": off["tokens"] == on["tokens"],
    }
    if tokens[0] != tokens[1]:
        line["parted"] = _parting(off["tokens"], on["tokens"])
    return line


def _parting(off: Sequence[Line], on: Sequence[Line]) -> Line:
    """Where two answers part: the candidates there, and how far apart their log-probabilities are at most.

    None, a wrong hit, where one of them is not even among the likeliest of the other answer, or one just ends.
    """
    pairs = zip(off, on, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a["token"] != b["token"]), min(len(off), len(on)))
    if at == min(len(off), len(on)):
        return {"at": at, "gap": None}
    pair = (off[at]["token"], on[at]["token"])
    tables = [{**answer[at]["top"], answer[at]["token"]: answer[at]["logprob"]} for answer in (off, on)]
    known = all(token in scores for scores in tables for token in pair)
    gap = max(abs(scores[pair[0]] - scores[pair[1]]) for scores in tables) if known else None
    return {"at": at, "off": pair[0], "on": pair[1], "gap": gap}


def summary(lines: Sequence[Line]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setups = [line["setup"] for line in lines if "setup" in line]
    setup, runs = setups[0], [line for line in lines if "run" in line]
    modes = list(dict.fromkeys(run["exact"] for run in runs))
    head = ["exact", "compared runs", "prompts as rendered", "runs with equal texts", "answers to equal prompts"]
    head += ["equal token by token", "log-probabilities equal to the bit", "parted within 0.1", "by more"]
    parts = [
        "# Answers with edges off and on",
        *map(told, setups),
        f"Two agents, briefs of {setup['brief_tokens']} tokens, answers of {setup['max_tokens']}. Half of the compared "
        "runs begin with empty caches, the others with what earlier runs left.",
        table(head, [_row(mode, [run for run in runs if run["exact"] == mode]) for mode in modes]),
    ]
    return "\n\n".join(parts) + "\n"


def _row(mode: str, runs: Sequence[Line]) -> list[str]:
    compared = [each for run in runs for each in run["compared"] if each["prompts_equal"]]
    gaps = [each["parted"]["gap"] for each in compared if "parted" in each]
    near = [gap for gap in gaps if gap is not None and gap <= NEAR_TIE]
    certificates = [each for run in runs for overlap in MODES for each in run[overlap]["certificates"]]
    return [
        mode,
        str(len(runs)),
        f"{sum(each['ids_equal'] for each in certificates)} of {len(certificates)}",
        str(sum(all(each.get("texts_equal") for each in run["compared"]) for run in runs)),
        str(len(compared)),
        str(sum(each["tokens_equal"] for each in compared)),
        str(sum(each["logprobs_equal"] for each in compared)),
        str(len(near)),
        str(len(gaps) - len(near)),
    ]


if __name__ == "__main__":
    typer.run(main)
