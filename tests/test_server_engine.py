"""Servers as engines: what is sent, what comes back, and what is said when a server misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import ssl
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr
from typer.testing import CliRunner

from graphs.five_agents import CHAIN
from langgraph_pingpong import ChatPingPong, FakeEngine, engine_pool, health
from langgraph_pingpong.cli import app
from langgraph_pingpong.config import ServerAddress, ServerConfig, parse_base_urls
from langgraph_pingpong.engines import server_engine
from langgraph_pingpong.engines.base import Delta, Request
from langgraph_pingpong.engines.fake_engine import fake_tokenizer
from langgraph_pingpong.engines.server_engine import ServerEngine, build_server_engines
from langgraph_pingpong.errors import (
    BadKey,
    BaseUrlError,
    CallRefused,
    CallTimedOut,
    ConfigError,
    EngineDead,
    PingPongError,
    ServerBusy,
    ServerFailed,
    SettingOfServers,
    UnknownSetting,
    WrongServer,
)
from langgraph_pingpong.loop import LoopThread
from langgraph_pingpong.trace import Event
from tests.conftest import going_on, wait_until
from tests.stub_server import Fault, StubServer

if TYPE_CHECKING:
    from tests.conftest import Lab, Recorder

TOKENIZER = fake_tokenizer()
KEY = "s3cret-key"
DOCUMENT = str(Path(__file__).parent.parent / "graphs" / "texts" / "document.md")
UNREACHABLE = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def stub(reply: str = "tide pool", **settings: Any) -> StubServer:
    engine = FakeEngine(tokenizer=TOKENIZER, reply=lambda _: reply)
    return StubServer(engine, **settings)


def engine_for(url: str, **settings: Any) -> ServerEngine:
    model = settings.pop("model", "stub")
    config = ServerConfig(model, parse_base_urls([url]), **{"max_retries": 0, **settings})
    return build_server_engines(config)[0]


@asynccontextmanager
async def started(server: StubServer, **settings: Any) -> AsyncIterator[ServerEngine]:
    async with server.serving() as url:
        engine = engine_for(url, **settings)
        await engine.start()
        server.bodies.clear()
        try:
            yield engine
        finally:
            await engine.stop()


def request(prompt: str = "Hello there, reader.", **sampling: Any) -> Request:
    return Request(tuple(TOKENIZER.encode(prompt)), sampling)


async def deltas(engine: ServerEngine, asked: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(asked)]


# -- faults ------------------------------------------------------------------------------------------------------


def answers(status: int, text: str = '{"error": {"message": "out of order"}}', kind: str = "application/json") -> Fault:
    async def fault(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
        return None if begun else web.Response(status=status, text=text, content_type=kind)

    return fault


def resets(within: bool = False) -> Fault:
    async def fault(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
        if within == (begun is not None):
            assert request.transport is not None
            request.transport.abort()
        return begun

    return fault


def stalls(within: bool = False) -> Fault:
    async def fault(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
        if within == (begun is not None):
            await asyncio.sleep(60)
        return None

    return fault


def writes(text: str) -> Fault:
    """Puts a text after the first chunk, and ends there."""

    async def fault(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
        if begun is not None:
            await begun.write(text.encode())
        return begun

    return fault


AT_START: dict[str, tuple[Fault, str]] = {
    "401": (answers(401), r"answered with status 401: out of order"),
    "404": (answers(404, "Not Found", "text/plain"), r"answered with status 404: "),
    "500": (answers(500, "Internal Server Error", "text/plain"), r"answered with status 500: Internal Server Error"),
    "no API": (answers(200, "<html>hello</html>", "text/html"), r"could not be read|max_model_len"),
    "other JSON": (answers(200, '{"data": [{"id": "stub"}]}'), r"does not tell its max_model_len"),
    "reset": (resets(), r"The connection to .* failed: "),
    "stall": (stalls(), r"did not answer in time"),
}


class TestStart:
    @pytest.mark.parametrize("case", AT_START)
    async def test_failures_are_one_clear_error(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_engine, "START_TIMEOUT_S", 0.3)
        fault, match = AT_START[case]
        server = stub(fault=fault, fault_at="/v1/models")
        async with server.serving() as url, asyncio.timeout(10):
            engine = engine_for(url)
            with pytest.raises(ServerFailed, match=match) as error:
                await engine.start()
        assert engine.device in str(error.value)
        assert str(error.value).endswith("\n" + type(error.value).hint)
        with pytest.raises(EngineDead):
            await deltas(engine, request())

    async def test_an_unreachable_server(self) -> None:
        with pytest.raises(ServerFailed, match=r"The connection to 127.0.0.1:9 failed: \w+"):
            await engine_for(UNREACHABLE).start()

    @pytest.mark.parametrize("case", ["500", "reset", "stall"])
    async def test_a_server_that_cannot_complete(self, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_engine, "START_TIMEOUT_S", 0.3)
        fault, match = AT_START[case]
        async with stub(fault=fault).serving() as url:
            with pytest.raises(ServerFailed, match=match):
                await engine_for(url).start()

    async def test_a_server_that_is_not_vllm(self) -> None:
        async with stub(tells_ids=False).serving() as url:
            with pytest.raises(ServerFailed, match="does not answer with the token ids of the prompt"):
                await engine_for(url).start()

    async def test_another_model(self) -> None:
        async with stub(model="org/large").serving() as url:
            with pytest.raises(WrongServer, match=r"serves org/large, and this side has the model stub"):
                await engine_for(url).start()

    @pytest.mark.parametrize("here", ["org/large", "large", "/models/large"])
    async def test_the_same_model_elsewhere(self, here: str) -> None:
        async with started(stub(model="org/large"), model=here) as engine:
            assert await engine.prefill(request()) == 0

    @pytest.mark.parametrize(
        ("more", "length"),
        [
            ([{"id": "stub", "root": "stub", "max_model_len": 512}], 512),
            ([{"id": "small", "max_model_len": 512}, {"id": "stub", "root": "/adapter", "parent": "small"}], 512),
            ([{"id": "small", "max_model_len": 131072}, {"id": "stub", "root": "/adapter"}], 131072),
        ],
    )
    async def test_among_several_models_the_length_is_its_own(self, more: list[dict[str, Any]], length: int) -> None:
        big = {"id": "big", "root": "big", "max_model_len": 131072}
        async with started(stub(cards=[big, *more])) as engine:
            assert engine.max_model_len == length

    async def test_a_length_that_only_other_models_tell_is_not_taken(self) -> None:
        cards = [{"id": "big", "max_model_len": 131072}, {"id": "small", "max_model_len": 512}, {"id": "stub"}]
        async with stub(cards=cards).serving() as url:
            with pytest.raises(ServerFailed, match="does not tell the max_model_len of stub"):
                await engine_for(url).start()

    async def test_servers_of_different_context_lengths(self) -> None:
        first, second = stub(), stub()
        second.engine.max_model_len = 512
        async with first.serving() as one, second.serving() as other:
            engines = build_server_engines(ServerConfig("stub", parse_base_urls([one, other])))
            await engines[0].start()
            with pytest.raises(WrongServer, match=r"32768 tokens and 127.0.0.1:\d+ of 512"):
                await engines[1].start()
            await engines[0].stop()

    async def test_tells_lengths_and_grain(self) -> None:
        server = stub()
        server.engine.block_size = 48
        async with started(server) as engine:
            assert (engine.block_size, engine.max_model_len) == (48, 32768)
            assert engine.device == server.url.removeprefix("http://").removesuffix("/v1")

    async def test_without_metrics_the_usual_grain_is_taken(self) -> None:
        async with started(stub(tells_block_size=False)) as engine:
            assert engine.block_size == 16
        async with started(stub(fault=answers(404), fault_at="/metrics")) as engine:
            assert engine.block_size == 16

    async def test_stopping_twice_is_safe_and_before_a_start(self) -> None:
        async with started(stub()) as engine:
            await engine.stop()
            await engine.stop()
        await engine_for(UNREACHABLE).stop()


class TestRequests:
    async def test_carry_the_ids_and_vllms_own_names(self) -> None:
        sampling = {"max_tokens": 4, "top_k": 3, "seed": 7, "structured_outputs": {"regex": "a+"}, "stop": ["x"]}
        async with started(server := stub()) as engine:
            asked = request(**sampling)
            said = await deltas(engine, asked)
        (body,) = server.bodies
        assert body["prompt"] == list(asked.prompt_token_ids)
        assert sampling.items() <= body.items()
        assert "priority" not in body
        assert "".join(delta.text for delta in said) == "tide"
        assert said[0].prompt_token_ids == asked.prompt_token_ids
        assert [delta.prompt_token_ids for delta in said[1:]] == [None] * 3
        assert [delta.finish_reason for delta in said] == [None, None, None, "length"]
        assert [delta.num_cached_tokens for delta in said] == [None, None, None, 0]

    async def test_find_what_a_prefill_left(self) -> None:
        async with started(server := stub()) as engine:
            asked = request("A prompt that is longer than two blocks of tokens are.")
            assert await engine.prefill(asked) == 0
            assert await engine.prefill(asked) == 48
            assert (await deltas(engine, asked))[-1].num_cached_tokens == 48
        assert [body.get("priority") for body in server.bodies] == [1, 1, None]
        assert server.bodies[0]["max_tokens"] == 1

    async def test_have_no_priority_where_the_server_refuses_it(self) -> None:
        async with started(server := stub(priorities=False)) as engine:
            await engine.prefill(request())
        assert "priority" not in server.bodies[0]

    async def test_do_not_tell_what_was_cached_where_the_server_does_not(self) -> None:
        async with started(stub(tells_cached=False)) as engine:
            assert await engine.prefill(request()) is None
            assert [delta.num_cached_tokens for delta in await deltas(engine, request())] == [None] * 9

    async def test_find_nothing_after_a_reset(self) -> None:
        async with started(server := stub()) as engine:
            await engine.prefill(request())
            await engine.reset_prefix_cache()
            await engine.prefill(request())
            await deltas(engine, request())
            await engine.reset_prefix_cache()
            await engine.prefill(request())
        salts = [body.get("cache_salt") for body in server.bodies]
        assert salts[0] is None
        assert salts[1] == salts[2] != salts[3]
        assert all(salts[1:])

    async def test_with_several_answers_have_a_last_delta_each(self) -> None:
        async with started(stub("ab")) as engine:
            said = await deltas(engine, request(n=3))
        for index in range(3):
            own = [delta for delta in said if delta.index == index]
            assert ("".join(delta.text for delta in own), own[-1].finish_reason) == ("ab", "stop")

    async def test_with_logprobs(self) -> None:
        async with started(stub("a")) as engine:
            (only,) = await deltas(engine, request(logprobs=2))
            (bare,) = await deltas(engine, request(logprobs=0))
        assert [(each.token, each.logprob, len(each.top)) for each in only.logprobs] == [("a", 0.0, 2)]
        assert only.logprobs[0].top[0] == ("a", 0.0)
        assert bare.logprobs[0].top == ()

    async def test_that_are_left_early_are_aborted(self) -> None:
        server = stub("a long answer " * 50)
        server.engine.time_scale = 1.0
        async with started(server) as engine:
            async with aclosing(engine.generate(request())) as answer:
                await anext(answer)
                assert engine.num_unfinished == 1
            assert engine.num_unfinished == 0
            await until(lambda: len(server.engine.aborted) == 1)
            server.engine.time_scale = 0.0
            assert await deltas(engine, request(max_tokens=2))

    async def test_a_cancelled_prefill_is_aborted(self) -> None:
        server = stub()
        async with started(server) as engine:
            server.engine.prefill_gate = asyncio.Event()
            task = asyncio.create_task(engine.prefill(request()))
            await until(lambda: bool(server.engine.running))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_unfinished == 0
            await until(lambda: len(server.engine.aborted) == 1)

    async def test_are_sent_again_by_the_client_and_prefills_are_not(self) -> None:
        calls = []

        async def once(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
            calls.append(begun)
            return web.Response(status=503, headers={"retry-after-ms": "1"}) if len(calls) == 1 else None

        async with started(server := stub("ab"), max_retries=2) as engine:
            server.fault = once
            assert [delta.text for delta in await deltas(engine, request())] == ["a", "b"]
            calls.clear()
            with pytest.raises(ServerFailed, match="status 503"):
                await engine.prefill(request())
            assert len(calls) == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what the other side of a connection does has no event here
            await asyncio.sleep(0.01)


DURING: dict[str, tuple[Fault, type[PingPongError], str]] = {
    "401": (answers(401), ServerFailed, r"status 401: out of order"),
    "404": (answers(404), ServerFailed, r"status 404"),
    "500": (answers(500), ServerFailed, r"status 500: out of order"),
    "400": (answers(400), CallRefused, r"refused the call: out of order"),
    "reset": (resets(), ServerFailed, r"The connection to .* failed"),
    "reset within": (resets(within=True), ServerFailed, r"The connection to .* failed"),
    "stall": (stalls(), ServerFailed, r"did not answer in time"),
    "stall within": (stalls(within=True), ServerFailed, r"did not answer in time"),
    "error within": (
        writes('data: {"error": {"message": "engine died", "code": 500}}\n\n'),
        ServerFailed,
        r"status 500: engine died",
    ),
    "nonsense within": (writes("data: <html>\n\n"), ServerFailed, r"could not be read: \w+"),
    "given up": (
        writes(
            'data: {"id": "1", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n'
        ),
        ServerFailed,
        r"gave the request up",
    ),
    "too short": (writes("data: [DONE]\n\n"), ServerFailed, r"ended its answer before it was complete"),
    "too short, no end": (writes(""), ServerFailed, r"ended its answer before it was complete"),
}


class TestFaults:
    @pytest.mark.parametrize("case", DURING)
    async def test_in_an_answer_are_one_clear_error_and_leave_nothing(self, case: str) -> None:
        fault, kind, match = DURING[case]
        async with started(server := stub(), timeout=0.3) as engine, asyncio.timeout(10):
            server.fault = fault
            with pytest.raises(kind, match=match) as error:
                await deltas(engine, request())
            assert engine.device in str(error.value)
            assert engine.num_unfinished == 0
            server.fault = None
            assert "".join(delta.text for delta in await deltas(engine, request())) == "tide pool"

    @pytest.mark.parametrize("case", ["401", "500", "400", "reset", "stall"])
    async def test_in_a_prefill_are_too(self, case: str) -> None:
        fault, kind, match = DURING[case]
        async with started(server := stub(), timeout=0.3) as engine:
            server.fault = fault
            with pytest.raises(kind, match=match):
                await engine.prefill(request())
            assert engine.num_unfinished == 0

    async def test_a_stop_during_an_answer(self) -> None:
        server = stub("a long answer " * 50)
        server.engine.time_scale = 1.0
        async with started(server) as engine, aclosing(engine.generate(request())) as answer:
            await anext(answer)
            await engine.stop()
            with pytest.raises(EngineDead):
                await anext(answer)

    async def test_a_prompt_that_is_too_long(self) -> None:
        async with started(server := stub()) as engine:
            server.engine.max_model_len = 8
            with pytest.raises(CallRefused, match="longer than the maximum model length"):
                await deltas(engine, request())


class TestTls:
    async def test_a_certificate_that_is_not_trusted_is_a_clear_error(self, certificate: Path) -> None:
        async with stub(tls=server_context(certificate)).serving() as url:
            with pytest.raises(ServerFailed, match=r"The connection to .* failed: .*CERTIFICATE_VERIFY_FAILED"):
                await engine_for(url).start()

    async def test_a_certificate_can_be_trusted_by_the_users_own_client(self, certificate: Path) -> None:
        trusting = ssl.create_default_context(cafile=str(certificate))

        def client() -> Any:
            return openai.DefaultAsyncHttpxClient(verify=trusting)

        async with started(stub(tls=server_context(certificate)), http_client=client) as engine:
            assert "".join(delta.text for delta in await deltas(engine, request())) == "tide pool"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1 that signs itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stub")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    path = tmp_path_factory.mktemp("tls") / "stub.pem"
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + made.public_bytes(pem))
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


class TestKey:
    async def test_is_sent_to_the_server(self) -> None:
        async with started(server := stub(key=KEY), api_key=KEY) as engine:
            await engine.prefill(request())
        assert set(server.keys) == {f"Bearer {KEY}"}

    async def test_of_the_environment_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        async with started(server := stub()) as engine:
            await engine.prefill(request())
        assert KEY not in str(server.headers)

    async def test_that_is_wrong_is_a_clear_error(self) -> None:
        async with stub(key="another").serving() as url:
            with pytest.raises(ServerFailed, match="status 401: Unauthorized"):
                await engine_for(url, api_key=KEY).start()

    async def test_is_in_no_error_and_no_traceback_even_if_the_server_quotes_it(self) -> None:
        quoting = answers(401, json.dumps({"error": {"message": f"Incorrect API key: {KEY}"}}))
        async with stub(fault=quoting, fault_at="/v1/models").serving() as url:
            with pytest.raises(ServerFailed, match=r"Incorrect API key: \*\*\*") as error:
                await engine_for(url, api_key=KEY).start()
        assert KEY not in "".join(traceback.format_exception(error.value))

    @pytest.mark.parametrize(
        ("key", "match"),
        [
            (f"{KEY}\n", "white space or a line break"),
            (f"{KEY}\r", "white space or a line break"),
            (f" {KEY}", "white space or a line break"),
            (f"{KEY}\u00e9", "no HTTP header can carry"),
            (f"{KEY}\n{KEY}", "no HTTP header can carry"),
            (f"{KEY}\0", "no HTTP header can carry"),
        ],
    )
    @pytest.mark.parametrize("kind", [str, SecretStr])
    def test_that_cannot_be_sent_is_refused_unseen_where_the_model_is_made(
        self, key: str, match: str, kind: Callable[[str], Any]
    ) -> None:
        for make in (ChatPingPong, engine_pool):
            given = key if make is engine_pool else kind(key)
            with pytest.raises(BadKey, match=match) as error:
                make(model="stub", base_urls=[UNREACHABLE], api_key=given)
            assert KEY not in "".join(traceback.format_exception(error.value))

    def test_of_another_type_is_refused_unseen(self) -> None:
        with pytest.raises(BadKey, match="not of type bytes") as error:
            engine_pool(model="stub", base_urls=[UNREACHABLE], api_key=KEY.encode())
        assert KEY not in str(error.value)

    async def test_is_not_shown_by_what_lies_behind_an_error(self) -> None:
        def refuse(request: Any) -> Any:
            try:
                raise ValueError(f"Illegal header value {f'Bearer {odd}'.encode()!r}")
            except ValueError as error:
                raise httpx.ConnectError("out of order") from error

        odd = f"{KEY}\\'\""
        client = lambda: httpx.AsyncClient(transport=httpx.MockTransport(refuse))  # noqa: E731
        with pytest.raises(ServerFailed, match="out of order") as error:
            await engine_for(UNREACHABLE, api_key=odd, http_client=client).start()
        assert KEY not in "".join(traceback.format_exception(error.value))

    async def test_is_not_shown_in_part_where_a_long_message_is_cut(self) -> None:
        for before in range(server_engine.MAX_CAUSE - len(KEY), server_engine.MAX_CAUSE + 1):
            quoting = answers(401, json.dumps({"error": {"message": "." * before + KEY}}))
            async with stub(fault=quoting, fault_at="/v1/models").serving() as url:
                with pytest.raises(ServerFailed) as error:
                    await engine_for(url, api_key=KEY).start()
            assert KEY[:3] not in str(error.value)

    def test_is_in_no_repr_and_no_trace(self, two_stubs: list[StubServer], lab: Lab) -> None:
        for server in two_stubs:
            server.key = KEY
        with model_on(two_stubs, api_key=KEY) as model:
            record = lab.record(model)
            lab.chain(model).invoke({"task": "Say it."})
            engine = model._serving().pool.engines[0]
            shown = [repr(model), str(model), repr(model._identifying_params), repr(model._serving()), repr(engine)]
            shown += [repr(engine._config), repr(record.events)]  # type: ignore[attr-defined]
            shown += [str(model._get_ls_params()), model.model_dump_json()]
        assert record.events
        assert [text for text in shown if KEY in text] == []


# -- the chat model on servers -------------------------------------------------------------------------------------


@pytest.fixture
def two_stubs() -> Iterator[list[StubServer]]:
    """Two servers in a thread of their own, slow enough that a plan is ready long before an answer ends."""
    speed = {"time_scale": 1.0, "decode_speed": 500.0, "prefill_speed": 500_000.0}
    servers = [StubServer(FakeEngine(f"fake:{index}", TOKENIZER, **speed)) for index in range(2)]  # type: ignore[arg-type]
    loop = LoopThread("stub servers")
    for server in servers:
        loop.run(server.start())
    yield servers
    for server in servers:
        loop.run(server.stop())
    loop.close()


def model_on(servers: list[StubServer], **settings: Any) -> ChatPingPong:
    urls = [server.url for server in servers]
    return ChatPingPong(model="stub", base_urls=urls, tokenizer=TOKENIZER, **{"max_tokens": 40, **settings})


def names(servers: list[StubServer]) -> list[str]:
    return [str(ServerAddress(server.url)) for server in servers]


def test_a_chain_on_two_servers_is_equal_and_prefilled(two_stubs: list[StubServer], lab: Lab) -> None:
    results, records = {}, {}
    for overlap in ("off", "on"):
        with model_on(two_stubs, overlap=overlap) as model:
            model.reset_prefix_cache()
            records[overlap] = lab.record(model)
            results[overlap] = lab.chain(model).invoke({"task": "Say it."})
    assert results["on"] == results["off"]
    assert digests(records["on"]) == digests(records["off"])
    critic = records["on"].certificate("critic")
    assert critic["ids_equal"] and critic["static"] > 0 and critic["streamed"] > 0
    assert critic["cached"] >= critic["static"] + critic["streamed"] - 15
    assert records["off"].certificate("critic")["cached"] == 0
    assert [each.data["certificate"]["device"] for each in records["on"].named("finish")] == names(two_stubs)


def digests(record: Recorder) -> list[str]:
    return [event.data["prompt_sha256"] for event in record.named("generate.started")]


def test_usage_leaves_out_what_the_server_does_not_tell(two_stubs: list[StubServer]) -> None:
    two_stubs[0].tells_cached = two_stubs[1].tells_cached = False
    with model_on(two_stubs) as model:
        message = model.invoke("Hello.")
    assert message.response_metadata["pingpong"]["cached"] is None
    assert message.usage_metadata is not None
    assert "cache_read" not in message.usage_metadata["input_token_details"]


def test_a_server_that_fails_prefills_costs_the_edge_only(two_stubs: list[StubServer], lab: Lab) -> None:
    async def no_prefill(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
        ahead = begun is None and (await request.json()).get("priority") and len((await request.json())["prompt"]) > 2
        return web.Response(status=500, text="no prefill today") if ahead else None

    for server in two_stubs:
        server.fault = no_prefill
    with model_on(two_stubs) as model:
        record = lab.record(model)
        result = lab.chain(model).invoke({"task": "Say it."})
    assert len(result["critic"]) == 40
    assert "no prefill today" in record.certificate("critic")["fallback"]


class TestBusyServers:
    """What has a low priority waits for all others' answers, and so does a probe that has one."""

    @staticmethod
    def waits(fault: Fault) -> Fault:
        async def with_priority(request: web.Request, begun: web.StreamResponse | None) -> web.StreamResponse | None:
            return await fault(request, begun) if (await request.json()).get("priority") else None

        return with_priority

    async def test_can_be_started_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_engine, "START_TIMEOUT_S", 0.3)
        async with started(stub("ab", fault=self.waits(stalls()))) as engine:
            assert engine._known.takes_priority
            assert [delta.text for delta in await deltas(engine, request())] == ["a", "b"]

    async def test_come_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with started(server := stub("ab")) as engine:
            monkeypatch.setattr(server_engine, "START_TIMEOUT_S", 0.3)
            server.fault = self.waits(stalls())
            await engine.restart()
            assert [body.get("priority") for body in server.bodies] == [None]
            assert engine._known.takes_priority

    @pytest.mark.parametrize(("fault", "why"), [(stalls(), "did not answer in time"), (answers(429), "status 429")])
    def test_are_not_out_of_use_for_a_prefill(self, two_stubs: list[StubServer], fault: Fault, why: str) -> None:
        with model_on(two_stubs, timeout=0.6).start() as model:
            pool = model._serving().pool
            two_stubs[1].fault = self.waits(fault)
            with pytest.raises(ServerBusy, match=why):
                pool.loop.run(pool.lease(1).prefill(request()))
            assert pool.health.is_up(1)
            two_stubs[1].fault = fault
            with pytest.raises(ServerBusy, match=why):
                pool.loop.run(first_of(pool.lease(1).generate(request())))
            assert not pool.health.is_up(1)


