"""Which token ids of a growing text can no longer change, whatever follows. One class for each way to tell."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from langgraph_pingpong.segments import MARKER_BREAK, SPACE_MARK, Segments

if TYPE_CHECKING:
    from tokenizers import Encoding

    from langgraph_pingpong.tokens import ChatTemplate

HELD_PRETOKENS = 2
"""Younger pre-tokens that must stand behind a token before it is final.

One is not enough for GPT-2's rule of contractions (`it'l` + `l`); two held over 300,000 cuts of real and hostile
text in six tokenizers.
"""

HELD_CHARACTERS, HELD_IDS = 64, 16
"""Where a tokenizer cannot be taken apart: how much shorter the text is that a longer one is compared with, and how
many of the ids they agree on are held back."""

_WHITE_SPACE = "".join(char for char in map(chr, range(0x3001)) if char.isspace() and not "\x1c" <= char <= "\x1f")
"""White space as tokenizers see it, which is not quite Python's."""

_SHORT = 64
"""A tail of fewer characters is encoded again with every piece."""

HARD_TEXT = (
    " It'll cost 1234567890123 crabs,\n\n \t if (x<=Na\u00efve) {ABCdef\u65e5\u672c\u8a9eABCabc}...\r\n  "
    "\u00a0'\u00dcn\u00ef' e\u0301\u0323 \u0958 \U0001f469\u200d\U0001f680 <|im_  \u0644\u0627 [/IN www.x-y.z/?q=1&&b  "
    "\n\n\n end."
)
"""What tokenizers split in surprising places."""


class GrowingIds:
    """The token ids of a growing text that no later text can change.

    Here these are the ids up to the last marker; the kinds below know of more. Only the tail that is not final yet
    is encoded again when text comes in, so a piece costs the same at any length.
    """

    def __init__(self, template: ChatTemplate, text: str = "") -> None:
        """Start with `text`, which was rendered: markers in it are markers."""
        self.ids: list[int] = []
        """The final ids so far."""
        self._template = template
        self._segments = template.segments
        self._encoder = self._segments.first if self._segments else None
        self._tail = ""
        self._looked = 0  # characters of the tail that need not be looked at again
        self._drops_space = False  # the marker before the tail eats white space, and the tail is still empty
        self._grow(text, rendered=True)

    def append(self, text: str, *, rendered: bool = False) -> int:
        """Add what a model says, in which markers count only if the template does not escape them, or rendered text.

        Returns how many ids became final.
        """
        known = len(self.ids)
        self._grow(text, rendered or not self._template.escape_markers)
        return len(self.ids) - known

    def rest(self) -> list[int]:
        """The ids that follow the final ones if the text ends here."""
        return self._encode(self._tail)

    def fork(self) -> Self:
        """The same text, to go on with in another way."""
        other = copy.copy(self)
        other.ids = list(self.ids)
        return other

    def _grow(self, text: str, rendered: bool) -> None:
        if self._drops_space:
            text = text.lstrip(_WHITE_SPACE)
            self._drops_space = not text
        if rendered:  # so that its markers are told from those that a model spelled before it
            self._tail = self._template.escape(self._tail)
        self._tail += text
        if rendered and self._segments:
            self._take_markers(self._segments)
        self._settle()

    def _take_markers(self, segments: Segments) -> None:
        """Everything up to the last marker is final: nothing fuses with a marker."""
        tail = self._tail
        # Where markers are escaped, what follows rendered text is plain text, so that a marker at its end is whole.
        limit = len(tail) if self._template.escape_markers else self._template.unsettled_from(tail)
        markers = [*itertools.takewhile(lambda marker: marker.stop <= limit, segments.markers(tail))]
        starts = [0, *(marker.end for marker in markers)]
        ends = [marker.before for marker in markers]
        texts = [self._template.unescape(tail[start:end]) for start, end in zip(starts, ends, strict=False)]
        first = segments.kept.of(self._encoder or segments.first, texts[:1])
        for ids, marker in zip([*first, *segments.kept.of(segments.inner, texts[1:])], markers, strict=True):
            self.ids += [*ids, marker.id]
        if markers:
            self._encoder, self._looked, self._drops_space = segments.inner, 0, markers[-1].eats_on
        self._tail = self._template.unescape(tail[starts[-1] :])

    def _settle(self) -> None:
        """Take the ids of the tail that are final."""

    def _cut(self, ids: Sequence[int], end: int) -> None:
        """The tail's first `end` characters are final, with these ids."""
        self.ids += ids
        self._tail = self._tail[end:]
        if self._segments:
            self._encoder = self._segments.rest

    def _encode(self, text: str) -> list[int]:
        if self._encoder is None:
            return self._template.encode(text)
        return self._encoder.encode(text, add_special_tokens=False).ids if text else []

    @classmethod
    def suits(cls, template: ChatTemplate) -> bool:
        """Whether the rule can be applied to the template's tokenizer, and holds for a hard text."""
        growing = cls(template, template.hard_text)
        for character in HARD_TEXT:
            growing.append(character)
        return growing.ids == template.encode(template.hard_text + HARD_TEXT)[: len(growing.ids)]


class GrowingByPretokens(GrowingIds):
    """For tokenizers with a pre-tokenizer: a pre-token is final once enough younger ones stand behind it.

    Exact because pre-tokenizers look forward only, and not far: a tail that starts at a pre-token is split the way
    it is split within the whole text.
    """

    def _settle(self) -> None:
        # A long tail is one long pre-token. It is looked at again when it has grown by an eighth, so that the work
        # stays in proportion to the text.
        if self._encoder is None or len(self._tail) - self._looked < (self._looked - _SHORT) // 8:
            return
        settled = self._tail[: self._template.unsettled_from(self._tail)]
        encoding = self._encoder.encode(settled, add_special_tokens=False)
        starts = _pretoken_starts(encoding)
        for count, end in reversed(starts[1 : max(1, len(starts) - HELD_PRETOKENS + 1)]):
            if self._splits(end):
                self._cut(encoding.ids[:count], end)
                break
        self._looked = len(self._tail)

    def _splits(self, end: int) -> bool:
        """Whether the normalizer changes nothing across this place, as it does where it orders accents anew."""
        if self._encoder is None or self._segments is None or self._encoder.normalizer is None:
            return True
        normalize, normalize_rest = self._encoder.normalizer.normalize_str, self._segments.rest.normalizer.normalize_str
        return bool(normalize(self._tail[:end]) + normalize_rest(self._tail[end:]) == normalize(self._tail))

    @classmethod
    def suits(cls, template: ChatTemplate) -> bool:
        """Whether there is a pre-tokenizer, and the rule holds for a hard text."""
        return template.segments is not None and template.segments.has_pretokens and super().suits(template)


class GrowingByPairs(GrowingIds):
    """For tokenizers that merge across a whole segment, as SentencePiece does.

    No token reaches over two neighbouring characters that no token holds side by side, such as the end of a word
    and a space. So the ids in front of such a pair are final, whatever follows.
    """

    def _settle(self) -> None:
        pairs = (self._segments and self._segments.pairs) or ()
        limit = self._template.unsettled_from(self._tail)
        for at in range(limit - 1, max(0, self._looked - 1), -1):
            if self._tail[at - 1 : at + 1].replace(" ", SPACE_MARK) not in pairs:
                self._cut(self._encode(self._tail[:at]), at)
                self._looked = limit - at
                return
        self._looked = max(self._looked, limit)

    @classmethod
    def suits(cls, template: ChatTemplate) -> bool:
        """Whether the pairs are known, and the rule holds for a hard text."""
        return template.segments is not None and bool(template.segments.pairs) and super().suits(template)


class GrowingByWholeText(GrowingIds):
    """For tokenizers that cannot be taken apart: the ids that the text and a shorter one agree on, less a few.

    This is a measured rule, not a proven one. The whole text is encoded each time it has grown by an eighth.
    """

    _said = ""

    def _grow(self, text: str, rendered: bool) -> None:
        if rendered:
            self._tail, self._said = self._whole() + text, ""
        else:
            self._said += text
        length = len(self._tail) + len(self._said)
        if length * 8 < self._looked * 9:
            return
        self._looked = length
        whole = self._whole()
        settled = whole[: self._template.unsettled_from(whole)]
        ids, fewer = self._template.encode(settled), self._template.encode(settled[:-HELD_CHARACTERS])
        agreed = next((i for i, pair in enumerate(zip(ids, fewer, strict=False)) if pair[0] != pair[1]), len(fewer))
        final = ids[: max(0, agreed - HELD_IDS)]
        if final[: len(self.ids)] == self.ids:
            self.ids += final[len(self.ids) :]

    def rest(self) -> list[int]:
        """The ids that follow the final ones if the text ends here."""
        return self._template.encode(self._whole())[len(self.ids) :]

    def _whole(self) -> str:
        """All text so far, rendered. No marker is made of what was rendered and what was said."""
        joint = MARKER_BREAK if self._said and self._template.opens_marker(self._tail) else ""
        return self._tail + joint + self._template.escape(self._said)


def _pretoken_starts(encoding: Encoding) -> list[tuple[int, int]]:
    """Where each pre-token starts: as a token index and as a character index.

    Left out is a start within a character, as where a normalizer makes two characters of one.
    """
    words, offsets = encoding.word_ids, encoding.offsets
    inner = (i for i in range(1, len(words)) if words[i] != words[i - 1] and offsets[i][0] >= offsets[i - 1][1])
    return [(i, offsets[i][0]) for i in (0, *inner)] if words else []


def growing_kind(template: ChatTemplate) -> type[GrowingIds]:
    """The kind of growing ids that gives out the most and is right for the template's tokenizer."""
    kinds = (GrowingByPretokens, GrowingByPairs, GrowingByWholeText)
    return next((kind for kind in kinds if kind.suits(template)), GrowingIds)
