"""What cannot work is refused before an engine starts, with one message that says what to change."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langgraph.graph import START, StateGraph
from pydantic import ValidationError
from typing_extensions import TypedDict

from langgraph_pingpong import ChatPingPong, FakeEngine, agent_node, config
from langgraph_pingpong.config import EngineConfig, check_devices, cores_for, gpus_of, parse_devices
from langgraph_pingpong.engines import vllm_engine, vllm_setup
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.engines.main_guard import check_main_guard
from langgraph_pingpong.errors import (
    CallRefused,
    ConfigError,
    DeviceError,
    EngineNotInstalled,
    MissingMainGuard,
    ModelNotFound,
    NoChatTemplate,
    NotEnoughMemory,
    PingPongError,
    PromptTooLong,
    TemplateRefused,
    UnknownSetting,
)
from langgraph_pingpong.model_files import context_limit

if TYPE_CHECKING:
    from tests.conftest import Lab

REAL = {"devices": ["cpu:0"]}


@pytest.fixture(autouse=True)
def no_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise AssertionError("an engine was about to be built")

    monkeypatch.setattr(vllm_engine.VllmEngine, "_build", refuse)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A whole model, as far as can be seen without loading its weights."""
    fake_tokenizer().save_pretrained(tmp_path / "model")
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 640}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def refused(kind: type[PingPongError], match: str, work: Callable[[], Any]) -> None:
    """The error says what is wrong, and in its last line what to change."""
    with pytest.raises(kind, match=match) as error:
        work()
    assert kind.hint
    assert str(error.value).endswith("\n" + kind.hint)


