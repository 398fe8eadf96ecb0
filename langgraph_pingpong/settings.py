"""The settings of `ChatPingPong`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from langchain_core.language_models import LangSmithParams
from pydantic import ConfigDict, Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

from langgraph_pingpong.calling import ConfigAwareChatModel
from langgraph_pingpong.calls import OWN, SAMPLING
from langgraph_pingpong.config import parse_base_urls, parse_devices, refuse_unknown
from langgraph_pingpong.errors import NotExact, SettingOfServers
from langgraph_pingpong.exact import Exact
from langgraph_pingpong.identity import engines_identity, served_model
from langgraph_pingpong.keys import check_key
from langgraph_pingpong.kv_budget import KV_POOL_RATIO
from langgraph_pingpong.pool import EnginePool

ENGINE_SETTINGS = (
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "exact",
    "kv_pool_ratio",
    "kv_offloading_size",
    "kv_transfer",
    "engine_args",
)

CLIENT_SETTINGS = ("timeout", "max_retries", "http_client", "kv_pool_ratio")
"""What is set for servers, beside the key."""


class Settings(ConfigAwareChatModel):
    """What a user can set on the model. Settings of engines carry vLLM's names."""

    # An input of the wrong type is not quoted: it may be a key.
    model_config = ConfigDict(extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    model: str | None = None
    """A folder or Hugging Face id; None is the small default model, made ready on first use."""
    devices: Sequence[str] | None = None
    """Where engines run, one each: 'cuda:N', 'cpu:N' or 'fake:N'; None takes two devices where there are two."""
    base_urls: Sequence[str] | None = None
    """vLLM servers to use instead of devices, like 'http://a:8000/v1'. `model` says whose tokenizer to use here."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The longest answer, in tokens; None is what the context leaves."""
    temperature: float | None = None
    """0 always takes the likeliest token; None is the model's own default, as for the next three."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Sample among so many likeliest tokens."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Texts that end the answer; they are not part of it."""
    n: int | None = Field(default=None, ge=1)
    """How many answers `generate` and `batch` give to a prompt; `invoke` returns the first of them."""
    logprobs: bool | None = None
    """Give each token's log-probability in `response_metadata["logprobs"]`, in the form of OpenAI's API."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """How many likeliest tokens to give with each of them."""
    streaming: bool = False
    """Let `invoke` tell callbacks of each token, too."""
    timeout: float | None = Field(default=None, gt=0)
    """How long a call may take from when its prompt is ready to its last token, in seconds.

    Of several servers each may be silent for its share of that time; then another one goes on.
    """
    max_retries: int | None = Field(default=None, ge=0)
    """How often the OpenAI client may send a request to the same server again.

    None is its own default with one server, and 0 with several, where the request goes to another one. Engines in this
    process have no requests that get lost: nothing is sent again.
    """
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """The key that servers ask for. Engines in this process ask for none.

    It stays in this process: dumps, pickles and checkpoints of the model are without it.
    """
    http_client: Callable[[], Any] | None = Field(default=None, exclude=True)
    """Makes the HTTP client for each server, for TLS and proxies: `lambda: openai.DefaultAsyncHttpxClient(verify=...)`.

    A function, because a client belongs to one event loop: the engines', which is not the caller's.
    """
    overlap: Literal["on", "off", "same-device"] = "on"
    """'off' is the same program without prefills: the baseline.

    'same-device' also prefills on the device that answers, which otherwise happens elsewhere or not at all: pieces of a
    prompt ride on its decode steps. Engines get the CUDA graphs for that when they are made.
    """
    exact: Exact = "ids"
    """What is equal to a run with `overlap="off"` (and the same `exact`), whatever was cached or runs beside it.

    "ids": the token ids of every prompt. Texts may part where two tokens are about as likely, as in any batch of
    vLLM's, which rounds differently in another one.

    "bits": the answers, too, their tokens and log-probabilities, on devices of one kind. Each engine computes one
    request at a time, in steps of 128 tokens: an answer waits for others of its device, and a cached prefix ends at a
    multiple of 128 and never within an answer. Sampled answers need a `seed`, too. Servers are exact if they are
    started so: `pingpong serve --exact bits`.
    """
    defer_downstream: bool = True
    """Prefill the next prompt from the upstream's first token on; False starts with the upstream's prefill."""
    speculate: bool = True
    """Begin a node's answer before it is called, where its device is idle and its prompt would be that one.

    It is taken over if the call asks for exactly that answer, and aborted if not. Known from the second run on.
    """
    custom_events: bool = False
    """Tell `stream(..., stream_mode="custom")` of a graph what happens: calls, appends, certificates (docs/events.md).

    A run that is streamed in other modes is as it is without.
    """
    branch_prefetch_limit: int = Field(default=8, ge=0)
    """How many prompts are prefilled at most of which only some will be asked for, as where an edge is conditional.

    Those that earlier runs took most often come first. They may hold a quarter of a device's KV cache.
    """
    chat_template: str | None = None
    """A Jinja template in place of the model's own."""
    escape_markers: bool | None = None
    """Whether text in messages that spells a special token, like `<|im_end|>`, stays text: in prompts and on edges.

    None is yes with engines in this process, and with servers what vLLM's own chat API does: such text is the token.
    True takes a fast tokenizer. It is settled when the engines are made; copies of a model share them.
    """
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, for example `{"enable_thinking": False}`."""
    tool_parser: str = "hermes"
    """The name of vLLM's parser that finds tool calls in the model's answers."""
    reasoning_parser: str | None = None
    """That of the parser that finds reasoning; it is put into `additional_kwargs["reasoning_content"]`.

    Without one, reasoning is content. With engines of your own, give them the same `reasoning_parser`, or a grammar
    would bind the reasoning too.
    """
    kv_transfer: bool = False
    """Let a device read what another one has computed of a prompt, where that takes less time than computing it.

    Engines are made with vLLM's NIXL connector then. It takes NIXL: `pip install --no-deps nixl nixl-cu12`.
    """
    dtype: str | None = None
    """The type of the weights, like 'bfloat16'; None is vLLM's own default, as for the next four."""
    max_model_len: int | None = None
    """The longest prompt plus answer, in tokens."""
    gpu_memory_utilization: float | None = None
    """The share of each GPU's memory that vLLM may take, 0 to 1."""
    tensor_parallel_size: int | None = None
    """How many GPUs an engine takes: its device and the next ones."""
    enforce_eager: bool | None = None
    """Compile nothing and capture no CUDA graphs: a faster start, slower answers. On CPUs True by itself."""
    kv_pool_ratio: float = Field(default=KV_POOL_RATIO, gt=0, le=1)
    """The share of an engine's KV cache that anchors, prompts that are prefilled and KV that is read may hold together.

    The rest is for answers and for what is cached of earlier ones. `kv_budget.py` has the policy.
    """
    kv_offloading_size: float | None = None
    """Main memory (GiB) for KV that a GPU has no room for; vLLM's offloading connector brings it back when needed."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments, under vLLM's name."""
    pool: EnginePool | None = Field(default=None, exclude=True)
    """Engines to share with other models; who made the pool closes it."""
    tokenizer: Any = Field(default=None, exclude=True)
    """A tokenizer object in place of the model's own."""

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, values: Any) -> Any:
        if isinstance(values, dict):
            names = {*cls.model_fields, "stop_sequences"}
            refuse_unknown(values, names, "ChatPingPong")
            if (devices := values.get("devices")) is not None:
                parse_devices(devices)
            if (base_urls := values.get("base_urls")) is not None:
                parse_base_urls(base_urls)
                _refuse_settings_of_servers(values, cls.model_fields)
            key = values.get("api_key")
            check_key(key.get_secret_value() if isinstance(key, SecretStr) else key if isinstance(key, str) else None)
            if values.get("pool") is not None and values.get("exact", "ids") != "ids":
                raise NotExact("exact='bits' is up to the engines of the pool: make it with engine_pool(exact='bits').")
        return values

    @property
    def _llm_type(self) -> str:
        return "langgraph-pingpong"

    @property
    def model_name(self) -> str:
        """The name of the model that is served, as answers and traces tell it."""
        return served_model(self.model, self.pool)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What answers depend on: LangChain's cache gives an answer to every model for which this is the same."""
        shaping = ("escape_markers", "tool_parser", "reasoning_parser", "output_version")
        return {
            "model": self.model_name,
            "tokenizer": getattr(self.tokenizer, "name_or_path", None),
            "chat_template": self.chat_template or getattr(self.tokenizer, "chat_template", None),
            **{name: getattr(self, name) for name in shaping},
            **engines_identity(dict(self), self.pool),
            **self._call_settings,
        }

    @property
    def _call_settings(self) -> dict[str, Any]:
        """The settings that a call can replace."""
        return {name: getattr(self, name) for name in (*SAMPLING, *OWN, "stop")}

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """With several answers to a prompt, `invoke` does not stream even where somebody listens to chunks."""
        if self._asks_for_several(kwargs):
            return False
        return super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    def _should_use_protocol_streaming(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """The same where somebody listens to `stream_events` in its third version."""
        if self._asks_for_several(kwargs):
            return False
        return super()._should_use_protocol_streaming(async_api=async_api, run_manager=run_manager, **kwargs)

    def _asks_for_several(self, kwargs: Mapping[str, Any]) -> bool:
        return (kwargs.get("n") or self.n or 1) != 1 and not kwargs.get("stream")

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = self._llm_type
        if "model" not in kwargs:  # LangChain would show the model of a call
            params["ls_model_name"] = self.model_name
        return params


def _refuse_settings_of_servers(values: dict[str, Any], fields: Mapping[str, FieldInfo]) -> None:
    """A setting of engines is refused, unless it is as it would be if it had not been given."""
    if values.get("exact") == "bits":
        raise SettingOfServers("exact='bits' is up to the servers: start them with `pingpong serve --exact bits`.")
    for name in ("devices", "pool", *ENGINE_SETTINGS):
        default = fields[name].get_default(call_default_factory=True)
        if name not in ("exact", "kv_pool_ratio") and values.get(name) not in (None, default):
            raise SettingOfServers(f"{name}= and base_urls= cannot go together.")
