"""The functional API: entrypoints and tasks."""

from __future__ import annotations

import asyncio
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from langgraph_pingpong import ChatPingPong
from tests.graph_gallery.scene import ASYNC_WAYS, TASKS, Doing, Scene, Texts, ask, scenario, tasks


def speaking(model: ChatPingPong, role: str, effects: list[str]) -> Any:
    """A task that asks the model."""

    @task(name=role)
    def speak(text: str) -> str:
        effects.append(role)
        return model.invoke(ask(role, text)).text

    return speak


@scenario("entrypoint: writer -> critic -> editor")
def tasks_in_sequence(model: ChatPingPong) -> Scene:
    """An entrypoint that waits for one task after the other."""
    effects: list[str] = []
    writer, critic, editor = (speaking(model, role, effects) for role in ("writer", "critic", "editor"))

    @entrypoint()
    def workflow(text: str) -> dict[str, str]:
        draft = writer(text).result()
        notes = critic(draft).result()
        return {"draft": draft, "final": editor(f"{draft}\n{notes}").result()}

    return Scene(workflow, TASKS, effects)


@scenario("entrypoint: writer -> critic, clerk, poet -> editor", parallel=True)
def tasks_at_the_same_time(model: ChatPingPong) -> Scene:
    """An entrypoint that starts three tasks and then waits."""
    effects: list[str] = []
    writer, editor = (speaking(model, role, effects) for role in ("writer", "editor"))
    readers = [speaking(model, role, effects) for role in ("critic", "clerk", "poet")]

    @entrypoint()
    def workflow(text: str) -> str:
        draft = writer(text).result()
        return str(editor("\n".join(future.result() for future in [read(draft) for read in readers])).result())

    return Scene(workflow, TASKS, effects)


@scenario("entrypoint: writer -> critic, clerk (gather) -> call", parallel=True)
def async_tasks(model: ChatPingPong) -> Scene:
    """Async tasks, gathered; the entrypoint itself calls the model at the end."""
    effects: list[str] = []

    @task
    async def speak(role: str, text: str) -> str:
        effects.append(role)
        return (await model.ainvoke(ask(role, text))).text

    @entrypoint()
    async def workflow(text: str) -> str:
        draft = await speak("writer", text)
        notes = await asyncio.gather(speak("critic", draft), speak("clerk", draft))
        return (await model.ainvoke(ask("editor", "\n".join(notes)))).text

    return Scene(workflow, TASKS, effects, ways=ASYNC_WAYS)


@scenario("entrypoint: writer, with what it returned last time")
def entrypoint_with_memory(model: ChatPingPong) -> Scene:
    """`previous` and `entrypoint.final`: three turns on one thread."""
    effects: list[str] = []
    writer = speaking(model, "writer", effects)

    @entrypoint(checkpointer=InMemorySaver())
    def workflow(text: str, *, previous: Any = None) -> Any:
        draft = writer(f"{previous or 'nothing yet'}\n{text}").result()
        return entrypoint.final(value=draft, save=f"{previous or ''}{draft[:12]};")

    def story(round_: Doing) -> None:
        for turn in ("first", "second", "third"):
            round_.run(f"{round_.input} ({turn} turn)")

    return Scene(workflow, TASKS, effects, story)


@scenario("entrypoint: writer -> a human -> editor")
def entrypoint_with_interrupt(model: ChatPingPong) -> Scene:
    """An interrupt between two tasks; on resuming, the first task's result is taken from the checkpoint."""
    effects: list[str] = []
    writer, editor = (speaking(model, role, effects) for role in ("writer", "editor"))

    @entrypoint(checkpointer=InMemorySaver())
    def workflow(text: str) -> str:
        effects.append("workflow")
        draft = writer(text).result()
        verdict = interrupt({"draft": draft})
        return str(editor(f"{draft}\n{verdict}").result())

    def story(round_: Doing) -> None:
        round_.run(round_.input)
        round_.run(Command(resume="shorter, please"))

    return Scene(workflow, TASKS, effects, story)


@scenario("entrypoint: flaky writer -> critic")
def retried_task(model: ChatPingPong) -> Scene:
    """A task that fails after its model call, once, and is retried."""
    effects: list[str] = []
    policy = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ValueError)
    critic = speaking(model, "critic", effects)

    @task(retry_policy=policy)
    def writer(text: str) -> str:
        effects.append("writer")
        draft = model.invoke(ask("writer", f"{text} (try {effects.count('writer')})")).text
        if effects.count("writer") == 1:
            raise ValueError("not good enough")
        return draft

    @entrypoint()
    def workflow(text: str) -> str:
        return str(critic(writer(text).result()).result())

    return Scene(workflow, TASKS, effects)


@scenario("writer (2 tasks) -> editor")
def tasks_in_a_node(model: ChatPingPong) -> Scene:
    """Tasks called from a node of a graph."""
    effects: list[str] = []
    plan, write, edit = (speaking(model, role, effects) for role in ("planner", "writer", "editor"))

    def writer(state: Texts) -> Texts:
        return {"draft": write(plan(state["task"]).result()).result()}

    builder = StateGraph(Texts).add_node("writer", writer).add_edge(START, "writer")
    builder.add_node("editor", lambda state: {"final": edit(state["draft"]).result()}).add_edge("writer", "editor")
    return Scene(builder.compile(), tasks(), effects)


@scenario("graph [writer] -> entrypoint: critic")
def entrypoint_around_a_graph(model: ChatPingPong) -> Scene:
    """An entrypoint that invokes a graph and then a task."""
    effects: list[str] = []
    critic = speaking(model, "critic", effects)
    builder = StateGraph(Texts).add_edge(START, "writer")
    builder.add_node("writer", lambda state: {"draft": model.invoke(ask("writer", state["task"])).text})
    inner = builder.compile()

    @entrypoint()
    def workflow(text: str) -> str:
        return str(critic(inner.invoke({"task": text})["draft"]).result())

    return Scene(workflow, TASKS, effects)
