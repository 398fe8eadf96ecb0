"""What a profile is: a documented workload with parameters, from which graphs and their inputs are made."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from langgraph_pingpong.bench.modes import Scale
from langgraph_pingpong.bench.texts import Library
from langgraph_pingpong.bench.turns import Turns
from langgraph_pingpong.config import refuse_unknown
from langgraph_pingpong.errors import ConfigError

if TYPE_CHECKING:
    from langgraph_pingpong.chat_model import ChatPingPong

AT_LEAST_ONE = frozenset(
    {"agents", "users", "conversations", "requests", "rounds", "output", "last_output", "query_output", "upstream"}
    | {"downstream"}
)
"""Parameters that cannot be 0: who speaks, how often, and how many tokens an answer has."""

Params = Mapping[str, int]
Texts = Mapping[str, str]
"""What was said, by the name of who said it and, where that is more than once, how often before."""

Chain = Callable[[], Awaitable[Texts]]
"""One user of the graph: runs it, once or several times, and gives the texts."""


@dataclass
class Work:
    """What one run does: chains that run at once.

    `prefixes` are the static beginnings of prompts, as messages; `outputs` is how many tokens each node is asked for,
    where that is fixed, and `calls` how many answers all chains get together. `turns` are what users saw, where the
    chains note it.
    """

    chains: Sequence[Chain]
    calls: int
    outputs: Mapping[str, int]
    prefixes: Sequence[Sequence[BaseMessage]] = ()
    turns: Turns | None = None


@dataclass(frozen=True)
class Bench:
    """What a profile makes its work with."""

    model: ChatPingPong
    params: Params
    library: Library
    seed: int
    chains: int = 1
    force_tokens: bool = True
    """Whether answers go on to their limit, whatever they say."""

    def asking(self, tokens: int) -> Any:
        """The model with a limit for its answers."""
        return self.model.bind(max_tokens=tokens, **({"ignore_eos": True} if self.force_tokens else {}))

    def text(self, title: str, tokens: int, *of: object) -> str:
        """Seeded text of so many tokens; `of` tells texts of the same title apart."""
        return self.library.text(title, tokens, *of)


@dataclass(frozen=True)
class Profile:
    """A workload: its parameters with the values that are run at each scale, and what makes the work."""

    name: str
    about: str
    values: Mapping[Scale, Mapping[str, Sequence[int]]]
    make: Callable[[Bench], Work]

    def cases(self, scale: Scale, given: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
        """Every combination of the parameters' values; `given` replaces values.

        Raises:
            UnknownSetting: there is no such parameter.
            ConfigError: there would be nobody, or nothing to say.
        """
        values = self.values[scale]
        refuse_unknown(given, values, f"The profile {self.name}")
        if empty := [name for name in given if name in AT_LEAST_ONE and min(given[name]) < 1]:
            raise ConfigError(f"--set {empty[0]} needs values of at least 1.")
        lists = {name: given.get(name, value) for name, value in values.items()}
        for combination in itertools.product(*lists.values()):
            yield dict(zip(lists, combination, strict=True))


def parse_values(settings: Sequence[str]) -> dict[str, list[int]]:
    """Values of parameters from texts like 'static=1024,2048'.

    Raises:
        ConfigError: one is not of that form.
    """
    values = {}
    for setting in settings:
        name, _, listed = setting.partition("=")
        numbers = _numbers(listed)
        if not (name and numbers) or min(numbers) < 0:
            raise ConfigError(f"--set {setting} is not of the form name=1,2,3.")
        values[name] = numbers
    return values


def parse_chains(text: str) -> list[int]:
    """Numbers of chains at once from a text like '1,2,4'.

    Raises:
        ConfigError: it is not of that form, or a number is below 1.
    """
    numbers = _numbers(text)
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--chains {text} is not of the form 1,2,4.")
    return numbers


def _numbers(text: str) -> list[int]:
    """Those of a list like '1,2,4'; none at all where one of them is no number."""
    try:
        return [int(value) for value in text.split(",")]
    except ValueError:
        return []
