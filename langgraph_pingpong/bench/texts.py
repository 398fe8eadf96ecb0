"""Real text of a wanted length, different for every seed, from the handbooks and documents of the demo."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from itertools import accumulate, count

from langgraph_pingpong.errors import ConfigError

Count = Callable[[str], int]
"""Tokens of a text."""

_SENTENCE = re.compile(r"""\S.*?[.!?]["')]*(?:\s+(?![a-z])|\Z)""", re.DOTALL)
_FOLDERS = ((), ("reference",), ("documents",))


class Library:
    """Texts of wanted lengths. The same title, length and seed give the same text."""

    def __init__(self, count_tokens: Count, seed: int) -> None:
        self._count = count_tokens
        self._seed = seed
        self._made: dict[tuple[str, int, str], str] = {}
        self._counted: dict[str, int] = {}

    def text(self, title: str, tokens: int, *of: object) -> str:
        """A text under a title: whole sentences, the fewest that make `tokens` tokens.

        Sentences keep their order within a text, and texts are shuffled; when all are used up, the next round has
        another order. Texts of different titles have no common beginning. `of` tells those of one title apart.
        """
        key = title, tokens, "/".join(map(str, of))
        if key not in self._made:
            self._made[key] = self._make(f"# {' '.join([title, *map(str, of)])}\n\n", tokens, f"{self._seed}/{key}")
        return self._made[key]

    def _make(self, heading: str, tokens: int, seed: str) -> str:
        sentences, about = [heading], 0
        for sentence in _endless(seed):
            sentences.append(sentence)
            about += self._about(sentence)
            if about > tokens * 1.1 + 50:
                break
        sums = list(accumulate(map(self._about, sentences)))
        enough = bisect_left(sums, tokens) + 1

        def reaches(number: int) -> bool:
            return self._count("".join(sentences[:number]).rstrip()) >= tokens

        while not reaches(enough):
            enough += 1
        while enough > 1 and reaches(enough - 1):
            enough -= 1
        return "".join(sentences[:enough]).rstrip()

    def _about(self, sentence: str) -> int:
        """Its tokens by itself; joined with others it may have one more or less."""
        if sentence not in self._counted:
            self._counted[sentence] = self._count(sentence)
        return self._counted[sentence]


def _endless(seed: str) -> Iterator[str]:
    for part in count(1):
        texts = list(_texts())
        random.Random(f"{seed}/{part}").shuffle(texts)
        yield f"Part {part}. "
        for text in texts:
            yield from _SENTENCE.findall(text)
            yield "\n\n"


@cache
def _texts() -> tuple[str, ...]:
    """All texts beside the demo's graphs, in the order of their names."""
    try:
        root = files("graphs").joinpath("texts")
    except ModuleNotFoundError:
        raise ConfigError("The texts of the profiles are in the folder graphs/: run this from a checkout.") from None
    folders = [root.joinpath(*names) for names in _FOLDERS]
    entries = [entry for folder in folders for entry in folder.iterdir() if entry.name.endswith(".md")]
    return tuple(entry.read_text(encoding="utf-8").strip() for entry in sorted(entries, key=lambda each: each.name))
