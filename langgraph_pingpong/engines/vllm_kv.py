"""KV that leaves a vLLM engine for another one, and comes in: vLLM's NIXL connector, and its KV events.

Each engine is a prefill and a decode instance in one, so KV goes both ways. To export, a prompt is asked for as on a
prefill instance: the engine computes what is missing, and keeps the blocks until they were read, or for `LEASE_S`. To
pull, the same prompt is asked for as on a decode instance, with what the other engine said. Both sample one token; its
candidates show whether the KV is that of this prompt. (`bidirectional_kv_xfer` is for pairs of fixed roles, and would
have each pull keep its own blocks for minutes.)
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langgraph_pingpong.engines.base import PREFILL_PRIORITY, BlockBook, KvExport, KvLost, Likeliest, Request
from langgraph_pingpong.placement import block_keys

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

LEASE_S = 12
"""How long KV waits for its reader, in seconds. A reader that waits in its engine's queue prolongs that itself."""

CANDIDATES = 8
"""How many of the next token's candidates are compared."""

_ONE_TOKEN: dict[str, Any] = {
    **{"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
    "logprobs": CANDIDATES,
}

SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""The variable with the port on which an engine tells its addresses to others."""

Send = Callable[[Request, int], AsyncGenerator["RequestOutput"]]
"""Sends a request to the engine, with a priority."""


def kv_environment(kind: str) -> dict[str, str]:
    """The variables that NIXL reads when an engine is built.

    On a CPU the way is shared memory. From GPU to GPU it is CUDA's IPC, which UCX does not read by where it sees no
    NVLink, as in virtual machines: KV went over TCP there, at 0.5 GB/s.
    """
    own = {"NIXL_LOG_LEVEL": "ERROR"}
    if kind == "cpu":
        own["UCX_TLS"] = "tcp,self,sm,cma"
    else:
        own["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {**own, SIDE_PORT: str(probe.getsockname()[1])}


class VllmKv:
    """The side of one engine. It stays when the engine is built anew."""

    def __init__(self, kind: str, send: Send, let_go: Callable[[], None]) -> None:
        """Take the kind of device, who sends requests, and who closes the prompts that are open."""
        self._kind = kind
        self._send = send
        self._let_go = let_go
        self._book: BlockBook | None = None
        self._epoch = 0
        self._events: KvEvents | None = None
        self.engine_id = ""
        self.lease_s = float(LEASE_S)

    def engine_args(self) -> dict[str, Any]:
        """Arguments of vLLM's engine, for one that is about to be built."""
        from vllm.config import KVEventsConfig, KVTransferConfig

        self.engine_id = uuid4().hex
        self._events = KvEvents(self._salt_of)
        transfer = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            kv_buffer_device=self._kind,
            engine_id=self.engine_id,
            kv_connector_extra_config={"kv_lease_duration": LEASE_S},
        )
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=self._events.endpoint)
        return {"kv_transfer_config": transfer, "kv_events_config": events}

    def began(self) -> None:
        """The engine was built: hear what it says. Called on the pool's loop."""
        if self._book is not None:
            self.listen(self._book)

    async def ended(self) -> None:
        """The engine is gone, and with it what it held."""
        if self._events is not None:
            await self._events.close()
        if self._book is not None:
            self._book.clear()

    def listen(self, book: BlockBook) -> bool:
        """Note in `book` which blocks are cached, from now on."""
        self._book = book
        if self._events is not None:
            self._events.open(book)
        return self._events is not None

    # -- salts ---------------------------------------------------------------------------------------------

    def salted(self, salt: str | None) -> str | None:
        """The salt under which the engine caches what is asked for under `salt`."""
        return f"{self._epoch}\0{salt or ''}" if self._epoch else salt

    def _salt_of(self, salted: str | None) -> tuple[bool, str | None]:
        """Whether what was cached under a salt may still be served, and under which salt it was asked for."""
        epoch, mark, salt = (salted or "").partition("\0")
        if not mark:
            return not self._epoch, salted
        return epoch == str(self._epoch), salt or None

    def distrust(self) -> None:
        """From now on everything is cached under other salts: nothing finds what there was before."""
        self._epoch += 1
        self._let_go()  # under their salt nobody will ask
        if self._events is not None and self._book is not None:
            self._events.forget(self._book)

    # -- export and pull -----------------------------------------------------------------------------------

    async def export(self, request: Request) -> KvExport:
        """Keep a prompt's KV for one reader.

        Raises:
            KvLost: the engine could not.
            EngineDead: the engine's process ended, or the engine is not running.
        """
        engine_id = self.engine_id
        output = await self._asked(request, {"do_remote_decode": True, "do_remote_prefill": False})
        how = dict(output.kv_transfer_params or {})
        how.pop("remote_prefill_cached_tokens", None)  # else vLLM tells it as what the reader found
        if not how.get("remote_block_ids"):
            raise KvLost("The engine kept nothing for a reader.")
        return KvExport(engine_id, how["remote_request_id"], output.num_cached_tokens or 0, _likeliest(output), how)

    async def pull(self, request: Request, export: KvExport) -> Likeliest:
        """Read KV that another engine keeps into the prefix cache.

        Raises:
            KvLost: it could not be read.
            EngineDead: the engine's process ended, or the engine is not running.
        """
        return _likeliest(await self._asked(request, {**export.how, "do_remote_prefill": True}))

    async def _asked(self, request: Request, params: Mapping[str, Any]) -> RequestOutput:
        sampling = {**_ONE_TOKEN, "extra_args": {"kv_transfer_params": dict(params)}}
        asked, last = Request(request.prompt_token_ids, sampling, request.request_id, request.cache_salt), None
        async with aclosing(self._send(asked, PREFILL_PRIORITY)) as outputs:
            async for output in outputs:
                last = output
        if last is None or last.outputs[0].finish_reason != "length":
            raise KvLost("The engine ended the request.")
        return last


