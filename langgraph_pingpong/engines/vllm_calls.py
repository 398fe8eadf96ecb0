"""A call in vLLM's words, and what vLLM says against it in this package's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from langgraph_pingpong.errors import CallRefused, EngineBusy, EngineDead, EngineError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_REFUSED = ("VLLMValidationError", "VLLMClientError")
_BUSY = ("GracefulHTTPError", "QueueOverflowError", "MaxQueuedTokensError")
"""Names in `vllm.exceptions`; no release has all of them."""


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """How to sample, checked as a whole.

    Not every value of a wrong type is refused by vLLM itself. One that is not gets as far as the engine's process,
    where reading it fails in the thread that reads all requests: from then on the engine answers nobody.

    Raises:
        CallRefused: a value is of a type, or a size, that vLLM cannot take.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    values = {**sampling, "output_kind": RequestOutputKind.DELTA}
    try:
        if constraint := values.get("structured_outputs"):
            values["structured_outputs"] = StructuredOutputsParams(**constraint)
        params = SamplingParams(**values)
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)  # takes 5 us
    except _refusals(TypeError, OverflowError) as error:
        raise CallRefused(f"vLLM refused the call: {error}") from error
    return params


@contextmanager
def clear_errors(device: str, engine: AsyncLLM) -> Iterator[None]:
    """Whatever goes wrong with a request, in this package's errors."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(f"The engine on {device} died.") from error
    except EngineGenerateError as error:
        if engine.errored:
            raise EngineDead(f"The engine on {device} died.") from error
        raise _why_not(device, error) from error
    except _refusals() as error:
        raise CallRefused(f"vLLM refused the call: {error}") from error
    except _named(_BUSY) as error:
        raise EngineBusy(f"The engine on {device} takes no more requests: {error}") from error


def _why_not(device: str, error: Exception) -> CallRefused | EngineError:
    """An error of vLLM's that says nothing by itself: what it came from does."""
    cause = error.__cause__ or error
    if isinstance(cause, _refusals(TypeError)):
        return CallRefused(f"vLLM refused the call: {cause}")
    return EngineError(f"The engine on {device} failed at the call: {type(cause).__name__}: {cause}")


def _refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    return (ValueError, *more, *_named(_REFUSED))


def _named(names: tuple[str, ...]) -> tuple[type[Exception], ...]:
    from vllm import exceptions

    found = (getattr(exceptions, name, None) for name in names)
    return tuple(each for each in found if each is not None)
