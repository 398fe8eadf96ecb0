"""Whatever a graph gives, as plain data without what differs from run to run: ids, times, addresses, certificates."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from pydantic import BaseModel

UNEQUAL = re.compile(
    r"(?P<id>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32}\b|chatcmpl-tool-[0-9a-f]+)"
    r"|(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(?:\+\d\d:\d\d)?)"
    r"|(?P<version>\d{32}\.\d\.\d+|\d{32}\.\d+)"
    r"|(?P<address>0x[0-9a-f]{6,})"
    r"|(?P<elapsed>elapsed: [\d.]+s)"
)
ATOMS = (type(None), bool, int, float, bytes)
TIMES = ("created_at", "updated_at", "node_first_attempt_time", "timestamp")
OWN = ("pingpong", "input_token_details")
"""Where an event holds a message's parts as a dict: the certificate, and how much was found in the cache."""


class Plain:
    """Turns values into plain data. Ids become the order in which they were first seen, or all one if not `ordered`."""

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self._ids: dict[str, int] = {}
        self._texts: dict[str, str] = {}

    def __call__(self, value: Any) -> Any:
        """The plain form of a value."""
        if type(value) is str:
            return self._text(value)
        if type(value) in ATOMS:
            return value
        if isinstance(value, Enum):
            return self(value.value)
        if isinstance(value, BaseMessage):
            return self._message(value)
        if isinstance(value, BaseChatModel):
            return type(value).__name__
        if isinstance(value, BaseException):
            return type(value).__name__, self(str(value))
        if isinstance(value, type):
            return value.__qualname__
        return self._container(value)

    def _text(self, text: str) -> str:
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = UNEQUAL.sub(self._name, text)
        return known

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict | Mapping):
            return {self(key): self._entry(key, each) for key, each in value.items() if key not in OWN}
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return type(value).__name__, self(value._asdict())
        if isinstance(value, list | tuple | deque):
            return [self(each) for each in value]
        if isinstance(value, set | frozenset):
            return sorted((self(each) for each in value), key=repr)
        if isinstance(value, BaseModel):
            return type(value).__name__, self({name: getattr(value, name) for name in type(value).model_fields})
        if dataclasses.is_dataclass(value):
            return type(value).__name__, self({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        return self(repr(value))

    def _entry(self, key: Any, value: Any) -> Any:
        if key in TIMES:
            return "<time>"
        plain = self(value)
        unsorted = key == "__interrupt__" and not self._ordered  # in the order in which their nodes ended
        return sorted(plain, key=repr) if unsorted else plain

    def _message(self, message: BaseMessage) -> Any:
        """All of it but the certificate, and but how much of the prompt was found in the cache."""
        fields = {name: getattr(message, name) for name in type(message).model_fields}
        fields["response_metadata"] = {k: v for k, v in message.response_metadata.items() if k != "pingpong"}
        if usage := fields.get("usage_metadata"):
            fields["usage_metadata"] = {k: v for k, v in usage.items() if k != "input_token_details"}
        return type(message).__name__, self(fields)

    def _name(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        if kind == "id" and self._ordered:
            return f"<id {self._ids.setdefault(match.group(), len(self._ids))}>"
        return f"<{kind}>"


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two plain values differ, one line each."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        return [line for key in keys for line in differences(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}/{index}")]
    return [] if a == b else [f"{path}: {_short(a)} != {_short(b)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"
