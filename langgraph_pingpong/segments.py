"""A fast tokenizer taken apart, so that the end of a text can be encoded as it is within the whole text.

A tokenizer first looks for its added tokens in a text and then encodes each segment between them on its own. Of the
added tokens the special ones are called markers here: they give a prompt its structure.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "\u2581"
"""What SentencePiece writes in place of a space."""

MARKER_BREAK = "\ufdd0"
"""Stands inside marker text that a user supplied, from rendering to encoding. No text has it by itself: it is one of
the code points that Unicode reserves for use within a program."""

KEPT_BYTES = 32 << 20
"""Of ids that are kept, four a token: the histories of a thousand conversations of 6,000 tokens. Their texts come to
about the same."""

_AT_START = {"prepend_scheme": "never", "add_prefix_space": False, "prepend": "", "strip_left": False}
"""Settings of what tokenizers do to the beginning of a segment, each switched off."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker in a text: its own text is `text[start:stop]`.

    `before` and `end` include the white space that it eats, and `eats_on` tells that it would eat more behind it.
    """

    id: int
    before: int
    start: int
    stop: int
    end: int
    eats_on: bool


class KeptIds:
    """The ids of texts between two markers: system prompts and earlier turns come again and again."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._kept = LRUCache[tuple[Tokenizer, str], "array[int]"](limit_bytes, getsizeof=sys.getsizeof)
        self._lock = threading.Lock()

    def of(self, encoder: Tokenizer, texts: Sequence[str]) -> list[array[int]]:
        """The ids of each text."""
        with self._lock:
            known = [self._kept.get((encoder, text)) for text in texts]
        new = dict.fromkeys(text for text, ids in zip(texts, known, strict=True) if ids is None)
        made = dict(zip(new, _encode(encoder, list(new)), strict=True)) if new else {}
        with self._lock:
            for text, ids in made.items():
                if sys.getsizeof(ids) <= self._kept.maxsize:
                    self._kept[encoder, text] = ids
        return [made[text] if ids is None else ids for text, ids in zip(texts, known, strict=True)]


def _encode(encoder: Tokenizer, texts: list[str]) -> list[array[int]]:
    """All in one call, which leaves the interpreter to others meanwhile."""
    return [array("I", each.ids) for each in encoder.encode_batch_fast(texts, add_special_tokens=False)]


