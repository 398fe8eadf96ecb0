"""An answer that goes on elsewhere when its engine fails.

Nothing was said yet: the very same prompt goes to another engine. Something was said: what was given out stays as it
is, and another engine continues from the prompt and the ids behind that text. An engine may be ahead of its text by
some ids (text that may become a stop string, an unfinished character): those are left out and sampled again. Text that
ends within a token, as it does before what may become a stop string, is said again by the other engine, and left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from langgraph_pingpong.engines.base import Delta, Request, new_request_id
from langgraph_pingpong.errors import EngineDead, EngineError, ServerFailed
from langgraph_pingpong.health import FAILED, message_of
from langgraph_pingpong.pool import EnginePool, Lease
from langgraph_pingpong.speculation import Speculation

MAX_MOVES = 2
"""How often an answer moves: a prompt that kills its engine must not kill them all."""

Decode = Callable[[Sequence[int]], str]
"""From token ids to text, as the engine shows it."""

_BY_IDS_ALONE = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs", "logit_bias"),
    *("stop", "stop_token_ids", "ignore_eos", "repetition_penalty"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
"""What can be told from the prompt and the ids after it, wherever the one ends and the other begins."""

_CONTEXT = 16
"""Ids of the prompt that are decoded with an answer: some tokenizers drop a space at the beginning of a text."""


@dataclass
class MovingAnswer:
    """The answer to one request, on the engine of `lease`, which moves with it.

    `decode` is needed to go on in mid-answer. `moved` is told the device it moved to, the one that was left, and how
    many tokens of the answer were kept.
    """

    pool: EnginePool
    lease: Lease
    request: Request
    decode: Decode | None
    moved: Callable[..., Any]
    begun: Speculation | None = None
    """The answer on the first engine, if it was begun before its call."""
    ids_equal: bool = True
    """Whether every engine saw the ids it was given."""
    began_anew: bool = False
    """Whether an engine failed before it said anything that could be kept."""
    left_out: int = 0
    """Tokens that were given out, and then sampled again."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why engines failed, by device."""
    _over: bool = False
    _tried: set[int] = field(default_factory=set)
    _kept: tuple[int, ...] = ()
    _said: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _again: str = ""
    """Text that was given out, and that the engine will say once more."""

    async def deltas(self) -> AsyncGenerator[Delta]:
        """The deltas of one whole answer, whoever gives them.

        Raises:
            EngineDead, ServerFailed: an engine failed, and no other can go on; the message says why.
            EngineError: it was continued otherwise than it had begun.
            CallRefused: an engine cannot do what the request asks for.
        """
        while True:
            try:
                async with aclosing(self._source()) as deltas:
                    async for delta in deltas:
                        yield self._joined(delta)
                return
            except FAILED as error:
                if self._over:
                    return
                self._move(error)

    def _source(self) -> AsyncGenerator[Delta]:
        if self.begun is not None and not self._tried:
            return self.begun.deltas()
        return self.lease.generate(self._rest())

    def _rest(self) -> Request:
        """What is still to be answered."""
        if not self._tried:
            return self.request
        request, kept = replace(self.request, request_id=new_request_id()), self._kept
        if not kept:
            return request
        sampling = dict(request.sampling)
        if sampling.get("max_tokens"):
            sampling["max_tokens"] -= len(kept)
        return replace(request, prompt_token_ids=request.prompt_token_ids + kept, sampling=sampling)

    def _joined(self, delta: Delta) -> Delta:
        """A delta of the rest as one of the whole; what is told once was told at its beginning."""
        if delta.prompt_token_ids is not None:
            self.ids_equal &= delta.prompt_token_ids == self.request.prompt_token_ids + self._kept
        self._over = delta.finish_reason is not None and self.request.sampling.get("n", 1) == 1
        self._said += delta.token_ids
        if self._again:
            delta = replace(delta, text=self._new_text(delta))
        self._text.append(delta.text)
        return replace(delta, prompt_token_ids=None, num_cached_tokens=None) if self._kept else delta

    def _new_text(self, delta: Delta) -> str:
        """What a delta says beyond the text that was given out already."""
        text, again = delta.text, self._again
        same = min(len(text), len(again))
        if text[:same] != again[:same] or (delta.finish_reason is not None and same < len(again)):
            causes = " ".join(f"{device}: {cause}" for device, cause in self.failed.items())
            raise EngineError(
                f"{causes} The answer had begun, and {self.lease.engine.device} goes on with another one."
            )
        self._again = again[same:]
        return text[same:]

    def _move(self, error: EngineDead | ServerFailed) -> None:
        """Move to another engine, or raise why not."""
        if self.pool.health.closed or len(self.pool.engines) == 1:
            raise error
        left = self.lease.engine.device
        self._tried.add(self.lease.index)
        self.failed[left] = message_of(error)
        kept, again = self._reusable(error)
        if len(self._tried) > MAX_MOVES or not self.lease.move(self._tried, self.request):
            raise self._no_way_on(error) from error
        self.began_anew |= not kept
        self.left_out += len(self._said) - len(kept)
        self._kept, self._said, self._again = kept, list(kept), again
        self.moved(device=self.lease.engine.device, left=left, said=len(kept))

    def _reusable(self, error: EngineDead | ServerFailed) -> tuple[tuple[int, ...], str]:
        """The ids said so far whose text was given out, and the text behind them that was given out, too."""
        if not self._said and not any(self._text):
            return (), ""
        why_not = _memory_beyond_ids(self.request.sampling)
        found = None if why_not or self.decode is None or not self._said else self._behind_the_text(self.decode)
        if found is None:
            why_not = why_not or "the ids of what was said are not known"
        elif len(found[0]) < len(self._said) and self.request.sampling.get("logprobs") is not None:
            why_not = "logprobs of more tokens were given out than of text"
        if why_not is None and found is not None:
            return found
        text = f"{message_of(error)} The answer had begun, and no other engine can go on: {why_not}."
        raise type(error)(text) from error

    def _behind_the_text(self, decode: Decode) -> tuple[tuple[int, ...], str] | None:
        """The ids whose text was given out, and how much of the next one's was; None where ids and text differ."""
        text, context = "".join(self._text), list(self.request.prompt_token_ids[-_CONTEXT:])
        before, longer = len(decode(context)), ""
        for end in range(len(self._said), -1, -1):
            shown = decode(context + self._said[:end])[before:]
            if text.startswith(shown):
                known = shown == text or longer.startswith(text)
                return (tuple(self._said[:end]), text[len(shown) :]) if known else None
            longer = shown
        return None

    def _no_way_on(self, error: EngineDead | ServerFailed) -> EngineDead | ServerFailed:
        causes = {**self.pool.health.causes(), **self.failed}
        listed = " ".join(f"{device}: {cause}" for device, cause in causes.items())
        return type(error)(f"No engine is left for this call. {listed}")


def _memory_beyond_ids(sampling: Mapping[str, Any]) -> str | None:
    """What about the sampling of an answer another engine could not take up in its middle."""
    if sampling.get("n", 1) > 1:
        return "it is one of several to the same prompt"
    beyond = [name for name, value in sampling.items() if value and name not in _BY_IDS_ALONE]
    return f"{', '.join(beyond)} depends on how far it is" if beyond else None
