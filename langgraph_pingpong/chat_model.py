"""The chat model: the only thing that changes in a user's graph."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig

from langgraph_pingpong.after_tools import AfterTools
from langgraph_pingpong.anchoring import Anchoring
from langgraph_pingpong.answers import Answer, AnswerChunks
from langgraph_pingpong.calling import current_config
from langgraph_pingpong.calls import PROMPT_SHAPING, Terms, terms_of
from langgraph_pingpong.custom_events import streamed
from langgraph_pingpong.edges import RunningTask, running_task
from langgraph_pingpong.edges.book import Shaping
from langgraph_pingpong.edges.sources import RenderMessages
from langgraph_pingpong.engines.base import Reader, Request, Said, all_content, within
from langgraph_pingpong.engines.vllm_parsers import Expected, check_parsers, open_parser
from langgraph_pingpong.errors import CallRefused, CallTimedOut, PromptTooLong
from langgraph_pingpong.growing_prompt import CallKey
from langgraph_pingpong.loop import all_at_once
from langgraph_pingpong.planning import PlannedCall, cache_salt, planner_of
from langgraph_pingpong.pool import EnginePool
from langgraph_pingpong.prompts import HERMES, has_place_for_tools, render_prompt
from langgraph_pingpong.run_ends import close_with_graph
from langgraph_pingpong.run_metadata import add_to_run
from langgraph_pingpong.serving import Prompting, Serving, make_serving, serving_of_servers, serving_on
from langgraph_pingpong.session import Call, session_of
from langgraph_pingpong.settings import CLIENT_SETTINGS, ENGINE_SETTINGS
from langgraph_pingpong.tokens import as_text
from langgraph_pingpong.tools import Method, ToolLike, openai_tools, parse_tool_choice, structured_output
from langgraph_pingpong.trace import Trace
from langgraph_pingpong.whole_calls import WholeCalls


class ChatPingPong(WholeCalls, Anchoring):
    """A chat model on your own devices whose calls prefill the prompts that follow them in a LangGraph graph.

    Put it into a graph in place of another chat model; nothing else changes. While one node's answer is decoded
    on one device, the next node's prompt is prefilled on another.

    Engines start with the first call, or with `start()`, and end with `close()`, with the `with` block, or with
    the interpreter. Settings of engines carry vLLM's names.

        model = ChatPingPong(model="Qwen/Qwen3-14B-AWQ", devices=["cuda:0", "cuda:1"], max_tokens=256)

    With `base_urls` in place of `devices` the engines are those of vLLM servers, which are not started or stopped.
    """

    @property
    def trace(self) -> Trace:
        """The stream of events of every call of this model; subscribe a sink to see them."""
        return self._trace

    # -- engines -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the engines now instead of with the first call.

        Raises:
            ConfigError: the settings cannot work on this machine, or with these servers.
            EngineStartFailed: an engine did not come up.
            ServerFailed: a server cannot be used.
        """
        self._serving().pool.start()
        return self

    def close(self) -> None:
        """Shut down the engines that this model and its copies started. A later call starts them again."""
        if self.pool is None:
            self._servings.close()

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

    def __getstate__(self) -> dict[Any, Any]:
        """A pickled model travels without its engines and makes its own where it is used. Its key stays, too."""
        if self.pool is not None:
            raise TypeError("A model on a pool of yours cannot be pickled: its engines belong to this process.")
        state = super().__getstate__()
        return {**state, "__dict__": {**state["__dict__"], "api_key": None}}

    def _serving(self) -> Serving:
        return self._lazy.get(self._make_serving).using(self.chat_template)

    @property
    def _pool_in_use(self) -> EnginePool | None:
        """The engines that calls go to; those of its own are made by the first call, not here."""
        made = self._lazy.made
        return made.pool if made else self.pool

    def _make_serving(self) -> Serving:
        # vLLM may be missing where no parser was chosen. A model from a checkpoint has every setting given.
        if self.reasoning_parser or self.tool_parser != type(self).model_fields["tool_parser"].default:
            check_parsers(self.tool_parser, self.reasoning_parser)
        prompting = Prompting(self.tokenizer, self.chat_template, self.escape_markers)
        if self.pool is not None:
            return serving_on(self.pool, self.model, prompting)
        if self.base_urls is not None:
            client = {name: getattr(self, name) for name in CLIENT_SETTINGS}
            client["api_key"] = self.api_key.get_secret_value() if self.api_key else None
            return serving_of_servers(self.model, self.base_urls, client, prompting)
        settings = {name: getattr(self, name) for name in ENGINE_SETTINGS}
        settings["same_device"] = self.overlap == "same-device"
        if self.reasoning_parser:  # so that a grammar waits until the reasoning is over
            settings["engine_args"] = {"reasoning_parser": self.reasoning_parser, **self.engine_args}
        return make_serving(self.model, self.devices, settings, prompting)

    # -- prompts -------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> str:
        """The prompt of a call with these keyword arguments, as text; those that do not shape it are not looked at."""
        shaping = {name: kwargs[name] for name in PROMPT_SHAPING if name in kwargs}
        return self._rendered(messages, terms_of(self._call_settings, None, shaping))

    def _rendered(self, messages: Sequence[BaseMessage], terms: Terms) -> str:
        template = self._serving().template
        if terms.tools and self.tool_parser not in HERMES and not has_place_for_tools(template):
            raise CallRefused(
                f"The chat template has no place for tools. They can be described to the model in the Hermes format "
                f"only, which tool_parser={self.tool_parser!r} does not read: pass chat_template= or another parser."
            )
        return render_prompt(template, messages, terms.tools, terms.template_kwargs)

    # -- tools and structured output -----------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it can call.

        They are given to the chat template. One that has no place for tools gets them in the system message instead,
        in the Hermes format, and calls and results as text.

        Args:
            tools: functions, classes, LangChain tools or schemas.
            tool_choice: "auto" (the model decides), "any", "required" or True (some tool, enforced by a grammar),
                "none", or the name of a tool.
            strict: bind the arguments to their schema also where the model decides whether to call.
            kwargs: other arguments of a call, for example `parallel_tool_calls=False`.

        Raises:
            CallRefused: the choice does not fit the tools, or one of these is no function.
        """
        formatted = openai_tools(tools, strict)
        choice = parse_tool_choice(tool_choice, formatted)
        return self.bind(tools=formatted, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers that are objects of a schema, enforced by a grammar.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema with a title; answers to the first are instances
                of it, else dicts. "json_mode" can do without.
            method: "json_schema" answers in JSON of that schema, "function_calling" calls a tool of that schema,
                "json_mode" answers in any JSON; say in the prompt what it should hold.
            include_raw: answer with {"raw": message, "parsed": object or None, "parsing_error": error or None}.
            strict: make every field of the schema required.
            kwargs: other arguments of a call.

        Raises:
            CallRefused: the method is unknown, or there is no schema.
        """
        return structured_output(self, schema, method, include_raw, strict, **kwargs)

    # -- calls ---------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prepared, made = self._begun(messages, terms_of(self._call_settings, stop, kwargs), current_config())
        with closing(prepared.serving.pool.loop.iterate(lambda: all_at_once(self._answer(prepared)))) as whole:
            return made.result(next(whole))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        terms = terms_of(self._call_settings, stop, kwargs)
        prepared, made = await self._begun_aside(messages, terms)
        loop = prepared.serving.pool.loop
        async with aclosing(loop.aiterate(lambda: all_at_once(self._answer(prepared)))) as whole:
            return made.result(await anext(whole))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        terms = _single(terms_of(self._call_settings, stop, kwargs))
        prepared, made = self._begun(messages, terms, current_config())
        with closing(prepared.serving.pool.loop.iterate(lambda: self._answer(prepared))) as answers:
            for answer in answers:
                yield from made.chunks(*answer)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        terms = _single(terms_of(self._call_settings, stop, kwargs))
        prepared, made = await self._begun_aside(messages, terms)
        async with aclosing(prepared.serving.pool.loop.aiterate(lambda: self._answer(prepared))) as answers:
            async for answer in answers:
                for chunk in made.chunks(*answer):
                    yield chunk

    def _begun(
        self, messages: list[BaseMessage], terms: Terms, config: RunnableConfig
    ) -> tuple[_Prepared, AnswerChunks]:
        """A call, ready for the engine, and what makes messages of what that will say."""
        prepared = self._prepare(messages, terms, config)
        return prepared, AnswerChunks(self.model_name, partial(add_to_run, config, self.callbacks), self.output_version)

    async def _begun_aside(self, messages: list[BaseMessage], terms: Terms) -> tuple[_Prepared, AnswerChunks]:
        """The same beside a caller's event loop.

        The first call starts the engines, and a long prompt takes milliseconds to encode.
        """
        run = partial(contextvars.copy_context().run, self._begun, messages, terms, current_config())
        return await asyncio.get_running_loop().run_in_executor(self._lazy.threads, run)

    def _prepare(self, messages: list[BaseMessage], terms: Terms, config: RunnableConfig) -> _Prepared:
        """Everything that comes before the engine: the prompt's ids, the checks, the plan; starts the engines."""
        serving = self._serving()
        ids = tuple(serving.template.encode(self._rendered(messages, terms)))
        task = running_task(config)
        node = task.site[-1] if task else ""
        limit = serving.pool.engines[0].max_model_len if serving.pool.started else serving.context
        self._check_length(node, len(ids), limit)
        serving.pool.start()
        room = self._check_length(node, len(ids), serving.pool.engines[0].max_model_len)
        sampling, read = self._reading(serving, terms, ids)
        request = Request(ids, within(room, sampling), cache_salt=cache_salt(config))
        self._trace.called(request.request_id)
        decode = serving.decoder(sampling)
        if task is None:
            return _Prepared(serving, Call(request, read=read, trace=self._trace, decode=decode))
        trace = streamed(self._trace, task) if self.custom_events else self._trace
        key = CallKey(task.site, push=task.push)
        same_device = self.overlap == "same-device"
        call = Call(request, key, task.step, None, self.defer_downstream, read, trace, decode, same_device)
        if self.overlap == "off":
            return _Prepared(serving, call, task)
        shaping = Shaping(tuple(terms.tools), dict(terms.template_kwargs), self.chat_template)
        turns, others = [*map(as_text, convert_to_openai_messages(messages))], partial(_renderer_of, serving)
        begin = partial(planner_of(serving.pool).begin, task, turns, serving.template, shaping, others)
        return _Prepared(serving, call, task, begin, sampling)

    def _check_length(self, node: str, tokens: int, limit: int | None) -> int:
        """The tokens that are left for the answer."""
        if limit is not None and tokens >= limit:
            where = f"of node {node!r} " if node else ""
            raise PromptTooLong(f"The prompt {where}has {tokens} tokens, and the model's context holds {limit}.")
        return (limit or tokens + 1) - tokens

    def _reading(self, serving: Serving, terms: Terms, ids: Sequence[int]) -> tuple[Mapping[str, Any], Reader]:
        """How to sample the answer, and how to take it apart."""
        if not (terms.tools or self.reasoning_parser):
            return terms.sampling, all_content
        expected = Expected(
            self.tool_parser,
            self.reasoning_parser,
            terms.tools,
            terms.tool_choice,
            terms.parallel_tool_calls,
            terms.template_kwargs,
        )
        return open_parser(expected, serving.template, ids, terms.sampling)

    async def _answer(self, prepared: _Prepared) -> AsyncGenerator[Answer]:
        pool = prepared.serving.pool
        call, task = prepared.call, prepared.task
        session = session_of(task.owner if task else None, pool)
        planned = self._begin(prepared)
        after = AfterTools(task, planned)
        beside = task.beside if task else frozenset()
        call = replace(call, tools=after, beside=beside, branch_prefetch_limit=self.branch_prefetch_limit)
        if planned is not None:
            call = replace(call, key=planned.record.key, plan=planned.plan)
        close_with_graph(session, task, planned)
        all_said: list[Said] = []
        answer: str | None = None
        try:
            async with asyncio.timeout(self.timeout), aclosing(session.answer(call)) as answers:
                async for delta, said, certificate in answers:
                    if delta.index == 0:
                        all_said.append(said)
                    if certificate is not None:
                        answer = after.end(all_said)
                    yield delta, said, certificate
        except TimeoutError as error:
            raise CallTimedOut(f"The answer was not complete after {self.timeout} s.") from error
        finally:
            if answer is None and planned is not None:
                planned.end(None)

    def _begin(self, prepared: _Prepared) -> PlannedCall | None:
        """A call of a graph begins, of which edges may leave."""
        planned = prepared.begin() if prepared.begin else None
        if planned is not None and self.speculate:
            planned.remember_sampling(prepared.sampling)
        elif planned is not None:
            planned.forget_sampling()
        return planned


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call, ready for the engine; `begin` makes its plan, where edges may leave it.

    `sampling` is what the call asks for, before its limit is brought down to what the context leaves.
    """

    serving: Serving
    call: Call
    task: RunningTask | None = None
    begin: Callable[[], PlannedCall] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def _single(terms: Terms) -> Terms:
    if terms.answers > 1:
        raise CallRefused(f"One answer can be streamed, not n={terms.answers}.")
    return terms


def _renderer_of(serving: Serving, model: Any, more: Mapping[str, Any]) -> RenderMessages | None:
    """Renders prompts as another node's model does, with `more` arguments, if it is served by the same engines."""
    kwargs = dict(more)
    while isinstance(model, RunnableBinding):
        kwargs = {**model.kwargs, **kwargs}
        model = model.bound
    if not isinstance(model, ChatPingPong):
        return None
    if model._pool_in_use is not serving.pool:
        return None
    return partial(model._render, kwargs=kwargs)