def _likeliest(output: RequestOutput) -> Likeliest:
    tables = output.outputs[0].logprobs or ()
    return {token: each.logprob for table in tables if table for token, each in table.items()}


class KvEvents:
    """What one engine says of its cache blocks, heard until `close`.

    vLLM tells blocks by hashes of its own, which stand for a block and all before it, as this package's keys do; of
    each that is stored it tells the ids. What began before this listened, or was missed, has unknown hashes: it is left
    out of the book.
    """

    def __init__(self, salt_of: Callable[[str | None], tuple[bool, str | None]]) -> None:
        self._salt_of = salt_of
        self._folder = tempfile.mkdtemp(prefix="pingpong-")
        self.endpoint = f"ipc://{self._folder}/events"
        self._keys: dict[Any, int] = {}
        self._next = 0
        self._task: asyncio.Task[None] | None = None

    def open(self, book: BlockBook) -> None:
        """Begin to listen."""
        self._task = asyncio.create_task(self._listen(book))

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _listen(self, book: BlockBook) -> None:
        import msgspec
        import zmq
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as heard:
            heard.linger = 0
            heard.connect(self.endpoint)
            heard.subscribe(b"")
            while True:
                _, number, payload = await heard.recv_multipart()
                self._check_complete(int.from_bytes(number, "big"), book)
                for event in decoder.decode(payload).events:
                    self.note(event, book)

    def _check_complete(self, number: int, book: BlockBook) -> None:
        if number != self._next:  # an eviction may be among what was missed
            self.forget(book)
        self._next = number + 1

    def note(self, event: Any, book: BlockBook) -> None:
        """Bring the book up to date with one of vLLM's events."""
        kind = type(event).__name__
        if kind == "BlockStored":
            self._stored(event, book)
        elif kind == "BlockRemoved":
            book.discard([self._keys.pop(each) for each in event.block_hashes if each in self._keys])
        elif kind == "AllBlocksCleared":
            self.forget(book)

    def forget(self, book: BlockBook) -> None:
        """Nothing is known of the cache any more."""
        self._keys.clear()
        book.clear()

    def _stored(self, event: Any, book: BlockBook) -> None:
        parent = self._keys.get(event.parent_block_hash)
        extra = (getattr(event, "extra_keys", None) or [None])[0]  # older releases tell none
        serves, salt = self._salt_of(extra[0] if extra else None)
        if parent is None and (event.parent_block_hash is not None or not serves):
            return
        keys = block_keys(event.token_ids, event.block_size, salt, parent)
        self._keys.update(zip(event.block_hashes, keys, strict=False))
        book.add(keys)