class TestDevices:
    @pytest.mark.parametrize(
        ("devices", "match"),
        [
            (["tpu:0"], r"Unknown device 'tpu:0': .* cuda:N, cpu:N or fake:N"),
            (["cuda"], r"Unknown device 'cuda'"),
            (["cuda:-1"], r"Unknown device 'cuda:-1'"),
            (["cuda:0:1"], r"Unknown device 'cuda:0:1'"),
            (["cuda:zero"], r"Unknown device 'cuda:zero'"),
            ([""], r"Unknown device ''"),
            ([0, 1], r"Unknown device 0"),
            ([None], r"Unknown device None"),
            (["cuda:0", "cuda:0"], r"Device cuda:0 is named twice"),
            (["cuda:0", "cuda:00"], r"Device cuda:0 is named twice"),
            (["cpu:0", "cuda:0"], r"different kinds cannot share a run: cpu:0, cuda:0"),
            (["fake:0", "cpu:0"], r"different kinds"),
            ([], r"No device given"),
            ("cuda:0", r"a list of names, and not 'cuda:0'"),
            (2, r"a list of names, and not 2"),
        ],
    )
    def test_are_checked_where_the_model_is_made(self, devices: Any, match: str) -> None:
        refused(DeviceError, match, lambda: ChatPingPong(devices=devices))

    def test_that_this_machine_lacks_are_named_with_what_it_has(self, model_folder: Path) -> None:
        model = ChatPingPong(model=str(model_folder), devices=["cpu:0", "cpu:4095"])
        refused(DeviceError, r"cpu:4095 does not exist: this machine has \d+ cpu device", model.start)

    def test_of_a_gpu_on_a_machine_without_one(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        model = ChatPingPong(model=str(model_folder), devices=["cuda:0"])
        refused(DeviceError, r"cuda:0 does not exist: this machine has 0 cuda", lambda: model.invoke("Hello."))

    def test_that_overlap_under_tensor_parallelism(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        check_devices(parse_devices(["cuda:0", "cuda:2"]), tensor_parallel_size=2)
        pair = parse_devices(["cuda:0", "cuda:1"])
        refused(DeviceError, r"cuda:1 and cuda:0 overlap at tensor_parallel_size=2", lambda: check_devices(pair, 2))
        last = parse_devices(["cuda:3"])
        refused(DeviceError, r"cuda:4 does not exist: .* has 4 cuda", lambda: check_devices(last, 2))

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [("4,5,6,7", [["5"], ["7"]]), ("GPU-a, GPU-b,GPU-c,GPU-d", [["GPU-b"], ["GPU-d"]])],
    )
    def test_an_engine_is_shown_its_own_gpu(
        self, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[list[str]]
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpus_of(device, 1) for device in parse_devices(["cuda:1", "cuda:3"])] == expected

    def test_an_engine_over_two_gpus_is_shown_both(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(config, "_count_gpus", lambda: 4)
        assert [gpus_of(device, 2) for device in parse_devices(["cuda:0", "cuda:2"])] == [["0", "1"], ["2", "3"]]

    def test_share_the_cores_between_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("langgraph_pingpong.config.usable_cores", lambda: [1, 3, 5, 7, 9])
        devices = parse_devices(["cpu:0", "cpu:1"])
        assert [cores_for(device, devices) for device in devices] == [[1, 3], [5, 7, 9]]


class TestModels:
    def start(self, model: str | Path, **settings: Any) -> Callable[[], Any]:
        return ChatPingPong(model=str(model), **{**REAL, **settings}).start

    @pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/no such model", "a/b/c"])
    def test_folders_that_do_not_exist(self, name: str) -> None:
        refused(ModelNotFound, r"The model folder .* does not exist", self.start(name))

    def test_folders_without_a_config(self, tmp_path: Path) -> None:
        refused(ModelNotFound, f"The folder {tmp_path} holds no config.json", self.start(tmp_path))

    @pytest.mark.parametrize("config", ["{}", "not json", '{"model_type": "a kind of its own"}'])
    def test_folders_without_a_tokenizer(self, tmp_path: Path, config: str) -> None:
        (tmp_path / "config.json").write_text(config)
        refused(ModelNotFound, f"(?s)could be loaded from '{tmp_path}'", self.start(tmp_path))

    @pytest.mark.parametrize("config", ["not json", '{"model_type": "a kind of its own"}'])
    def test_folders_with_a_config_that_cannot_be_read(self, model_folder: Path, config: str) -> None:
        (model_folder / "config.json").write_text(config)
        settings = EngineConfig(str(model_folder), parse_devices(["cpu:0"]))
        refused(ModelNotFound, "(?s)config of .* could not be read", lambda: context_limit(settings))

    def test_without_a_chat_template(self, model_folder: Path) -> None:
        (model_folder / "chat_template.jinja").unlink()
        refused(NoChatTemplate, r"The tokenizer of '.*model' has no chat template", self.start(model_folder))
        ChatPingPong(model=str(model_folder), chat_template="{{ messages[0].content }}", **REAL)._serving()

    def test_without_a_chat_template_on_fake_devices(self, model_folder: Path) -> None:
        (model_folder / "chat_template.jinja").unlink()
        start = ChatPingPong(model=str(model_folder), devices=["fake:0"]).start
        refused(NoChatTemplate, "has no chat template", start)

    def test_whose_template_refuses_the_messages(self, lab: Lab) -> None:
        strict = "{% if messages[0].role != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}"
        model = lab.model(chat_template=strict)
        call = lambda: model.invoke([("system", "Be brief."), ("human", "Hello.")])  # noqa: E731
        refused(TemplateRefused, r"roles: system, user\): a user must begin", call)
        assert [engine.starts for engine in lab.engines] == [0, 0]

    def test_whose_template_is_none(self, lab: Lab) -> None:
        model = lab.model(chat_template="{{ messages[0].content }}\n{% if %}")
        refused(NoChatTemplate, "cannot be read. Line 2: Expected an expression", lambda: model.invoke("Hello."))


class TestTexts:
    @pytest.mark.parametrize("escape_markers", [True, False])
    @pytest.mark.parametrize(
        "messages", ["Crabs \ud83e", [("system", "\udd80"), ("human", [{"type": "text", "text": "x"}])]]
    )
    def test_with_half_a_character_are_refused(self, lab: Lab, messages: Any, escape_markers: bool) -> None:
        model = lab.model(escape_markers=escape_markers)
        refused(CallRefused, r"holds half of a character, '\\ud83e|udd80'", lambda: model.invoke(messages))

    def test_are_mended_by_what_the_error_says(self, lab: Lab) -> None:
        text = "Crabs \ud83e\udd80 and half of one \ud83e"
        with pytest.raises(CallRefused) as caught:
            lab.model().invoke(text)
        (mends,) = re.findall(r"(text\..*) mends it", str(caught.value))
        assert eval(mends) == "Crabs \U0001f980 and half of one \N{REPLACEMENT CHARACTER}"


class TestVllm:
    def test_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
        found = vllm_setup.importlib.util.find_spec
        monkeypatch.setattr(
            vllm_setup.importlib.util, "find_spec", lambda name, *_: None if name == "vllm" else found(name)
        )
        model = ChatPingPong(model=str(model_folder), **REAL)
        refused(EngineNotInstalled, r'pip install "langgraph-pingpong\[cuda\]"', lambda: model.invoke("Hello."))

    def test_is_not_needed_for_fake_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        with ChatPingPong(devices=["fake:0"], max_tokens=4) as model:
            assert model.invoke("Hello.").text

    def test_engines_that_do_not_fit_together(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        with (model_folder / "model.safetensors").open("wb") as weights:
            weights.truncate(3 << 30)  # takes no space: the file is one hole
        self.free_gib(monkeypatch, 9.5)
        monkeypatch.setattr("langgraph_pingpong.config.usable_cores", lambda: [0, 1])
        two = ChatPingPong(model=str(model_folder), devices=["cpu:0", "cpu:1"])
        refused(NotEnoughMemory, r"2 engines need 10\.0 GiB together .* 9\.5 GiB are free", two.start)
        ChatPingPong(model=str(model_folder), devices=["cpu:0"])._serving()
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        two._serving()
        wide = ChatPingPong(model=str(model_folder), devices=["cpu:0", "cpu:1"], dtype="float32")
        refused(NotEnoughMemory, r"2 engines need 14\.0 GiB together", wide.start)

    @pytest.mark.parametrize("size", ["abc", "", "1.5", "4GiB", "-1", "nan"])
    def test_with_a_kv_cache_of_no_size(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path, size: str) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", size)
        with pytest.raises(ConfigError, match=f"VLLM_CPU_KVCACHE_SPACE is a whole number of GiB.* not '{size}'"):
            ChatPingPong(model=str(model_folder), **REAL).start()

    @staticmethod
    def free_gib(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
        memory = SimpleNamespace(available=int(gib * (1 << 30)))
        monkeypatch.setattr(vllm_setup.psutil, "virtual_memory", lambda: memory)


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [("temprature", "temperature"), ("max_token", "max_tokens"), ("device", "devices"), ("gpu_memory", None)],
    )
    def test_that_the_model_does_not_know(self, name: str, meant: str | None) -> None:
        match = f"ChatPingPong has no setting '{name}'" + (f".* Did you mean '{meant}'" if meant else "")
        refused(UnknownSetting, match, lambda: ChatPingPong(**{name: 1}))

    @pytest.mark.parametrize(
        "settings",
        [{"max_tokens": 0}, {"max_tokens": "many"}, {"overlap": "maybe"}, {"temperature": "warm"}, {"stop": "."}],
    )
    def test_of_the_wrong_kind_name_the_setting(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=next(iter(settings))):
            ChatPingPong(**settings)

    @pytest.mark.parametrize("name", ["stop", "stop_sequences"])
    def test_of_stop_texts_have_both_names(self, name: str, lab: Lab) -> None:
        model = lab.model(replies={"writer": "One. Two."}, **{name: [" Two"]})
        assert model.invoke("You are the writer.").text == "One."

    def test_that_vllm_does_not_know(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
        monkeypatch.undo()
        started = []
        monkeypatch.setattr(
            "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", lambda *args, **_: started.append(args)
        )
        wrong = {"max_num_seq": 4}
        model = ChatPingPong(model=str(model_folder), engine_args=wrong, **REAL)
        refused(UnknownSetting, "vLLM has no setting 'max_num_seq'. Did you mean 'max_num_seqs'", model.start)
        assert not started

    @pytest.mark.parametrize("name", ["max_token", "topp", "functions"])
    def test_of_a_call_that_nobody_knows(self, lab: Lab, name: str) -> None:
        model = lab.model()
        refused(UnknownSetting, f"A call has no setting '{name}'", lambda: model.invoke("Hello.", **{name: 1}))
        bound = model.bind(**{name: 1})
        refused(UnknownSetting, name, lambda: asyncio.run(bound.ainvoke("Hello.")))
        refused(UnknownSetting, name, lambda: list(bound.stream("Hello.")))
        assert [engine.starts for engine in lab.engines] == [0, 0]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"logit_bias": {"tide": 1}},
            {"logit_bias": {5: "much"}},
            {"logit_bias": [5]},
            {"max_tokens": "5"},
            {"max_tokens": 2.5},
            {"n": "2"},
            {"n": 0},
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"logprobs": True, "top_logprobs": "many"},
        ],
    )
    def test_of_a_call_of_the_wrong_type_name_the_setting(self, lab: Lab, wrong: dict[str, Any]) -> None:
        bound = lab.model().bind(**wrong)
        name = list(wrong)[-1]
        refused(CallRefused, f"{name}=.* cannot be: ", lambda: bound.invoke("Hello."))
        refused(CallRefused, f"{name}=.* cannot be: ", lambda: asyncio.run(bound.ainvoke("Hello.")))
        refused(CallRefused, f"{name}=.* cannot be: ", lambda: list(bound.stream("Hello.")))

    @pytest.mark.parametrize("bias", [{"5": 1000, "6": -1000, "7": 3}, {5: 100.0, 6: -100, 7: 3}])
    def test_of_biases_are_what_vllms_server_makes_of_them(self, lab: Lab, bias: dict[Any, float]) -> None:
        lab.model().bind(logit_bias=bias).invoke("Hello.")
        assert lab.engines[0].requests[0].sampling["logit_bias"] == {5: 100.0, 6: -100.0, 7: 3.0}

    def test_of_a_call_reach_the_engine(self, lab: Lab) -> None:
        model = lab.model(temperature=0.5, seed=1)
        model.invoke("Hello.", temperature=0.0, top_k=5, stop=["."])
        sampling = lab.engines[0].requests[0].sampling
        room = lab.engines[0].max_model_len - len(lab.engines[0].requests[0].prompt_token_ids)
        assert sampling == {"max_tokens": room, "temperature": 0.0, "seed": 1, "top_k": 5, "stop": ["."]}


