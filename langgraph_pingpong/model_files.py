"""What is read of a model's files on this side, by the engine arguments that vLLM reads them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langgraph_pingpong.config import EngineConfig
from langgraph_pingpong.errors import ModelNotFound

UNREADABLE = (OSError, ValueError, ImportError)
"""What transformers raises where files are missing or broken, or need code that is not trusted or not installed."""

_NEVER_SCALED = "llama3"
"""The one kind of scaled rotary embeddings whose factor no release of vLLM multiplies the context length by."""


def context_limit(config: EngineConfig) -> int | None:
    """The longest prompt plus answer in tokens, as far as settings and the model's config tell before it runs.

    Never less than what vLLM will settle on: a prompt that it takes must not be refused.

    Raises:
        ModelNotFound: the model's config could not be read.
    """
    args = config.vllm_args
    if (given := args.get("max_model_len")) is not None:
        return given if isinstance(given, int) and given > 0 else None  # vLLM has words for "what fits", too
    if args.get("hf_overrides"):
        return None
    from transformers import AutoConfig

    source, how = args.get("hf_config_path") or config.model, _loading(args, args.get("revision"))
    try:
        text_config = AutoConfig.from_pretrained(source, **how).get_text_config()
    except UNREADABLE as error:
        raise ModelNotFound(f"The config of {source!r} could not be read: {why(error)}") from error
    names = ("model_max_length", "max_position_embeddings")  # the first counts: Command-R has both
    limit = next((length for name in names if (length := getattr(text_config, name, None))), None)
    return int(limit) if limit and not _is_scaled(text_config) else None


def tokenizer_args(model: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Which tokenizer vLLM takes for a model, and how: arguments for `load_tokenizer`."""
    revision = engine_args.get("tokenizer_revision") or engine_args.get("revision")
    return {"model": engine_args.get("tokenizer") or model, **_loading(engine_args, revision)}


def why(error: BaseException) -> str:
    """What transformers says, and where to give what it asks for."""
    if "trust_remote_code" not in str(error):
        return str(error)
    return f"{error}\nHere it is engine_args={{'trust_remote_code': True}}; with servers, load it and pass tokenizer=."


def _loading(engine_args: Mapping[str, Any], revision: str | None) -> dict[str, Any]:
    """How vLLM loads files, in transformers' words.

    Whether to trust code of the model's is always said: where it is not, transformers asks at the terminal.
    """
    code, token = engine_args.get("code_revision"), engine_args.get("hf_token")
    given = {"revision": revision, "code_revision": code, "token": token}
    trusted = bool(engine_args.get("trust_remote_code"))
    return {"trust_remote_code": trusted, **{name: value for name, value in given.items() if value is not None}}


def _is_scaled(text_config: Any) -> bool:
    """Whether vLLM may hold more than the config says: for which kinds it multiplies depends on its release."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, Mapping)]  # a kind for each type of layers
    return any(_factor(each) != 1 for each in (rope, *by_layer))


def _factor(rope: Mapping[str, Any]) -> float:
    kind = rope.get("rope_type") or rope.get("type")
    return 1 if kind == _NEVER_SCALED else rope.get("factor") or 1
