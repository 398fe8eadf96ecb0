"""The same model with other settings: copies, and LangChain's configurable fields, share engines where they can."""

from __future__ import annotations

import threading
from typing import Any, Self

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField, Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.configurable import RunnableConfigurableFields
from langchain_core.runnables.utils import AnyConfigurableField, Input, Output
from pydantic import PrivateAttr

from langgraph_pingpong.serving import LazyServing
from langgraph_pingpong.settings import CLIENT_SETTINGS, ENGINE_SETTINGS, Settings
from langgraph_pingpong.trace import Trace


class Servings:
    """The engines of a model and of all that was made from it: one for each state of the settings that make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[dict[str, Any], LazyServing]] = []

    def of(self, settings: dict[str, Any]) -> LazyServing:
        """Those that these settings make, when they are used."""
        if (known := self._known(settings)) is not None:  # without the lock, which a fork may have left locked
            return known
        with self._lock:
            if (known := self._known(settings)) is None:
                self._made.append((settings, known := LazyServing()))
            return known

    def _known(self, settings: dict[str, Any]) -> LazyServing | None:
        """They are few, and of values that cannot be hashed."""
        return next((lazy for known, lazy in self._made if known == settings), None)

    def close(self) -> None:
        """Shut down those that were made here. A pool that somebody gave is theirs."""
        for settings, lazy in list(self._made):
            if "pool" not in settings:
                lazy.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Engines do not travel: what is pickled makes its own when it is used."""
        return type(self), ()


def _known_by(tokenizer: Any) -> tuple[Any, ...]:
    """What a tokenizer is known by: that of a deep copy of a model is another object, and the same tokenizer."""
    return tuple(getattr(tokenizer, name, None) for name in ("name_or_path", "vocab_size", "chat_template"))


class Variants(Settings):
    """A chat model whose copies use its engines, unless other engines are what they ask for."""

    _servings: Servings = PrivateAttr(default_factory=Servings)
    _trace: Trace = PrivateAttr(default_factory=Trace)

    @property
    def _lazy(self) -> LazyServing:
        return self._servings.of(self._engine_settings())

    def _engine_settings(self) -> dict[str, Any]:
        """The settings that engines are made of, as they are now.

        Not among them is what engines can do without: `overlap` and `reasoning_parser` say how to make them, and copies
        that differ in these still share them.
        """
        if self.pool is not None:
            names: tuple[str, ...] = ("pool",)
        elif self.base_urls is not None:
            names = ("base_urls", "api_key", *CLIENT_SETTINGS)
        else:
            names = ("devices", *ENGINE_SETTINGS)
        values = {name: getattr(self, name) for name in ("model", *names)}
        as_lists = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {**as_lists, "tokenizer": _known_by(self.tokenizer)}

    def configurable_fields(
        self, **kwargs: AnyConfigurableField
    ) -> RunnableSerializable[LanguageModelInput, AIMessage]:
        """The model with settings that the config of a call may replace. It goes on with the engines of this one.

        Other settings of engines make other engines, once for each value that is used; `close()` ends them all.
        """
        super().configurable_fields(**kwargs)  # which refuses unknown names
        return _Configurable(default=self, fields=kwargs)


class _Configurable(RunnableConfigurableFields[Input, Output]):
    """LangChain makes a new model for each call; here it is a copy, with the engines and the trace."""

    def _prepare(self, config: RunnableConfig | None = None) -> tuple[Runnable[Input, Output], RunnableConfig]:
        checked, config = super()._prepare(config)
        if checked is self.default:
            return checked, config
        given = config.get("configurable", {})
        update = {
            name: getattr(checked, name)
            for name, spec in self.fields.items()
            if spec.id in given or not isinstance(spec, ConfigurableField)
        }
        return self.default.model_copy(update=update), config
