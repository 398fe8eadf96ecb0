"""The same model with other settings: which engines it uses."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField, ConfigurableFieldSingleOption
from langgraph.graph import START, StateGraph
from pydantic import ValidationError
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, EnginePool, FakeEngine
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.errors import SettingOfServers
from tests.conftest import Lab

OTHER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
SERVERS = ["http://127.0.0.1:9/v1"]


def configured(model: ChatPingPong, *names: str) -> Any:
    return model.configurable_fields(**{name: ConfigurableField(id=name) for name in names})


def given(**values: Any) -> Any:
    return {"configurable": values}


def answering(reply: str) -> ChatPingPong:
    return ChatPingPong(pool=EnginePool([FakeEngine(reply=lambda _: reply)]))


def prompt_of(engine: Any) -> str:
    return str(engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids)))


class TestConfigurableFields:
    def test_go_on_with_the_engines(self) -> None:
        model = ChatPingPong(devices=["fake:0"])
        seen: list[Any] = []
        model.trace.subscribe(lambda event: seen.append(event.name))
        field = configured(model, "temperature")
        for temperature in (0.1, 0.2):
            field.invoke("Hi", given(temperature=temperature))
        asyncio.run(field.ainvoke("Hi", given(temperature=0.3)))
        (engine,) = model._serving().pool.engines
        assert [request.sampling["temperature"] for request in engine.requests] == [0.1, 0.2, 0.3]
        assert (engine.starts, seen.count("finish")) == (1, 3)
        assert model.temperature is None
        model.close()

    def test_stream_as_the_model_does(self) -> None:
        model = answering("tide pool")
        assert len(list(configured(model, "seed").stream("Hi", given(seed=1)))) == len(list(model.stream("Hi")))

    def test_can_switch_streaming_off(self) -> None:
        assert len(list(configured(answering("tide pool"), "streaming").stream("Hi", given(streaming=False)))) == 1

    def test_are_checked(self) -> None:
        model = answering("tide")
        with pytest.raises(ValidationError, match="max_tokens"):
            configured(model, "max_tokens").invoke("Hi", given(max_tokens=0))
        with pytest.raises(ValueError, match="temprature"):
            configured(model, "temprature")

    def test_may_be_options(self) -> None:
        model = answering("tide pool")
        option = ConfigurableFieldSingleOption(id="size", options={"short": 4, "long": 9}, default="short")
        chosen = model.configurable_fields(max_tokens=option)
        assert chosen.invoke("Hi").content == "tide"
        assert chosen.with_config(given(size="long")).invoke("Hi").content == "tide pool"
        assert len(chosen.configurable_fields(seed=ConfigurableField(id="seed")).fields) == 2

    def test_that_make_engines_make_others_once(self) -> None:
        model = ChatPingPong(devices=["fake:0"], max_tokens=4)
        field = configured(model, "devices", "max_tokens")
        used = [field.prepare(given(devices=["fake:1"], max_tokens=most))[0] for most in (5, 6)]
        for each in (model, *used):
            each.invoke("Hi")
        pools = [each._serving().pool for each in (model, *used)]
        assert pools[0] is not pools[1]
        assert pools[1] is pools[2]
        assert [engine.device for pool in pools for engine in pool.engines] == ["fake:0", "fake:1", "fake:1"]
        model.close()
        assert [pool.closed for pool in pools] == [True] * 3

    def test_go_on_with_the_servers(self) -> None:
        model = ChatPingPong(base_urls=SERVERS, model="org/name", tokenizer=fake_tokenizer(), api_key="secret")
        cooler, _ = configured(model, "temperature").prepare(given(temperature=0.0))
        assert cooler.temperature == 0.0
        assert cooler._serving().pool is model._serving().pool

    def test_have_edges(self, lab: Lab) -> None:
        model = lab.model()
        recorder = lab.record(model)

        class State(TypedDict, total=False):
            task: str
            writer: str
            critic: str

        field = configured(model, "seed")
        builder = StateGraph(State)
        builder.add_node("writer", lambda state: {"writer": field.invoke("You are the writer. " * 9).text})
        builder.add_node(
            "critic", lambda state: {"critic": field.invoke("You are the critic. " + state["writer"]).text}
        )
        graph = builder.add_edge(START, "writer").add_edge("writer", "critic").compile()
        for _ in range(3):
            graph.invoke({"task": ""}, given(seed=1))
        assert recorder.certificate("critic")["source"] == "learned"


class TestSettingsOfServers:
    def test_may_be_given_as_they_are_by_default(self) -> None:
        model = ChatPingPong(base_urls=SERVERS, model="org/name", temperature=0.5)
        twin = ChatPingPong(**model.model_dump())
        assert twin.model_dump() == model.model_dump()

    @pytest.mark.parametrize("wrong", [{"kv_transfer": True}, {"engine_args": {"seed": 1}}, {"dtype": "float32"}])
    def test_are_refused_else(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SettingOfServers, match=next(iter(wrong))):
            ChatPingPong(base_urls=SERVERS, **wrong)


class TestCopies:
    def test_use_their_chat_template(self) -> None:
        model = answering("tide")
        copied = model.model_copy(update={"chat_template": OTHER})
        back = copied.model_copy(update={"chat_template": None})
        (engine,) = model._serving().pool.engines
        prompts = []
        for each in (model, copied, back):
            each.invoke("Hi")
            prompts.append(prompt_of(engine))
        assert prompts[1] == "[user]Hi[answer]"
        assert prompts[0] == prompts[2] != prompts[1]
        assert copied._serving().template is copied._serving().template

    def test_have_edges_with_their_chat_template(self, lab: Lab) -> None:
        model = lab.model()
        recorder = lab.record(model)
        graph = lab.chain(model.model_copy(update={"chat_template": OTHER}))
        for _ in range(2):
            graph.invoke({"task": "Begin."})
        certificate = recorder.certificate("critic")
        assert certificate["static"] > 0
        assert certificate["wasted"] == 0

    def test_with_other_engines_have_their_own(self) -> None:
        model = ChatPingPong(devices=["fake:0"])
        assert model.model_copy(update={"overlap": "off"})._serving().pool is model._serving().pool
        for update in ({"devices": ["fake:1"]}, {"max_model_len": 64}, {"pool": EnginePool([FakeEngine()])}):
            other = model.model_copy(update=update)._serving().pool
            assert other is not model._serving().pool
            assert model.model_copy(update=update)._serving().pool is other

    def test_of_any_depth_share_the_engines_of_a_given_tokenizer(self) -> None:
        model = ChatPingPong(devices=["fake:0"], tokenizer=fake_tokenizer())
        assert copy.deepcopy(model)._serving().pool is model._serving().pool
        bare = fake_tokenizer()
        bare.chat_template = OTHER
        assert model.model_copy(update={"tokenizer": bare})._serving().pool is not model._serving().pool

    def test_close_no_pool_that_somebody_gave(self) -> None:
        model = ChatPingPong(devices=["fake:0"])
        pool = EnginePool([FakeEngine()])
        model.model_copy(update={"pool": pool}).invoke("Hi")
        model.close()
        assert not pool.closed
