"""Compares what an engine computes with CUDA graphs of several kinds with what it computes without any.

    python scripts/compare_graphs.py OUT [--modes FULL,FULL_AND_PIECEWISE] [--model FOLDER]

Prompts from real texts are answered greedily: cold, with all but the last tokens cached, and several at once. OUT.jsonl
gets a line for each prompt and kind of graphs: by how much the log-probabilities of the likeliest tokens differ from
those without graphs (of the first token, and at most up to where the answers part), where the answers part, and how far
apart the two candidates are there. In bf16 a logit of the usual size has steps of 0.125: a few of them are rounding.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from langgraph_pingpong.bench.common import circumstances, table, told, write_lines
from langgraph_pingpong.bench.kit import command
from langgraph_pingpong.default_model import default_model_path

TEXTS = ("planner.md", "writer.md", "document.md", "reference/interviews.md", "reference/risk_checklist.md")
LENGTHS, LEFT, AT_ONCE = (40, 100, 200, 300, 450, 600, 900), (4, 20, 36, 100, 260), (60, 150, 400)
ANSWER, LIKELIEST = 12, 5
CACHE_BYTES = 2 << 30
NONE = "none"
ABSENT = 9.9
"""Stands for the difference where no candidate is the same."""

Step = tuple[int, Mapping[int, float]]
"""The token that was taken, and the log-probabilities of the likeliest."""

Line = dict[str, Any]


def main(
    out: Path,
    modes: Annotated[str, typer.Option(help="vLLM's, comma-separated")] = "FULL,FULL_AND_PIECEWISE",
    model: Annotated[str, typer.Option(help="a folder or Hugging Face id; empty: the default model")] = "",
) -> None:
    """Answer everything without graphs and with graphs of each kind, and compare."""
    path = model or str(default_model_path())
    lines: list[Line] = [
        {
            "setup": circumstances(
                "graphs",
                ["cuda:0"],
                model=model or "SmolLM2-135M-Instruct",
                dtype="bfloat16",
                engine_args={},
                command=command(),
            )
        }
    ]
    base = _in_a_process(path, NONE)
    for mode in modes.split(","):
        answers = _in_a_process(path, mode)
        lines += [{"graphs": mode, "case": case, **compare(steps, answers[case])} for case, steps in base.items()]
        write_lines(out.with_suffix(".jsonl"), lines)
    out.with_suffix(".md").write_text(summary(lines), encoding="utf-8")


def _in_a_process(model: str, mode: str) -> dict[str, list[Step]]:
    """The answers; the engine's memory is free again then."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_answers, (model, mode))


def _answers(model: str, mode: str) -> dict[str, list[Step]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    from graphs.briefs import read_text

    graphs: dict[str, Any] = {"enforce_eager": True}
    if mode != NONE:
        graphs = {"compilation_config": {"cudagraph_mode": mode}}
    memory = {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.05}
    llm = LLM(model=model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=True, **memory, **graphs)
    texts = [llm.get_tokenizer().encode(read_text(name)) for name in TEXTS]

    def ask(*prompts: Sequence[int], tokens: int = ANSWER) -> list[list[Step]]:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=LIKELIEST, ignore_eos=True)
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return [_steps(each.outputs[0]) for each in llm.generate(asked, sampling, use_tqdm=False)]

    found = {}
    for case, cached, prompts in _cases(texts):
        llm.reset_prefix_cache()
        if cached:
            ask(prompts[0][:cached], tokens=1)
        for number, answer in enumerate(ask(*prompts)):
            found[f"{case}, prompt {number}" if len(prompts) > 1 else case] = answer
    return found


def _steps(output: Any) -> list[Step]:
    """From what vLLM gives."""
    known = [{token: logprob.logprob for token, logprob in step.items()} for step in output.logprobs]
    return list(zip(output.token_ids, known, strict=True))


def _cases(texts: Sequence[Sequence[int]]) -> Iterator[tuple[str, int, list[Sequence[int]]]]:
    """Names, how many tokens of the prompt are computed before, and the prompts that are sent at once."""
    for number, ids in enumerate(texts):
        for length in (length for length in LENGTHS if length <= len(ids)):
            yield f"cold: text {number}, {length} tokens", 0, [ids[:length]]
            for left in (left for left in LEFT if left + 16 < length):
                yield f"all but {left} cached: text {number}, {length} tokens", length - left, [ids[:length]]
    for length in AT_ONCE:
        yield f"at once: {length} tokens", 0, [ids[: length + 7 * number] for number, ids in enumerate(texts)]


def compare(base: Sequence[Step], other: Sequence[Step]) -> Line:
    """By how much two answers to one prompt differ."""
    differences = []
    for place, ((token, known), (taken, also)) in enumerate(zip(base, other, strict=True)):
        common = known.keys() & also.keys()
        differences.append(max((abs(known[each] - also[each]) for each in common), default=ABSENT))
        if token != taken:
            gap = known[token] - known[taken] if taken in known else None
            return {"first": differences[0], "most": max(differences), "parted": place, "gap": gap}
    return {"first": differences[0], "most": max(differences), "parted": None, "gap": None}


def summary(lines: Sequence[Line]) -> str:
    """The results as Markdown, from the lines of the JSON file."""
    setup, cases = lines[0]["setup"], lines[1:]
    groups = dict.fromkeys((line["graphs"], line["case"].partition(":")[0]) for line in cases)
    rows = []
    for graphs, kind in groups:
        group = [line for line in cases if (line["graphs"], line["case"].partition(":")[0]) == (graphs, kind)]
        parted = [line["gap"] for line in group if line["parted"] is not None]
        wide = sum(gap is None or gap > 0.25 for gap in parted)
        most = [f"{max(line[name] for line in group):.2f}" for name in ("first", "most")]
        rows.append([graphs, kind, str(len(group)), *most, str(len(parted)), str(wide)])
    heads = ["graphs", "prompts", "number", "first token, most apart", "any token", "parted", "by more than 0.25"]
    return "\n\n".join(["# CUDA graphs and what they compute", told(setup), table(heads, rows)]) + "\n"


if __name__ == "__main__":
    typer.run(main)
