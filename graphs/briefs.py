"""Static briefs for the demo's agents, cut to a length in tokens from the texts beside this module."""

import re
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

MIN_TOKENS: Final = 50
"""Shortest brief in tokens; below this no handbook says anything useful."""

FIRST_REFERENCE: Final = MappingProxyType(
    {
        "researcher": "reading_a_source",
        "analyst": "estimating",
        "critic": "argument_terms",
        "planner": "action_items",
        "writer": "plain_language",
    }
)
"""Each role's first reference text after its handbook; the others follow in alphabetical order."""

ROLES: Final = tuple(FIRST_REFERENCE)
"""The five roles, in the order in which the demo's agents speak."""

# A sentence with the white space after it, so that joining sentences gives back the text. A heading
# belongs to the sentence below it. A mark before a small letter ends a quotation, not a sentence.
_SENTENCE: Final = re.compile(r"""\S.*?[.!?]["')]*(?:\s+(?![a-z])|\Z)""", re.DOTALL)


def read_text(path: str) -> str:
    """Return the text at `path` below `graphs/texts`, such as `"document.md"`.

    Raises:
        FileNotFoundError: there is no such text.
    """
    return files("graphs").joinpath("texts", *path.split("/")).read_text(encoding="utf-8")


def brief(role: str, tokens: int, count: Callable[[str], int]) -> str:
    """Return the static brief of `role`: whole sentences, the fewest that make `tokens` tokens.

    The handbook of the role comes first, then the reference texts, beginning at a different one for
    each role, so that no two roles share a prefix.

    Args:
        role: one of `ROLES`.
        tokens: wanted length in tokens, at least `MIN_TOKENS`; exceeded by less than one sentence.
        count: tokens of a text, such as the model's `get_num_tokens`; called about ten times.

    Raises:
        ValueError: unknown role, fewer than `MIN_TOKENS` tokens, or more than the texts hold.
    """
    if role not in FIRST_REFERENCE:
        raise ValueError(f"There is no role {role!r}; use one of {', '.join(ROLES)}.")
    if tokens < MIN_TOKENS:
        raise ValueError(f"A brief needs at least {MIN_TOKENS} tokens; {tokens} were asked for.")
    sentences = _sentences(role)
    enough = bisect_left(range(len(sentences)), tokens, key=lambda n: count(_first(sentences, n)))
    text = _first(sentences, enough)
    if enough == len(sentences) and (held := count(text)) < tokens:
        raise ValueError(f"The texts for the {role} hold {held} tokens; ask for no more, not {tokens}.")
    return text


def _first(sentences: tuple[str, ...], n: int) -> str:
    """Return the first `n` sentences as one text."""
    return "".join(sentences[:n]).rstrip()


@cache
def _sentences(role: str) -> tuple[str, ...]:
    """Return all that the brief of `role` can hold, in order."""
    texts = [read_text(f"{role}.md"), *(read_text(f"reference/{name}.md") for name in _references(role))]
    return tuple(_SENTENCE.findall("\n\n".join(text.strip() for text in texts)))


def _references(role: str) -> list[str]:
    """Return the names of all reference texts, turned so that the role's own comes first."""
    folder = files("graphs").joinpath("texts", "reference")
    names = sorted(entry.name.removesuffix(".md") for entry in folder.iterdir() if entry.name.endswith(".md"))
    start = names.index(FIRST_REFERENCE[role])
    return names[start:] + names[:start]
