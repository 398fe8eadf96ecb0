"""Keys of servers: which can be sent, and how they stay out of what is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator

from langgraph_pingpong.errors import BadKey

HIDDEN = "***"


def check_key(key: object) -> None:
    """Check that a key can be sent, without showing it: the HTTP client's own error would quote it.

    Raises:
        BadKey: it cannot.
    """
    if key is None:
        return
    if not isinstance(key, str):
        raise BadKey(f"api_key is a text, and not of type {type(key).__name__}.")
    if key != key.strip():
        raise BadKey("The key has white space or a line break at its beginning or end.")
    if not (key.isascii() and key.isprintable()):
        raise BadKey("The key has a character in it that no HTTP header can carry: a control character, or no ASCII.")


def without_key(text: str, key: str | None) -> str:
    """A text with the key hidden."""
    for form in _forms(key):
        text = text.replace(form, HIDDEN)
    return text


def shows_key(error: BaseException, key: str | None) -> bool:
    """Whether an error or anything behind it quotes the key: a traceback shows all of them."""
    forms = _forms(key)
    return any(form in str(each) for each in _and_behind(error) for form in forms)


def _forms(key: str | None) -> list[str]:
    """How a key may be quoted: as it is, as Python shows a text, as JSON does."""
    return sorted({key, repr(key)[1:-1], json.dumps(key)[1:-1]}, key=len, reverse=True) if key else []


def _and_behind(error: BaseException) -> Iterator[BaseException]:
    known: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        each = ahead.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            yield each
            ahead += (
                each.__cause__,
                each.__context__,
                *(each.exceptions if isinstance(each, BaseExceptionGroup) else ()),
            )