class TestLongPrompts:
    def test_name_the_node_the_tokens_and_the_limit(self, lab: Lab) -> None:
        model = lab.model(speed={"max_model_len": 64})
        call = lambda: lab.chain(model).invoke({"task": "Long " * 40})  # noqa: E731
        refused(PromptTooLong, r"The prompt of node 'writer' has \d{3} tokens, and .* holds 64", call)
        assert [engine.starts for engine in lab.engines] == [0, 0]

    def test_are_what_langchain_calls_a_context_overflow(self, lab: Lab) -> None:
        with pytest.raises(ContextOverflowError, match=r"The prompt has \d+ tokens, and"):
            lab.model(speed={"max_model_len": 64}).invoke("Long " * 40)

    def test_are_found_by_the_limit_that_was_set(self) -> None:
        with ChatPingPong(devices=["fake:0", "fake:1"], max_model_len=64) as model:
            refused(PromptTooLong, "holds 64", lambda: model.invoke("Long " * 40))
        fresh = ChatPingPong(devices=["fake:0"], max_model_len=64)
        refused(PromptTooLong, "holds 64", lambda: fresh.invoke("Long " * 40))
        assert fresh._serving().pool.engines[0].starts == 0

    @pytest.mark.parametrize(
        ("settings", "limit"),
        [({}, 640), ({"max_model_len": 320}, 320), ({"engine_args": {"max_model_len": 160}}, 160)],
    )
    def test_are_found_by_the_models_config_before_it_runs(
        self, model_folder: Path, settings: dict[str, Any], limit: int
    ) -> None:
        model = ChatPingPong(model=str(model_folder), **REAL, **settings)
        refused(PromptTooLong, f"holds {limit}", lambda: model.invoke("Long " * 640))

    def test_are_found_right_after_the_start_where_only_the_engine_knows(self, lab: Lab) -> None:
        engine = lab.engine(kind=Settling)
        model = lab.model([engine])
        refused(PromptTooLong, "holds 64", lambda: model.invoke("Long " * 40))
        assert (engine.starts, engine.requests) == (1, [])

    def test_are_those_the_engine_refuses_once_it_runs(self, lab: Lab) -> None:
        engine = lab.engine(kind=Settling, max_model_len=32)
        model = lab.model([engine])
        refused(PromptTooLong, "holds 32", lambda: model.invoke("Long " * 5))
        model.start()
        assert model.invoke("Long " * 5).text
        refused(PromptTooLong, "holds 64", lambda: model.invoke("Long " * 40))

    def test_of_a_later_node_fail_there_and_nowhere_else(self, lab: Lab) -> None:
        answer = "Long " * 12
        model = lab.model(replies={"writer": answer}, speed={"max_model_len": 360})
        record = lab.record(model)
        prompt = lambda state: f"You are the critic. {state['writer'] * 8}"  # noqa: E731
        call = lambda: lab.chain(model, prompts={"critic": prompt}).invoke({"task": "Short."})  # noqa: E731
        refused(PromptTooLong, "of node 'critic' has", call)
        assert record.certificate("writer")["output_tokens"] == len(answer)
        model.pool.close()

    def test_leave_the_answer_what_room_there_is(self, lab: Lab) -> None:
        model = lab.model(1, replies={"writer": "Words. " * 40}, speed={"max_model_len": 100})
        answer = model.invoke("You are the writer.")
        usage = answer.usage_metadata
        assert usage["input_tokens"] + usage["output_tokens"] == 100
        assert answer.response_metadata["finish_reason"] == "length"

    @pytest.mark.parametrize("overlap", ["on", "off"])
    def test_ask_for_no_more_than_there_is_room_for(self, lab: Lab, overlap: str) -> None:
        """Engines in this process would end the answer there. Servers refuse the call."""
        model = lab.model(overlap=overlap, max_tokens=300, speed={"max_model_len": 500})
        graph = lab.chain(model)
        for _ in range(2):  # from the second run on the answer is begun ahead, with the same limit
            graph.invoke({"task": "Short."})
        asked = [request for engine in lab.engines for request in engine.requests]
        assert min(500 - len(each.prompt_token_ids) for each in asked) < 300
        for each in asked:
            assert each.sampling["max_tokens"] == min(300, 500 - len(each.prompt_token_ids))


