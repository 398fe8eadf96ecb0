"""While an engine is built the environment of the whole process is another; what the user has set is still known."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

from langgraph_pingpong.config import EngineConfig, check_devices, default_devices, gpus_of, parse_devices
from langgraph_pingpong.engines.vllm_setup import engine_environment, quiet_vllm, set_up_for
from langgraph_pingpong.environment import environment_with, own_value

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEVEL = "VLLM_LOGGING_LEVEL"
FIRST = EngineConfig("model", parse_devices(["cuda:0", "cuda:1"]))


@contextmanager
def elsewhere(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Another thread is within `enter()` for as long as this lasts."""
    within, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with enter():
            within.set()
            assert leave.wait(10)

    with ThreadPoolExecutor(1) as thread:
        staying = thread.submit(stay)
        assert within.wait(10)
        try:
            yield
        finally:
            leave.set()
        staying.result()


def build() -> AbstractContextManager[None]:
    return set_up_for(FIRST, FIRST.devices[1])


def test_another_model_finds_all_gpus_while_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    others = parse_devices(["cuda:2", "cuda:3"])
    with elsewhere(build):
        assert os.environ[VISIBLE] == "5"
        check_devices(others)
        assert default_devices() == ("cuda:0", "cuda:1")
        assert [gpus_of(device, 1) for device in others] == [["6"], ["7"]]
    assert os.environ[VISIBLE] == own_value(VISIBLE) == "4,5,6,7"


def test_what_the_user_has_not_set_is_asked_of_the_driver_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    with elsewhere(lambda: environment_with({VISIBLE: "1"}, [VISIBLE])):
        assert (os.environ[VISIBLE], own_value(VISIBLE)) == ("1", None)
    assert VISIBLE not in os.environ


def test_settings_of_the_user_stay_and_others_end_with_the_last_who_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    with elsewhere(build):
        imports = quiet_vllm()
        imports.__enter__()
        assert (os.environ[LEVEL], os.environ["VLLM_NO_USAGE_STATS"]) == ("ERROR", "0")
    assert os.environ[LEVEL] == "ERROR"
    imports.__exit__(None, None, None)
    assert LEVEL not in os.environ
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"


def test_a_build_that_fails_leaves_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    with pytest.raises(ValueError, match="out of memory"), build():
        raise ValueError("out of memory")
    assert os.environ[VISIBLE] == "0,1"


def test_kv_on_gpus_goes_by_cudas_ipc_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, ways = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "UCX_TLS"
    monkeypatch.delenv(reads, raising=False)
    monkeypatch.delenv(ways, raising=False)
    on_gpus, on_cpus = (
        EngineConfig("model", parse_devices([f"{kind}:0", f"{kind}:1"]), kv_transfer=True) for kind in ("cuda", "cpu")
    )
    told = engine_environment(on_gpus, on_gpus.devices[0])
    assert (told[reads], ways in told) == ("on", False)
    told = engine_environment(on_cpus, on_cpus.devices[0])
    assert reads not in told and "cma" in told[ways]
    monkeypatch.setenv(reads, "off")
    assert engine_environment(on_gpus, on_gpus.devices[0])[reads] == "off"


def test_engines_show_no_bars_and_the_users_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    code = (
        "import os\n"
        "from langgraph_pingpong.config import EngineConfig, parse_devices\n"
        "from langgraph_pingpong.engines.vllm_setup import set_up_for\n"
        "config = EngineConfig('model', parse_devices(['cuda:0']))\n"
        "with set_up_for(config, config.devices[0]):\n"
        "    import tqdm\n"
        "    print(os.environ['TQDM_DISABLE'], tqdm.tqdm([]).disable)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["1", "False"]
