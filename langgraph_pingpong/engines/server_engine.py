"""A vLLM server somewhere else, through the OpenAI client. Only this module and server_processes.py import it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.config import ServerAddress, ServerConfig
from langgraph_pingpong.engines.base import ABORTED, FAILED, PREFILL_PRIORITY, Delta, Request
from langgraph_pingpong.engines.server_answers import (
    cached_tokens,
    extra,
    served_as,
    status,
    to_delta,
    words,
)
from langgraph_pingpong.errors import (
    CallRefused,
    ConfigError,
    EngineDead,
    PingPongError,
    ServerBusy,
    ServerFailed,
    WrongServer,
)
from langgraph_pingpong.keys import shows_key, without_key
from langgraph_pingpong.kv_budget import KvBudget

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Completion, CompletionChoice

NO_KEY = "none"
"""What is sent where no key is set: never a key that the environment holds for somebody else's server."""

START_TIMEOUT_S = 20.0
"""How long a server may take to say what it serves, and to answer one token, in seconds."""

PIECE_TOKENS = 512
"""Tokens of a prefill that are sent at once while answers run there."""

USUAL_BLOCK_SIZE = 16
"""vLLM's own on a GPU, for servers that do not tell theirs: an append goes out whenever so many tokens are final."""

MAX_CAUSE = 400
"""Characters of what a server says of an error that are shown."""

