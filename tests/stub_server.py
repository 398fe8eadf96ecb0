"""A small server that answers as vLLM's OpenAI server does, from a modelled engine, and misbehaves on demand."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from langgraph_pingpong import FakeEngine
from langgraph_pingpong.engines.base import Delta, Request

Fault = Callable[[web.Request, web.StreamResponse | None], Awaitable[web.StreamResponse | None]]
"""Called before an answer, then after each of its chunks with the response; what it returns is sent instead."""

API = ("model", "prompt", "stream", "stream_options", "return_token_ids", "cache_salt", "priority")


@dataclass
class StubServer:
    """Serves `engine` as `model`; `bodies` and `keys` are what requests for completions brought along."""

    engine: FakeEngine
    model: str = "stub"
    key: str | None = None
    fault: Fault | None = None
    fault_at: str = "/v1/completions"
    priorities: bool = True
    tells_ids: bool = True
    tells_cached: bool = True
    tells_block_size: bool = True
    tls: ssl.SSLContext | None = None
    cards: Sequence[dict[str, Any]] = ()
    """What it says that it serves, where that is more than `model`, as a gateway does."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _caches: dict[str | None, set[int]] = field(default_factory=dict)
    _runner: web.AppRunner | None = None

    async def start(self) -> str:
        """The base URL."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/completions", self._completions),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.tls)
        await site.start()
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self.url

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        url = await self.start()
        try:
            yield url
        finally:
            await self.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.fault and request.path == self.fault_at and (response := await self.fault(request, None)) is not None:
            return response
        return await handler(request)  # type: ignore[no-any-return]

    async def _models(self, request: web.Request) -> web.Response:
        own = {"id": self.model, "root": self.model, "max_model_len": self.engine.max_model_len}
        cards = [{"object": "model", **card} for card in self.cards or [own]]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        line = f'vllm:cache_config_info{{mamba_block_size="None",block_size="{self.engine.block_size}",engine="0"}} 1.0'
        return web.Response(text=f"# HELP x\n{line}\n" if self.tells_block_size else "# HELP x\n")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.headers.append(dict(request.headers))
        self.engine._cache = self._caches.setdefault(body.get("cache_salt"), set())
        if body.get("priority") and not self.priorities:
            return _refusal("Got priority 1 but Priority scheduling is not enabled.")
        if len(body["prompt"]) >= self.engine.max_model_len:
            return _refusal("The prompt is longer than the maximum model length.")
        if body.get("max_tokens") == 1 and not body.get("stream"):
            return await self._prefill(body)
        return await self._stream(request, body)

    async def _prefill(self, body: dict[str, Any]) -> web.Response:
        cached = await self.engine.prefill(Request(tuple(body["prompt"])))
        choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": [0], **self._ids(body)}
        return web.json_response({"id": "1", "choices": [choice], "usage": self._usage(body, cached)})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sampling = {name: value for name, value in body.items() if name not in API}
        cached = 0
        async with aclosing(self.engine.generate(Request(tuple(body["prompt"]), sampling))) as deltas:
            async for delta in deltas:
                cached = delta.num_cached_tokens or cached
                await _send(response, {"id": "1", "choices": [self._choice(delta, body)]})
                if self.fault and await self.fault(request, response):
                    return response
        await _send(response, {"id": "1", "choices": [], "usage": self._usage(body, cached)})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, delta: Delta, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": list(delta.token_ids),
            "logprobs": _logprobs(delta) if delta.logprobs else None,
            **(self._ids(body) if delta.prompt_token_ids else {}),
        }

    def _ids(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_token_ids": body["prompt"]} if self.tells_ids and body.get("return_token_ids") else {}

    def _usage(self, body: dict[str, Any], cached: int) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.tells_cached else {}
        return {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": 1, **details}


def _logprobs(delta: Delta) -> dict[str, Any]:
    return {
        "tokens": [each.token for each in delta.logprobs],
        "token_logprobs": [each.logprob for each in delta.logprobs],
        "top_logprobs": [dict([*each.top, (each.token, each.logprob)]) for each in delta.logprobs],
    }


def _refusal(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": 400}}, status=400)


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