async def first_of(deltas: AsyncGenerator[Delta]) -> Delta:
    async with contextlib.aclosing(deltas):
        return await anext(deltas)


def test_a_call_is_bounded_by_its_timeout(two_stubs: list[StubServer]) -> None:
    with model_on(two_stubs, timeout=0.3).start() as model:
        for server in two_stubs:
            server.fault = stalls(within=True)
        with pytest.raises((CallTimedOut, ServerFailed)):
            model.invoke("Hello.")
        assert [engine.num_unfinished for engine in model._serving().pool.engines] == [0, 0]


def test_engines_come_back_after_a_close(two_stubs: list[StubServer]) -> None:
    model = model_on(two_stubs)
    first = model.invoke("Hello.").content
    model.close()
    assert model.invoke("Hello.").content == first
    model.close()


def test_a_failed_start_is_said_at_the_call_and_can_be_tried_again(two_stubs: list[StubServer]) -> None:
    with contextlib.closing(model_on(two_stubs, max_retries=0)) as model:
        two_stubs[1].fault, two_stubs[1].fault_at = answers(500), "/v1/models"
        with pytest.raises(ServerFailed, match="status 500"):
            model.invoke("Hello.")
        two_stubs[1].fault = None
        assert model.invoke("Hello.").content


def test_a_client_of_the_wrong_kind_is_refused() -> None:
    model = ChatPingPong(
        model="stub", tokenizer=TOKENIZER, base_urls=[UNREACHABLE], http_client=openai.DefaultHttpxClient
    )
    with pytest.raises(ConfigError, match=r"http_client=.*AsyncClient"):
        model.start()