_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"', re.MULTILINE)
_REFUSALS = (400, 413, 422)
_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server told of itself. `name` is what requests call the model; lengths are in tokens."""

    name: str
    max_model_len: int
    block_size: int = USUAL_BLOCK_SIZE
    takes_priority: bool = True


class ServerEngine:
    """One copy of the model, behind a vLLM server's `/v1/completions`.

    Prompts go there as token ids and come back in the first chunk. Closing a stream closes its connection, whereupon
    vLLM aborts the request.
    """

    def __init__(self, config: ServerConfig, address: ServerAddress, peers: Sequence[ServerEngine] = ()) -> None:
        self._config = config
        self._address = address
        self._peers = peers
        self._client: AsyncOpenAI | None = None
        self._served: Served | None = None
        self._salt: str | None = None
        self._running: set[str] = set()
        self.budget = KvBudget()
        """Of unknown size: the cache is others', too."""

    @property
    def device(self) -> str:
        """The server, as 'host:port'."""
        return str(self._address)

    @property
    def model(self) -> str:
        """The folder or Hugging Face id of the model, on this side."""
        return self._config.model

    @property
    def block_size(self) -> int:
        """Tokens per KV cache block, as the server's metrics tell."""
        return self._known.block_size

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._known.max_model_len

    @property
    def piece_tokens(self) -> int:
        """How many tokens of a prefill to send at once while answers run: what a server's step takes in its stride."""
        return PIECE_TOKENS

    @property
    def cache_tokens(self) -> None:
        """Unknown: the cache is others', too."""

    @property
    def kv(self) -> None:
        """Servers give each other no KV here."""

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent and are neither finished nor aborted."""
        return len(self._running)

    @property
    def _known(self) -> Served:
        if self._served is None:
            raise EngineDead(f"The engine on {self.device} is not running.")
        return self._served

    # -- start and stop ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask the server what it serves, and for one token.

        Raises:
            ConfigError: `http_client` makes something else than a client.
            WrongServer: it serves another model than `model`, or another context length than the other servers.
            ServerFailed: it cannot be reached, wants another key, or is no vLLM server.
        """
        self._client = await asyncio.to_thread(self._connect)
        try:
            await self._ask()
        except BaseException:
            await self.stop()
            raise

    async def restart(self) -> None:
        """Ask the server again what it serves, and for one token. Open requests go on.

        Raises:
            WrongServer: it serves something else by now.
            ServerFailed: it cannot be used.
        """
        before = self._served
        try:
            await self._ask(before.takes_priority if before else None)
        except BaseException:
            self._served = before
            raise

    async def _ask(self, takes_priority: bool | None = None) -> None:
        with self._clear_errors():
            models = await self._starting.models.list()
            named = served_as(self._config.model, models.data, self.device)
            self._served = Served(*named, await self._ask_block_size())
            self._compare_with_peers()
            self._served = replace(self._served, takes_priority=await self._try_priority(takes_priority))

    def _connect(self) -> AsyncOpenAI:
        from openai import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT, AsyncOpenAI, Timeout

        config = self._config
        several = len(config.addresses) > 1  # then a request goes to another one, within the time of the call
        silence = DEFAULT_TIMEOUT.read if config.timeout is None else config.timeout / len(config.addresses)
        retries = 0 if several else DEFAULT_MAX_RETRIES
        try:
            return AsyncOpenAI(
                base_url=self._address.url,
                api_key=config.api_key or NO_KEY,
                timeout=Timeout(silence, connect=DEFAULT_TIMEOUT.connect),
                max_retries=retries if config.max_retries is None else config.max_retries,
                http_client=config.http_client() if config.http_client else None,
            )
        except TypeError as error:
            raise ConfigError(f"What http_client= made cannot be used: {error}") from error

    @property
    def _starting(self) -> AsyncOpenAI:
        return self._connected.with_options(timeout=START_TIMEOUT_S, max_retries=0)

    async def _ask_block_size(self) -> int:
        """From vLLM's metrics, where they can be read: the API does not tell."""
        from openai import APIStatusError

        try:
            metrics = await self._starting.get(self._address.at_root("/metrics"), cast_to=str)
        except APIStatusError:
            return USUAL_BLOCK_SIZE
        found = _BLOCK_SIZE.search(metrics)
        return int(found[1]) if found else USUAL_BLOCK_SIZE

    def _compare_with_peers(self) -> None:
        mine = self._known
        for peer in self._peers:
            if (theirs := peer._served) is not None and theirs.max_model_len != mine.max_model_len:
                raise WrongServer(
                    f"{peer.device} holds contexts of {theirs.max_model_len} tokens and {self.device} of "
                    f"{mine.max_model_len}, and a prompt must fit both."
                )

    async def _try_priority(self, known: bool | None) -> bool:
        """Whether the server takes priorities; `known` from before. Some releases refuse them without their scheduling.

        While others are answered, a server that does may keep what has a low one waiting for long.
        """
        takes = known
        if takes is None:
            try:
                await self._try_token(PREFILL_PRIORITY)
                return True
            except CallRefused:
                takes = False
            except ServerBusy:
                takes = True
        await self._try_token(0)
        return takes

    async def _try_token(self, priority: int) -> None:
        prompt = (1, 2)
        with self._clear_errors():
            answer = await self._complete(self._starting, Request(prompt, {"max_tokens": 1}), priority)
        if [extra(choice, "prompt_token_ids") for choice in answer.choices] != [list(prompt)]:
            raise ServerFailed(f"{self.device} does not answer with the token ids of the prompt, as vLLM does.")

    async def stop(self) -> None:
        """Let go of the server, which runs on; open requests fail."""
        client, self._client, self._served = self._client, None, None
        if client is not None:
            await client.close()

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream the answer; closing the iterator early aborts the request.

        Raises:
            CallRefused: the server cannot do what the request asks for.
            ServerFailed: the server failed, cannot be reached, or ended its answer too early.
            EngineDead: the engine was stopped.
        """
        with self._in_flight(request) as client:
            stream = await client.completions.create(
                model=self._known.name,
                prompt=list(request.prompt_token_ids),
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self._body(request),
            )
            async with stream, aclosing(self._deltas(stream, request.sampling)) as deltas:
                async for delta in deltas:
                    yield delta

    async def prefill(self, request: Request) -> int | None:
        """Compute a prompt's KV cache, after the answers that wait, where the server takes priorities.

        vLLM refuses `max_tokens=0`, so one token is sampled and dropped.

        Raises:
            ServerBusy: it has no time for it. That may be because answers go first.
        """
        with self._in_flight(request) as client:
            once = client.with_options(max_retries=0)  # a prefill is a hint: the answer does without
            bare = {"max_tokens": 1, "temperature": 0.0}
            answer = await self._complete(once, replace(request, sampling=bare), PREFILL_PRIORITY)
            return cached_tokens(answer)

    def open_appends(self, cache_salt: str | None = None, *, keep: bool = False) -> None:
        """The API has no prompts that grow."""

    async def reset_prefix_cache(self) -> None:
        """Find no cached prefix any more: what is sent from now on carries a new salt. Others' cache stays."""
        self._salt = secrets.token_urlsafe(32)

    async def _complete(self, client: AsyncOpenAI, request: Request, priority: int) -> Completion:
        body = self._body(request)
        if priority and self._known.takes_priority:
            body["priority"] = priority
        answer = await client.completions.create(
            model=self._known.name, prompt=list(request.prompt_token_ids), extra_body=body
        )
        for choice in answer.choices:
            self._check_not_given_up(choice)
        return answer

    def _body(self, request: Request) -> dict[str, Any]:
        """What OpenAI's API does not have; vLLM's names for it are those of `SamplingParams`."""
        salt = "-".join(filter(None, (self._salt, request.cache_salt)))
        return {**request.sampling, **({"cache_salt": salt} if salt else {}), "return_token_ids": True}

    async def _deltas(self, chunks: AsyncIterable[Completion], sampling: Mapping[str, Any]) -> AsyncGenerator[Delta]:
        """The chunks as deltas. The last one waits for the usage, which follows it and tells what was cached."""
        likeliest, unfinished = sampling.get("logprobs") or 0, sampling.get("n", 1)
        last, first, cached = None, True, None
        async for chunk in chunks:
            cached = cached_tokens(chunk)
            for choice in chunk.choices:
                self._check_not_given_up(choice)
                delta, first = to_delta(choice, first, likeliest), False
                unfinished -= delta.finish_reason is not None
                if unfinished:
                    yield delta
                else:
                    last = delta
        if last is None:
            raise ServerFailed(f"{self.device} ended its answer before it was complete.")
        yield replace(last, num_cached_tokens=cached)

    def _check_not_given_up(self, choice: CompletionChoice) -> None:
        """A server that shuts down, or is paused, ends what runs as if it were complete."""
        if choice.finish_reason in (ABORTED, FAILED):
            raise ServerFailed(f"{self.device} gave the request up, as when it is told to end.")

    @property
    def _connected(self) -> AsyncOpenAI:
        if self._client is None:
            raise EngineDead(f"The engine on {self.device} is not running.")
        return self._client

    @contextmanager
    def _in_flight(self, request: Request) -> Iterator[AsyncOpenAI]:
        client = self._connected
        self._running.add(request.request_id)
        try:
            with self._clear_errors():
                yield client
        finally:
            self._running.discard(request.request_id)

    # -- errors --------------------------------------------------------------------------------------------

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Whatever goes wrong with the server, from refused connections to answers that are no JSON, in one form."""
        try:
            yield
        except PingPongError:
            raise
        except Exception as error:
            if shows_key(
                error, self._config.api_key
            ):  # servers quote a key that they refuse: keep it out of tracebacks
                raise self._in_our_words(error) from None
            raise self._in_our_words(error) from error

    def _in_our_words(self, error: Exception) -> PingPongError:
        from openai import APIConnectionError, APIError, APITimeoutError

        if self._client is None:
            return EngineDead(f"The engine on {self.device} was stopped during the request.")
        if isinstance(error, APITimeoutError):
            return ServerBusy(f"{self.device} did not answer in time.")
        if isinstance(error, APIConnectionError):
            return ServerFailed(f"The connection to {self.device} failed: {self._why(error)}")
        if not isinstance(error, APIError):
            return ServerFailed(f"The answer of {self.device} broke off or could not be read: {self._why(error)}")
        code, said = status(error), self._shown(words(error))
        if code in _REFUSALS:
            return CallRefused(f"{self.device} refused the call: {said}")
        kind = ServerBusy if code in _BUSY else ServerFailed
        return kind(f"{self.device} answered with {f'status {code}' if code else 'an error'}: {said}")

    def _why(self, error: Exception) -> str:
        cause = error.__cause__ or error
        return self._shown(f"{type(cause).__name__}: {cause}")

    def _shown(self, text: str) -> str:
        """The key is hidden before the text is cut: half of one would not be found."""
        return without_key(text, self._config.api_key)[:MAX_CAUSE]


def build_server_engines(config: ServerConfig) -> list[ServerEngine]:
    """One engine for each server, not started yet."""
    engines: list[ServerEngine] = []
    engines += [ServerEngine(config, address, peers=engines) for address in config.addresses]
    return engines