class Settling(FakeEngine):
    """Finds out when it starts how much context it has room for."""

    async def start(self) -> None:
        await super().start()
        self.max_model_len = 64


class TestNodes:
    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"model": "gpt"}, "agent_node needs a chat model, not str"),
            ({"prompt": "Say hello."}, "prompt must be a prompt template or a function"),
            ({"writes": ""}, "writes must be a state key or a function"),
            ({"writes": 3}, "writes must be a state key or a function"),
        ],
    )
    def test_with_a_wrong_argument(self, lab: Lab, settings: dict[str, Any], match: str) -> None:
        given = {"model": lab.model(), "prompt": lambda state: "Hello.", "writes": "text", **settings}
        with pytest.raises(ConfigError, match=match):
            agent_node(given["model"], prompt=given["prompt"], writes=given["writes"])

    def test_whose_state_lacks_a_variable(self, lab: Lab) -> None:
        class State(TypedDict, total=False):
            text: str

        builder = StateGraph(State)
        node = agent_node(lab.model(), prompt=lab.prompt("writer", "topic"), writes="text")
        builder.add_node("writer", node)
        builder.add_edge(START, "writer")
        with pytest.raises(ConfigError, match="The state has no topic, which the prompt of the node needs"):
            builder.compile().invoke({"text": "x"})
        assert lab.engines[0].starts == 0