class Segments:
    """Finds markers, and encodes the segments between them with no marker in them.

    `first` encodes a segment that a text starts with, `inner` one that follows a marker, `rest` what remains of a
    segment whose beginning has been encoded.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """Share the vocabulary of `backend`, and leave it as it is.

        Raises:
            ValueError: it does something that cannot be taken apart.
        """
        self._added = sorted(backend.get_added_tokens_decoder().items())
        if any(token.single_word for _, token in self._added):
            raise ValueError("whether an added token counts depends on its neighbours")
        self._settings = _settings(backend)
        self.first = self._encoder(backend, self._settings)
        self.inner, self.rest = (self._changed(backend, change) for change in (_behind_marker, _within_segment))
        self._finder = self._make_finder()
        self.kept = KeptIds()

    def _changed(self, backend: Tokenizer, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Tokenizer:
        settings = json.dumps(json.loads(self._settings, object_hook=change))
        unchanged = json.loads(settings) == json.loads(self._settings)
        return self.first if unchanged else self._encoder(backend, settings)

    def _encoder(self, backend: Tokenizer, settings: str) -> Tokenizer:
        changed = Tokenizer.from_str(settings)
        encoder = Tokenizer(backend.model)
        if changed.normalizer is not None:
            encoder.normalizer = changed.normalizer
        if changed.pre_tokenizer is not None:
            encoder.pre_tokenizer = changed.pre_tokenizer
        encoder.add_tokens([token for _, token in self._added])
        encoder.encode_special_tokens = True
        own = {id: token.content for id, token in encoder.get_added_tokens_decoder().items()}
        if own != {id: token.content for id, token in self._added}:
            raise ValueError("the added tokens got other ids")
        return encoder

    def _make_finder(self) -> Tokenizer:
        """A tokenizer that knows nothing but the added tokens; its ids are their places in `_added`."""
        finder = Tokenizer(models.BPE())
        finder.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]+"), "removed")
        finder.add_tokens([token for _, token in self._added])
        return finder

    def markers(self, text: str) -> Iterator[Marker]:
        """The markers in a text, in order."""
        return self._found_by_finder(text) if self._pattern is None else self._matched(self._pattern, text)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Finds added tokens as the tokenizer does (the first, and of those the longest), thirty times as fast.

        None where some of them take more than their text.
        """
        if not self._added or any(token.lstrip or token.rstrip or token.normalized for _, token in self._added):
            return None
        texts = sorted((token.content for _, token in self._added), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def _matched(self, pattern: re.Pattern[str], text: str) -> Iterator[Marker]:
        for found in pattern.finditer(text):
            if (id := self._marker_ids.get(found[0])) is not None:
                start, stop = found.span()
                yield Marker(id, start, start, stop, stop, False)

    @functools.cached_property
    def _marker_ids(self) -> dict[str, int]:
        return {token.content: id for id, token in self._added if token.special}

    def _found_by_finder(self, text: str) -> Iterator[Marker]:
        encoding = self._finder.encode(text, add_special_tokens=False)
        for place, (before, end) in zip(encoding.ids, encoding.offsets, strict=True):
            id, token = self._added[place]
            if token.special:
                start = text.index(token.content, before)
                stop = start + len(token.content)
                yield Marker(id, before, start, stop, end, token.rstrip and end == len(text))

    @functools.cached_property
    def marker_texts(self) -> list[str]:
        """The text of every marker."""
        return [token.content for _, token in self._added if token.special]

    @functools.cached_property
    def spells_markers(self) -> bool:
        """Whether the text of a marker can be encoded without its id; some vocabularies hold it as a whole."""
        unknown = getattr(self.rest.model, "unk_token", None)
        ids = {id for id, token in self._added if token.special and token.content != unknown}
        return ids.isdisjoint(self.rest.encode(" ".join(self.marker_texts), add_special_tokens=False).ids)

    @functools.cached_property
    def has_pretokens(self) -> bool:
        """Whether a pre-tokenizer splits segments, so that no token reaches over a split."""
        return len(set(self.rest.encode("One two, three.", add_special_tokens=False).word_ids)) > 1

    @functools.cached_property
    def pairs(self) -> frozenset[str] | None:
        """Every two characters that stand side by side in some token, a space as `SPACE_MARK`.

        None where characters of a text are not those of its tokens.
        """
        if not getattr(self.rest.model, "byte_fallback", False) or not self._only_marks_spaces():
            return None
        characters = MARKER_BREAK.join(self.rest.get_vocab()).replace(" ", SPACE_MARK)
        return frozenset(map(str.__add__, characters, characters[1:]))

    def _only_marks_spaces(self) -> bool:
        normalizer = json.loads(self._settings)["normalizer"] or {"type": "Sequence", "normalizers": []}
        steps = normalizer.get("normalizers", [normalizer])
        return all(step["type"] == "Prepend" or step.get("pattern") == {"String": " "} for step in steps)


def take_apart(tokenizer: PreTrainedTokenizerBase) -> Segments | None:
    """The segments of a fast tokenizer; None if it is not one, or does something that cannot be taken apart."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    try:
        return Segments(backend)
    except Exception:  # noqa: BLE001 - the tokenizers library raises nothing narrower, as for parts written in Python
        return None


def _settings(backend: Tokenizer) -> str:
    """How a tokenizer normalizes and splits, as JSON without the vocabulary."""
    bare = Tokenizer(models.BPE())
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    return bare.to_str()


def _behind_marker(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, "prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step


def _within_segment(step: dict[str, Any]) -> dict[str, Any]:
    return {key: _AT_START.get(key, value) for key, value in step.items()}
