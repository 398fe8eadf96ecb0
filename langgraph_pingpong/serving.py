"""Puts together what serves a model: engines on devices, and the template that makes prompts for them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.config import (
    EngineConfig,
    ServerConfig,
    default_devices,
    parse_base_urls,
    parse_devices,
    refuse_unknown,
    resolve_model,
)
from langgraph_pingpong.engines.fake_engine import FakeEngine, fake_tokenizer
from langgraph_pingpong.engines.server_engine import ServerEngine, build_server_engines
from langgraph_pingpong.engines.vllm_engine import VllmEngine, build_vllm_engines
from langgraph_pingpong.errors import CannotEscape, SettingOfServers
from langgraph_pingpong.kv_budget import KV_POOL_RATIO
from langgraph_pingpong.model_files import context_limit, tokenizer_args
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.prompts import template_with
from langgraph_pingpong.tokens import ChatTemplate, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from transformers import PreTrainedTokenizerBase

    from langgraph_pingpong.failover import Decode


@dataclass(frozen=True, slots=True)
class Serving:
    """Engines and the template of their model; `context` is the longest prompt plus answer in tokens, if known."""

    pool: EnginePool
    template: ChatTemplate
    context: int | None

    def using(self, chat_template: str | None) -> Serving:
        """The same engines with another chat template (Jinja); None is the model's own."""
        template = template_with(self.template, chat_template)
        return self if template is self.template else replace(self, template=template)

    def decoder(self, sampling: Mapping[str, Any]) -> Decode:
        """From the ids of an answer that is sampled like this to its text, as engines show it."""
        decode: Any = self.template.tokenizer.decode
        skip = sampling.get("skip_special_tokens", True)
        return partial(decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@dataclass(frozen=True, slots=True)
class Prompting:
    """What a model's prompts are made with instead of its own tokenizer and chat template (Jinja), where given.

    `escape_markers` None is as it comes: with servers, prompts are those that vLLM would make of the messages itself.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    chat_template: str | None = None
    escape_markers: bool | None = None

    def template(self, tokenizer: PreTrainedTokenizerBase, *, of_servers: bool = False) -> ChatTemplate:
        """The template, with the model's own tokenizer.

        Raises:
            NoChatTemplate: there is none.
            CannotEscape: markers shall be escaped, and the tokenizer cannot write one as plain text.
        """
        escape = not of_servers if self.escape_markers is None else self.escape_markers
        template = ChatTemplate(tokenizer, self.chat_template, escape_markers=escape)
        if self.escape_markers and not template.escape_markers:
            name = tokenizer.name_or_path
            raise CannotEscape(f"The tokenizer of {name!r} cannot write a special token as plain text.")
        return template


_OWN = Prompting()


PREPARING = 32
"""Calls that are prepared at once; while engines start, all of them wait."""


class LazyServing:
    """Makes the engines and the template on first use, once; copies of a model share them."""

    def __init__(self) -> None:
        self._value: Serving | None = None
        self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PREPARING, thread_name_prefix="pingpong-prepare")

    def _notice_fork(self) -> None:
        if os.getpid() != self._process:  # the threads do not exist here, and one of them may hold the lock
            self._begin_process()

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Where calls are prepared. The caller's loop has some, too, but tools may keep all of these busy."""
        self._notice_fork()
        return self._threads

    def get(self, make: Callable[[], Serving]) -> Serving:
        """What was made, or what `make` makes now; made again once its engines are closed, and in a forked process."""
        self._notice_fork()
        with self._lock:
            if self._value is None or self._value.pool.closed:
                self._value = make()
            return self._value

    @property
    def made(self) -> Serving | None:
        """What was made, if it was."""
        return self._value

    def close(self) -> None:
        """Shut the engines down if there are any."""
        with self._lock:
            if self._value is not None:
                self._value.pool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Engines do not travel: what is pickled makes its own when it is used."""
        return type(self), ()


def make_serving(
    model: str | None,
    devices: Sequence[str] | None,
    settings: dict[str, Any],
    prompting: Prompting = _OWN,
) -> Serving:
    """Engines on `devices`, not started yet, with everything checked that can be before they start.

    `settings` are the fields of `EngineConfig` beside model and devices. A model is needed for real devices only:
    a modelled engine can do with a modelled tokenizer.

    Raises:
        ConfigError: the model, a device or a setting cannot work.
    """
    places = parse_devices(devices or default_devices())
    if places[0].kind == "fake":
        tokenizer = prompting.tokenizer
        if tokenizer is None:
            args = settings.get("engine_args") or {}
            tokenizer = load_tokenizer(**tokenizer_args(resolve_model(model), args)) if model else fake_tokenizer()
        template = prompting.template(tokenizer)
        kv_transfer = settings.get("kv_transfer", False)
        fakes = [FakeEngine(str(place), tokenizer, kv_transfer=kv_transfer) for place in places]
        for fake in fakes:
            fake.max_model_len = settings.get("max_model_len") or fake.max_model_len
        pool = EnginePool(fakes, settings.get("kv_pool_ratio", KV_POOL_RATIO))
        return Serving(pool, template, fakes[0].max_model_len)
    config = EngineConfig(model=resolve_model(model), devices=places, **settings)
    engines = build_vllm_engines(config)  # before the tokenizer, whose import takes seconds: its checks take none
    own = tokenizer_args(config.model, config.engine_args)
    template = prompting.template(prompting.tokenizer or load_tokenizer(**own))
    return Serving(EnginePool(engines, config.kv_pool_ratio), template, context_limit(config))


def serving_of_servers(
    model: str | None,
    base_urls: Sequence[str],
    settings: dict[str, Any],
    prompting: Prompting = _OWN,
) -> Serving:
    """The same for vLLM servers, which are asked when the pool starts.

    `settings` are the fields of `ServerConfig` beside model and addresses. With a tokenizer, `model` may be any name
    that the servers know.

    Raises:
        ConfigError: the model or a base URL cannot work.
    """
    config = ServerConfig(resolve_model(model), parse_base_urls(base_urls), **settings)
    template = prompting.template(prompting.tokenizer or load_tokenizer(config.model), of_servers=True)
    return Serving(EnginePool(build_server_engines(config), config.kv_pool_ratio), template, None)


def engine_pool(
    model: str | None = None,
    devices: Sequence[str] | None = None,
    base_urls: Sequence[str] | None = None,
    **settings: Any,
) -> EnginePool:
    """Engines for several models to share: `ChatPingPong(pool=engine_pool(...))`.

    Args:
        model: a folder or Hugging Face id; None is the default model.
        devices: where engines run, one each; None takes two devices where there are two.
        base_urls: vLLM servers to use instead of devices, like 'http://a:8000/v1'.
        settings: of the engines, under vLLM's names: those of `ChatPingPong`, others in `engine_args`; with servers,
            `api_key` (a text), `timeout`, `max_retries`, `http_client` and `kv_pool_ratio`.

    Raises:
        ConfigError: the model, a device, a base URL or a setting cannot work.
    """
    if base_urls is not None:
        if devices is not None:
            raise SettingOfServers("devices= and base_urls= cannot go together.")
        names = [f.name for f in fields(ServerConfig) if f.name not in ("model", "addresses")]
        refuse_unknown(settings, names, "A pool of servers")
        return serving_of_servers(model, base_urls, settings).pool
    refuse_unknown(settings, [f.name for f in fields(EngineConfig) if f.name not in ("model", "devices")], "A pool")
    return make_serving(model, devices, settings).pool


def serving_on(pool: EnginePool, model: str | None, prompting: Prompting = _OWN) -> Serving:
    """The same for engines that somebody else has made.

    Raises:
        ConfigError: the model has no tokenizer or chat template.
    """
    engine, tokenizer = pool.engines[0], prompting.tokenizer
    if tokenizer is None and isinstance(engine, FakeEngine):
        tokenizer = engine.tokenizer
    if tokenizer is None:
        name = getattr(engine, "model", None) or resolve_model(model)
        tokenizer = load_tokenizer(**(engine.tokenizer_args if isinstance(engine, VllmEngine) else {"model": name}))
    context = engine.max_model_len if isinstance(engine, FakeEngine) else None
    return Serving(pool, prompting.template(tokenizer, of_servers=isinstance(engine, ServerEngine)), context)