UNGUARDED = """
from langgraph_pingpong import ChatPingPong

model = ChatPingPong(devices=["cpu:0", "cpu:1"])

print(model.invoke("Hello.").text)
"""

CHECK = "from langgraph_pingpong.engines.main_guard import check_main_guard\n"
IN_A_THREAD = """
import threading
caught = []
def work():
    try:
        check_main_guard()
    except Exception as error:
        caught.append(error)
def main():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]
"""
IN_THE_GRAPH = """
import asyncio
from langchain_core.runnables import RunnableLambda
def main():
    asyncio.run(RunnableLambda(lambda _: check_main_guard()).ainvoke(None))
"""
DIRECTLY = "def main():\n    check_main_guard()\n"
REFUSED = [
    "main()\n",
    "if True:\n    main()\n",
    "try:\n    main()\nfinally:\n    pass\n",
    "exec('\\n' * 50 + 'main()')\n",
    'if __name__ == "__main__":\n    pass\nmain()\n',
    "class Setup:\n    main()\n",
]
ACCEPTED = [
    'if __name__ == "__main__":\n    main()\n',
    'if "__main__" == __name__:\n    main()\n',
    'if __name__ == "__main__" and True:\n    main()\n',
    'try:\n    if __name__ == "__main__":\n        main()\nfinally:\n    pass\n',
    'if __name__ == "__main__":\n    if True:\n        main()\n',
    'if __name__ == "__main__":\n    exec("main()")\n',
]
AFTERWARDS = [
    "import atexit\natexit.register(main)\n",
    "import threading\nthreading.Timer(0.2, main).start()\n",
]


def run_script(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, cwd=cwd, capture_output=True, text=True, timeout=60
    )