def test_the_http_client_can_be_the_users_own(two_stubs: list[StubServer]) -> None:
    made = []

    def make() -> Any:
        made.append(openai.DefaultAsyncHttpxClient(headers={"X-Team": "tides"}))
        return made[-1]

    with model_on(two_stubs, http_client=make) as model:
        model.invoke("Hello.")
    assert len(made) == 2
    assert all(client.is_closed for client in made)
    assert {header["X-Team"] for server in two_stubs for header in server.headers} == {"tides"}


def test_a_pool_of_servers_is_shared(two_stubs: list[StubServer], tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "stub")
    (tmp_path / "stub" / "config.json").write_text("{}")
    with engine_pool(str(tmp_path / "stub"), base_urls=[server.url for server in two_stubs], api_key=KEY) as pool:
        texts = [ChatPingPong(pool=pool, max_tokens=8, tokenizer=TOKENIZER).invoke("Hello.").content for _ in range(2)]
    assert texts[0] == texts[1]
    assert [engine.device for engine in pool.engines] == names(two_stubs)


class TestFailover:
    """Where a server fails, the run finishes on the other; when it is well again, it is used again."""

    @pytest.fixture(autouse=True)
    def going_on(self, two_stubs: list[StubServer], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.05)
        monkeypatch.setattr(health, "MAX_PAUSE_S", 0.1)
        monkeypatch.setattr(server_engine, "START_TIMEOUT_S", 1.5)
        for server in two_stubs:
            server.engine.reply = going_on()

    def expected(self, two_stubs: list[StubServer], lab: Lab) -> dict[str, Any]:
        with model_on(two_stubs, overlap="off") as model:
            return lab.chain(model).invoke({"task": "Say it."})

    @pytest.mark.parametrize("broken", [0, 1])
    @pytest.mark.parametrize("case", [each for each in DURING if each != "400"])
    def test_a_run_is_the_same_when_a_server_fails(
        self, case: str, broken: int, two_stubs: list[StubServer], lab: Lab
    ) -> None:
        expected = self.expected(two_stubs, lab)
        with model_on(two_stubs, timeout=2.0).start() as model:
            record = lab.record(model)
            two_stubs[broken].fault = DURING[case][0]
            graph = lab.chain(model)
            for _ in range(2):
                assert graph.invoke({"task": "Say it."}) == expected
            assert digests(record)[:2] == digests(record)[2:]
            for event in record.named("finish"):
                assert event.data["certificate"]["device"] == names(two_stubs)[1 - broken]
                assert event.data["certificate"]["ids_equal"]
                assert event.data["certificate"]["output_tokens"] == 40
            assert record.named("engine.died")[0].device == names(two_stubs)[broken]
            assert not record.named("engine.gave_up")
            two_stubs[broken].fault = None
            record.wait_for("engine.restarted")
            assert graph.invoke({"task": "Say it."}) == expected
            assert {event.device for event in record.named("finish")[-2:]} == {*names(two_stubs)}

    def test_a_server_that_drains_in_mid_run_is_left(self, two_stubs: list[StubServer], lab: Lab) -> None:
        expected = self.expected(two_stubs, lab)
        with model_on(two_stubs) as model:
            record = lab.record(model)

            def drain(event: Event) -> None:
                if (event.name, event.node) == ("finalize", "critic"):
                    two_stubs[1].fault = answers(503, "draining", "text/plain")

            model.trace.subscribe(drain)
            assert lab.chain(model).invoke({"task": "Say it."}) == expected
            certificate = record.certificate("critic")
            assert certificate["device"] == names(two_stubs)[0]
            assert "status 503: draining" in certificate["fallback"]

    def test_a_refused_call_is_not_sent_to_the_other(self, two_stubs: list[StubServer]) -> None:
        with model_on(two_stubs).start() as model:
            two_stubs[0].fault = answers(400)
            for server in two_stubs:
                server.bodies.clear()
            with pytest.raises(CallRefused, match="out of order"):
                model.invoke("Hello.")
            assert two_stubs[1].bodies == []

    def test_all_failed_is_one_error_with_every_cause(self, two_stubs: list[StubServer]) -> None:
        with model_on(two_stubs).start() as model:
            two_stubs[0].fault, two_stubs[1].fault = answers(500), resets()
            with pytest.raises(ServerFailed) as caught:
                model.invoke("Hello.")
            said, (first, second) = str(caught.value), names(two_stubs)
            assert f"{first}: {first} answered with status 500: out of order" in said
            assert f"{second}: The connection to {second} failed" in said
            two_stubs[0].fault = two_stubs[1].fault = None
            until_up(model)
            assert model.invoke("Hello.").text

    def test_a_server_that_serves_another_model_by_now_is_given_up(
        self, two_stubs: list[StubServer], lab: Lab, caplog: pytest.LogCaptureFixture
    ) -> None:
        with model_on(two_stubs).start() as model:
            record = lab.record(model)
            two_stubs[0].fault, two_stubs[0].model = answers(500), "other"
            assert model.invoke("Hello.").text
            gave_up = record.wait_for("engine.gave_up")
            assert "serves other" in gave_up.data["error"]
            assert [each.levelname for each in caplog.records if each.name.startswith("langgraph_pingpong")] == [
                "WARNING"
            ]
            assert model.invoke("Hello, you.").text

    def test_asking_a_server_again_leaves_its_other_requests_alone(self, two_stubs: list[StubServer]) -> None:
        with model_on(two_stubs, max_tokens=200).start() as model:
            pool = model._serving().pool
            stream = model.stream("Tell me.")
            text = next(stream).text
            pool.loop.run(pool.engines[0].restart())
            text += "".join(chunk.text for chunk in stream)
            assert text == model.invoke("Tell me.").text


