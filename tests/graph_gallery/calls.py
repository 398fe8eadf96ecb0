"""Ways to call the model within a node: twice, in chunks, several at once, from threads, with retries."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.runnables import RunnableLambda

from langgraph_pingpong import ChatPingPong
from tests.graph_gallery.chains import chain
from tests.graph_gallery.scene import ASYNC_WAYS, Scene, Texts, ask, scenario, tasks


@scenario("writer (2 calls) -> critic (2 calls)")
def several_calls_in_a_node(model: ChatPingPong) -> Scene:
    """Nodes that call the model twice, the second time with the first answer."""
    effects: list[str] = []

    def twice(role: str, reads: str, writes: str) -> Any:
        def node(state: Texts) -> dict[str, str]:
            effects.append(role)
            first = model.invoke(ask(role, state[reads])).text
            return {writes: model.invoke(ask(f"second {role}", f"{state[reads]}\n{first}")).text}

        return node

    nodes = ("writer", twice("writer", "task", "draft")), ("critic", twice("critic", "draft", "notes"))
    return Scene(chain(*nodes), tasks(), effects)


@scenario("writer (stream) -> critic (stream)")
def stream_inside_nodes(model: ChatPingPong) -> Scene:
    """Nodes that read the answer chunk by chunk."""

    def writer(state: Texts) -> Texts:
        return {"draft": "".join(chunk.text for chunk in model.stream(ask("writer", state["task"])))}

    def critic(state: Texts) -> Texts:
        whole = None
        for chunk in model.stream(ask("critic", state["draft"])):
            whole = chunk if whole is None else whole + chunk
        return {"notes": whole.text if whole else ""}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks())


@scenario("writer (astream) -> critic (astream, stops early)")
def astream_inside_nodes(model: ChatPingPong) -> Scene:
    """Nodes that read the answer with `async for`; the second one has enough after five chunks."""

    async def writer(state: Texts) -> Texts:
        return {"draft": "".join([chunk.text async for chunk in model.astream(ask("writer", state["task"]))])}

    async def critic(state: Texts) -> Texts:
        read: list[str] = []
        stream = model.astream(ask("critic", state["draft"]))
        async for chunk in stream:
            read.append(chunk.text)
            if len(read) == 5:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return {"notes": "".join(read)}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), ways=ASYNC_WAYS)


@scenario("writer (stop) -> critic (max_tokens) -> editor (seed)")
def bound_settings(model: ChatPingPong) -> Scene:
    """`bind` and call arguments: a stop text, a limit, a seed."""
    short = model.bind(max_tokens=12)

    def writer(state: Texts) -> Texts:
        return {"draft": model.invoke(ask("writer", state["task"]), stop=["m", "ta"]).text}

    def critic(state: Texts) -> Texts:
        return {"notes": short.invoke(ask("critic", state["draft"])).text}

    def editor(state: Texts) -> Texts:
        return {"final": model.invoke(ask("editor", state["notes"]), temperature=0.0, seed=7).text}

    return Scene(chain(("writer", writer), ("critic", critic), ("editor", editor)), tasks())


@scenario("writer (2 prompts at once) -> critic", parallel=True)
def model_batch_in_a_node(model: ChatPingPong) -> Scene:
    """`model.batch` within a node."""
    effects: list[str] = []

    def writer(state: Texts) -> Texts:
        effects.append("writer")
        first, second = model.batch([ask("writer", state["task"]), ask("second writer", state["task"])])
        return {"draft": f"{first.text}\n{second.text}"}

    def critic(state: Texts) -> Texts:
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), effects)


@scenario("writer (2 awaits at once) -> critic", parallel=True)
def gather_in_a_node(model: ChatPingPong) -> Scene:
    """`asyncio.gather` over two calls within a node, and `abatch` in the next."""

    async def writer(state: Texts) -> Texts:
        calls = [model.ainvoke(ask(role, state["task"])) for role in ("writer", "second writer")]
        return {"draft": "\n".join(answer.text for answer in await asyncio.gather(*calls))}

    async def critic(state: Texts) -> Texts:
        answers = await model.abatch([ask("critic", state["draft"]), ask("second critic", state["draft"])])
        return {"notes": " / ".join(answer.text for answer in answers)}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks(), ways=ASYNC_WAYS)


@scenario("writer (own thread pool) -> critic", parallel=True)
def own_threads_in_a_node(model: ChatPingPong) -> Scene:
    """A node that calls the model from threads of its own, where LangGraph's context is lost."""

    def writer(state: Texts) -> Texts:
        prompts = [ask(role, state["task"]) for role in ("writer", "second writer")]
        with ThreadPoolExecutor(2) as threads:
            return {"draft": "\n".join(answer.text for answer in threads.map(model.invoke, prompts))}

    def critic(state: Texts) -> Texts:
        return {"notes": model.invoke(ask("critic", state["draft"])).text}

    return Scene(chain(("writer", writer), ("critic", critic)), tasks())


@scenario("writer (with_retry) -> critic (with_fallbacks) -> editor (retried parser)", pure=False)
def retries_and_fallbacks(model: ChatPingPong) -> Scene:
    """`with_retry`, `with_fallbacks` and a sequence whose parser fails the first time."""
    effects: list[str] = []
    tries: list[int] = []

    def parse(message: Any) -> str:
        tries.append(1)
        effects.append("parse")
        if len(tries) % 2:
            raise ValueError("not this time")
        return str(message.text)

    steady = model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    spare = RunnableLambda(parse).with_fallbacks([RunnableLambda(lambda message: message.text)])
    again = (model | RunnableLambda(parse)).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    critic = model.with_fallbacks([model]) | spare

    def writer(state: Texts) -> Texts:
        return {"draft": steady.invoke(ask("writer", state["task"])).text}

    def judge(state: Texts) -> Texts:
        return {"notes": critic.invoke(ask("critic", state["draft"]))}

    def editor(state: Texts) -> Texts:
        del tries[:]
        return {"final": again.invoke(ask("editor", state["notes"]))}

    return Scene(chain(("writer", writer), ("critic", judge), ("editor", editor)), tasks(), effects)
