"""The chat model: the only thing that changes in a user's graph."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableBinding, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from langgraph_pingpong.config import parse_devices, refuse_unknown
from langgraph_pingpong.edges import REHEARSAL, Rehearsal, running_task
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.errors import PromptTooLong
from langgraph_pingpong.growing_prompt import CallKey
from langgraph_pingpong.planning import PlannedCall, planner_of, to_template_messages
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.serving import Serving, make_serving, serving_on
from langgraph_pingpong.session import Call, Certificate, session_of
from langgraph_pingpong.trace import Trace

Answer = tuple[Delta, Certificate | None]

_CONFIG: ContextVar[RunnableConfig | None] = ContextVar("langgraph_pingpong_config", default=None)
"""The config of the public call under way: the private methods that do the work are not given it."""

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_MORE_SAMPLING = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "skip_special_tokens",
)
"""Further names of vLLM's SamplingParams that a call may carry."""
_ENGINE_SETTINGS = (
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "engine_args",
)


@contextmanager
def _calling(config: RunnableConfig | None) -> Iterator[None]:
    token = _CONFIG.set(ensure_config(config))
    try:
        yield
    finally:
        _CONFIG.reset(token)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call, ready for the engine."""

    serving: Serving
    call: Call
    owner: object = None
    planned: PlannedCall | None = None

    def end(self, answer: str | None) -> None:
        """The call is over; `answer` is its text, None if it did not finish."""
        if self.planned is not None:
            self.planned.end(answer)


class _Lazy:
    """Makes the engines and the template on first use, once; copies of a model share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: Serving | None = None

    def get(self, make: Callable[[], Serving]) -> Serving:
        with self._lock:
            if self._value is None or self._value.pool.closed:
                self._value = make()
            return self._value

    def close(self) -> None:
        with self._lock:
            if self._value is not None:
                self._value.pool.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class ChatPingPong(BaseChatModel):
    """A chat model on your own devices whose calls prefill the prompts that follow them in a LangGraph graph.

    Put it into a graph in place of another chat model; nothing else changes. While one node's answer is decoded
    on one device, the next node's prompt is prefilled on another.

    Engines start with the first call, or with `start()`, and end with `close()`, with the `with` block, or with
    the interpreter. Settings of engines carry vLLM's names.

        model = ChatPingPong(model="Qwen/Qwen3-14B-AWQ", devices=["cuda:0", "cuda:1"], max_tokens=256)
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    """A folder or Hugging Face id; None is the small default model, made ready on first use."""
    devices: Sequence[str] | None = None
    """Where engines run, one each: 'cuda:N', 'cpu:N' or 'fake:N'; None takes two devices where there are two."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The longest answer, in tokens; None is what the context leaves."""
    temperature: float | None = None
    """0 always takes the likeliest token; None is the model's own default, as for the next three."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Texts that end the answer; they are not part of it."""
    overlap: Literal["on", "off"] = "on"
    """'off' is the same program without prefills: the baseline."""
    defer_downstream: bool = True
    """Prefill the next prompt from the upstream's first token on; False starts with the upstream's prefill."""
    chat_template: str | None = None
    """A Jinja template in place of the model's own."""
    dtype: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    enforce_eager: bool | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments, under vLLM's name."""
    pool: EnginePool | None = Field(default=None, exclude=True)
    """Engines to share with other models; who made the pool closes it."""
    tokenizer: Any = Field(default=None, exclude=True)
    """A tokenizer object in place of the model's own."""

    _lazy: _Lazy = PrivateAttr(default_factory=_Lazy)
    _trace: Trace = PrivateAttr(default_factory=Trace)

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, values: Any) -> Any:
        if isinstance(values, dict):
            names = {*cls.model_fields, "stop_sequences"}
            refuse_unknown(values, names, "ChatPingPong")
            if (devices := values.get("devices")) is not None:
                parse_devices(devices)
        return values

    @property
    def _llm_type(self) -> str:
        return "langgraph-pingpong"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, **{name: getattr(self, name) for name in _SAMPLING}, "stop": self.stop}

    @property
    def trace(self) -> Trace:
        """The stream of events of every call of this model; subscribe a sink to see them."""
        return self._trace

    # -- engines -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the engines now instead of with the first call.

        Raises:
            ConfigError: the settings cannot work on this machine.
            EngineStartFailed: an engine did not come up.
        """
        self._serving().pool.start()
        return self

    def close(self) -> None:
        """Shut down the engines that this model started. A later call starts them again."""
        if self.pool is None:
            self._lazy.close()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix on every engine, for a cold start."""
        self._serving().pool.reset_prefix_cache()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await asyncio.to_thread(self.close)

    def _serving(self) -> Serving:
        return self._lazy.get(self._make_serving)

    def _make_serving(self) -> Serving:
        if self.pool is not None:
            return serving_on(self.pool, self.model, self.tokenizer, self.chat_template)
        settings = {name: getattr(self, name) for name in _ENGINE_SETTINGS}
        return make_serving(self.model, self.devices, settings, self.tokenizer, self.chat_template)

    # -- tokens --------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer."""
        return self._serving().template.encode(text)

    # -- calls ---------------------------------------------------------------------------------------------

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer a prompt."""
        if rehearsal := REHEARSAL.get():
            return self._rehearse(rehearsal, input, kwargs)
        with _calling(config):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer a prompt."""
        if rehearsal := REHEARSAL.get():
            return self._rehearse(rehearsal, input, kwargs)
        with _calling(config):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answer a prompt piece by piece."""
        if rehearsal := REHEARSAL.get():
            yield AIMessageChunk(content=self._rehearse(rehearsal, input, kwargs).text)
            return
        chunks = super().stream(input, config, stop=stop, **kwargs)
        # Only while the first chunk is made: a generator shares its caller's context, so that what it sets there
        # would be seen by the caller between chunks.
        with _calling(config):
            first = next(chunks)
        yield first
        yield from chunks

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """Answer a prompt piece by piece."""
        if rehearsal := REHEARSAL.get():
            yield AIMessageChunk(content=self._rehearse(rehearsal, input, kwargs).text)
            return
        async with aclosing(super().astream(input, config, stop=stop, **kwargs)) as chunks:  # type: ignore[type-var]
            with _calling(config):
                first = await anext(chunks)
            yield first
            async for chunk in chunks:
                yield chunk

    def _rehearse(self, rehearsal: Rehearsal, input: LanguageModelInput, kwargs: Mapping[str, Any]) -> AIMessage:
        return rehearsal.on_call(self, self._convert_input(input).to_messages(), kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prepared = self._prepare(messages, stop, kwargs, _CONFIG.get() or ensure_config())
        with closing(prepared.serving.pool.loop.iterate(lambda: self._answer(prepared))) as answers:
            for delta, certificate in answers:
                yield self._chunk(delta, certificate)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        config = _CONFIG.get() or ensure_config()
        # In a thread: the first call starts the engines, and a long prompt takes milliseconds to encode.
        prepared = await asyncio.to_thread(self._prepare, messages, stop, kwargs, config)
        async with aclosing(prepared.serving.pool.loop.aiterate(lambda: self._answer(prepared))) as answers:
            async for delta, certificate in answers:
                yield self._chunk(delta, certificate)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any], config: RunnableConfig
    ) -> _Prepared:
        """Everything that comes before the engine: the prompt's ids, the checks, the plan; starts the engines."""
        sampling = self._sampling(stop, kwargs)
        serving = self._serving()
        asked = to_template_messages(messages)
        ids = serving.template.prompt_ids(asked)
        task = running_task(config)
        node = task.site[-1] if task else ""
        limit = serving.context or (serving.pool.engines[0].max_model_len if serving.pool.started else None)
        self._check_length(node, len(ids), limit)
        serving.pool.start()
        room = self._check_length(node, len(ids), serving.pool.engines[0].max_model_len)
        request = Request(ids, {"max_tokens": room, **sampling})
        if task is None:
            return _Prepared(serving, Call(request))
        if self.overlap == "off" or len(serving.pool.engines) < 2:
            key = CallKey(task.site, push=task.push)
            return _Prepared(serving, Call(request, key, task.step), task.owner)
        planned = planner_of(serving.pool).begin(
            task, asked, serving.template, serving.template.render, lambda model, more: self._renderer(model, serving)
        )
        call = Call(request, planned.record.key, task.step, planned.plan, self.defer_downstream)
        return _Prepared(serving, call, task.owner, planned)

    def _check_length(self, node: str, tokens: int, limit: int | None) -> int:
        """The tokens that are left for the answer."""
        if limit is not None and tokens >= limit:
            where = f"of node {node!r} " if node else ""
            raise PromptTooLong(f"The prompt {where}has {tokens} tokens, and the model's context holds {limit}.")
        return (limit or tokens + 1) - tokens

    def _sampling(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unknown(kwargs, (*_SAMPLING, *_MORE_SAMPLING), "A call")
        own = {name: getattr(self, name) for name in _SAMPLING} | {"stop": self.stop}
        given = {**own, **kwargs} | ({"stop": stop} if stop is not None else {})
        return {name: value for name, value in given.items() if value is not None}

    def _renderer(self, model: Any, serving: Serving) -> Callable[[Sequence[BaseMessage]], str] | None:
        """How prompts of another node's model are rendered, if it is served by the same engines."""
        while isinstance(model, RunnableBinding):
            model = model.bound
        if not isinstance(model, ChatPingPong) or model._serving().pool is not serving.pool:
            return None
        template = model._serving().template
        return lambda messages: template.render(to_template_messages(messages))

    async def _answer(self, prepared: _Prepared) -> AsyncGenerator[Answer]:
        pool = prepared.serving.pool
        session = session_of(prepared.owner, pool, self._trace)
        if prepared.planned is not None:
            prepared.planned.close_with_graph(partial(pool.loop.call_soon, session.close))
        said: list[str] = []
        answer: str | None = None
        try:
            async with aclosing(session.answer(prepared.call)) as answers:
                async for delta, certificate in answers:
                    said.append(delta.text)
                    if certificate is not None:
                        answer = "".join(said)
                        prepared.end(answer)  # before the node goes on: its next call draws on this answer
                    yield delta, certificate
        finally:
            if answer is None:
                prepared.end(None)

    def _chunk(self, delta: Delta, certificate: Certificate | None) -> ChatGenerationChunk:
        message = AIMessageChunk(content=delta.text)
        if certificate is not None:
            message.usage_metadata = _usage(certificate)
            message.chunk_position = "last"
            message.response_metadata = {
                "model_name": self.model or "default",
                "finish_reason": delta.finish_reason,
                "pingpong": certificate.to_dict(),
            }
        return ChatGenerationChunk(message=message)


def _usage(certificate: Certificate) -> UsageMetadata:
    """The call's own tokens; what edges prefilled is in the certificate."""
    return UsageMetadata(
        input_tokens=certificate.prompt_tokens,
        output_tokens=certificate.output_tokens,
        total_tokens=certificate.prompt_tokens + certificate.output_tokens,
        input_token_details=InputTokenDetails(cache_read=certificate.cached),
    )