def until_up(model: ChatPingPong) -> None:
    places = model._serving().pool._placement.places
    wait_until(lambda: all(place.up for place in places), 3, "return of all servers")


class TestCommandLine:
    @pytest.fixture
    def run(self, two_stubs: list[StubServer], tmp_path: Path) -> Callable[..., Any]:
        TOKENIZER.save_pretrained(tmp_path / "stub")
        (tmp_path / "stub" / "config.json").write_text("{}")
        graph = ("graphs.five_agents", "--task", "Sum up.", "--input", DOCUMENT, "--set", "brief_tokens=60")
        urls = ",".join(server.url for server in two_stubs)
        fixed = ("run", *graph, "--set", "max_tokens=20", "--model", str(tmp_path / "stub"), "--base-urls", urls)
        return lambda *more: CliRunner().invoke(app, [*fixed, *more])

    def test_runs_and_compares_a_graph_on_servers(
        self, run: Callable[..., Any], two_stubs: list[StubServer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        monkeypatch.setenv("COLUMNS", "80")
        for server in two_stubs:
            server.key = KEY
        result = run("--compare")
        assert result.exit_code == 0, result.output
        assert "prompt ids equal: yes" in result.output
        assert "text equal: yes" in result.output
        table = result.output[result.output.index("overlap off and on, ms") :]
        for index, (node, *_) in enumerate(CHAIN):  # in 80 columns, too
            (row,) = [line for line in table.splitlines() if line.startswith(node[:5])]
            assert row.split()[1][:8] == names(two_stubs)[index % 2][:8]
            assert "…" not in row
        assert KEY not in result.output

    @pytest.mark.parametrize("option", ["--devices", "--dtype", "--max-model-len", "--gpu-memory-utilization"])
    def test_refuses_what_is_the_servers_own(self, run: Callable[..., Any], option: str) -> None:
        result = run(option, "1")
        assert result.exit_code == 2
        assert f"Error: {option} and --base-urls cannot go together." in result.stderr


class TestSettings:
    @pytest.mark.parametrize(
        ("urls", "match"),
        [
            ("http://a:8000/v1", "base_urls is a list"),
            ([], "No base URL given"),
            ([8000], "a text, and not 8000"),
            (["a:8000"], "not an http:// or https:// URL"),
            (["ftp://a/v1"], "not an http:// or https:// URL"),
            (["http://"], "not an http:// or https:// URL"),
            (["http://a:port/v1"], "not an http:// or https:// URL"),
            (["http://a/v1?x=1"], "has a query"),
            (["http://user:hidden@a/v1"], "use api_key= instead"),
            (["http://a:8000/v1", "http://a:8000/v1/"], "a:8000 is named twice"),
            (["http://a/v1", "http://a:80/v1"], "a:80 is named twice"),
        ],
    )
    def test_base_urls_are_checked_where_the_model_is_made(self, urls: Any, match: str) -> None:
        with pytest.raises(BaseUrlError, match=match) as error:
            ChatPingPong(base_urls=urls)
        assert "hidden" not in str(error.value)

    @pytest.mark.parametrize(
        ("url", "name"),
        [
            ("http://a:8000/v1", "a:8000"),
            ("http://a:8000/v1/", "a:8000"),
            ("https://gateway/second/v1", "gateway:443/second"),
            ("http://[::1]:8000/v1", "[::1]:8000"),
            ("http://a", "a:80"),
        ],
    )
    def test_a_server_is_named_by_host_and_port(self, url: str, name: str) -> None:
        assert str(ServerAddress.parse(url)) == name

    @pytest.mark.parametrize(
        "more",
        [
            {"devices": ["fake:0"]},
            {"gpu_memory_utilization": 0.5},
            {"max_model_len": 512},
            {"dtype": "float32"},
            {"tensor_parallel_size": 2},
            {"enforce_eager": False},
            {"engine_args": {"seed": 1}},
        ],
    )
    def test_that_are_the_servers_own_are_refused(self, more: dict[str, Any]) -> None:
        with pytest.raises(SettingOfServers, match=f"{next(iter(more))}= and base_urls= cannot go together"):
            ChatPingPong(base_urls=[UNREACHABLE], **more)

    def test_a_pool_and_servers_are_refused(self, lab: Lab) -> None:
        with pytest.raises(SettingOfServers, match="pool= and base_urls="):
            ChatPingPong(base_urls=[UNREACHABLE], pool=lab.model()._serving().pool)

    def test_of_a_pool_of_servers_are_checked(self) -> None:
        with pytest.raises(SettingOfServers, match="devices="):
            engine_pool(devices=["cpu:0"], base_urls=[UNREACHABLE])
        with pytest.raises(UnknownSetting, match="A pool of servers has no setting 'dtype'"):
            engine_pool(base_urls=[UNREACHABLE], dtype="float32")

    def test_errors_of_settings_are_errors_of_configuration(self) -> None:
        assert all(issubclass(kind, ConfigError) for kind in (BaseUrlError, SettingOfServers, WrongServer))