class TestMainGuard:
    def test_its_absence_is_one_readable_error(self, tmp_path: Path) -> None:
        script = tmp_path / "unguarded.py"
        script.write_text(UNGUARDED)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        started = time.monotonic()
        with subprocess.Popen(
            [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            children = set()
            while process.poll() is None:
                children |= set(_children(process.pid))
                time.sleep(0.02)
            said, complaint = process.communicate()
        assert time.monotonic() - started < 10
        assert process.returncode == 1
        assert not children
        assert said == ""
        assert complaint.count("MissingMainGuard: ") == 1
        assert f"{script}, line 6, starts engines at the top level" in complaint
        assert complaint.rstrip().endswith('Put the code that runs the graph under: if __name__ == "__main__":')

    @pytest.mark.parametrize("way", [DIRECTLY, IN_A_THREAD, IN_THE_GRAPH], ids=["directly", "thread", "graph"])
    @pytest.mark.parametrize("code", REFUSED)
    def test_its_absence_is_seen(self, tmp_path: Path, way: str, code: str) -> None:
        with pytest.raises(MissingMainGuard, match=r"script\.py, line \d+, starts engines"):
            self.run_as_main(tmp_path, way + code)

    @pytest.mark.parametrize("way", [DIRECTLY, IN_A_THREAD, IN_THE_GRAPH], ids=["directly", "thread", "graph"])
    @pytest.mark.parametrize("code", ACCEPTED)
    def test_its_presence_is_seen(self, tmp_path: Path, way: str, code: str) -> None:
        self.run_as_main(tmp_path, way + code)

    @staticmethod
    def run_as_main(folder: Path, code: str) -> None:
        """What `python script.py` does, in this process."""
        (folder / "script.py").write_text(CHECK + code)
        runpy.run_path(str(folder / "script.py"), run_name="__main__")

    @pytest.mark.parametrize("code", AFTERWARDS)
    def test_accepts_what_runs_after_the_top_level(self, tmp_path: Path, code: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(CHECK + DIRECTLY + code)
        done = run_script(script)
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_package_run_by_name_needs_none(self, tmp_path: Path) -> None:
        (tmp_path / "tool").mkdir()
        (tmp_path / "tool" / "__main__.py").write_text(CHECK + "check_main_guard()\nprint('ran')\n")
        done = run_script("-m", "tool", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
        done = run_script("tool", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr

    def test_spawn_does_not_import_such_a_package_again(self, tmp_path: Path) -> None:
        """Why it needs none."""
        (tmp_path / "tool").mkdir()
        code = """
        import multiprocessing
        from tool import work
        print("imported", flush=True)
        child = multiprocessing.get_context("spawn").Process(target=work.work)
        child.start()
        child.join()
        """
        (tmp_path / "tool" / "__main__.py").write_text(textwrap.dedent(code))
        (tmp_path / "tool" / "work.py").write_text("def work():\n    print('worked', flush=True)\n")
        done = run_script("-m", "tool", cwd=tmp_path)
        assert done.stdout == "imported\nworked\n", done.stderr

    @pytest.mark.parametrize("command", [["-m", "module"], ["module.py"], ["tool/__main__.py"]])
    def test_modules_and_files_need_one(self, tmp_path: Path, command: list[str]) -> None:
        (tmp_path / "tool").mkdir()
        for path in (tmp_path / "module.py", tmp_path / "tool" / "__main__.py"):
            path.write_text(CHECK + "check_main_guard()\n")
        done = run_script(*command, cwd=tmp_path)
        assert done.returncode == 1
        assert "MissingMainGuard" in done.stderr

    def test_code_without_a_file_needs_none(self) -> None:
        done = run_script("-c", CHECK + "check_main_guard()")
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_process_that_is_being_spawned_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        refused(MissingMainGuard, "still importing the main script", check_main_guard)

    def test_under_pytest_nothing_is_refused(self) -> None:
        check_main_guard()
        errors: list[BaseException] = []
        thread = threading.Thread(target=lambda: _catch(check_main_guard, errors))
        thread.start()
        thread.join()
        assert not errors

    def test_is_checked_before_engines_are_made(self, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
        def unguarded() -> None:
            raise MissingMainGuard("somewhere")

        monkeypatch.setattr(vllm_engine, "check_main_guard", unguarded)
        refused(MissingMainGuard, "somewhere", ChatPingPong(model=str(model_folder), **REAL).start)


def _catch(work: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        work()
    except MissingMainGuard as error:
        errors.append(error)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
