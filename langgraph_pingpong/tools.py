"""Tools and structured output: from what LangChain's users pass to what the engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langgraph_pingpong.errors import CallRefused

Tool = Mapping[str, Any]
"""A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
"""What LangChain makes a tool of: a schema, a class, a function or a tool."""

Method = Literal["json_schema", "function_calling", "json_mode"]


def openai_tools(tools: Sequence[ToolLike], strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's form; with `strict` the arguments follow their schema also where a call is not forced.

    Raises:
        CallRefused: one of them is no function.
    """
    made = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
    for each in made:
        _name_of(each)
    return made


def _name_of(tool: Tool) -> str:
    """Providers have tools of other types, like a search of the web, which their own servers run."""
    if "function" not in tool:
        raise CallRefused(f"A tool of type {tool.get('type')!r} is run by its provider's servers; functions only here.")
    name: str = tool["function"]["name"]
    return name


def parse_tool_choice(choice: Any, tools: Sequence[Tool]) -> str | dict[str, Any]:
    """LangChain's ways to say which tool is to be called, in OpenAI's form.

    Args:
        choice: "auto" or None (the model decides), "any", "required" or True (some tool), "none", a tool's name, or
            one of these in OpenAI's form.
        tools: in OpenAI's form.

    Raises:
        CallRefused: the choice names no tool, asks for a call where there are no tools, or a tool is no function.
    """
    if not choice or choice == "auto":
        return "auto"
    if choice == "none":
        return "none"
    names = [_name_of(tool) for tool in tools]
    if not names:
        raise CallRefused(f"tool_choice={choice!r} asks for a tool call, and there are no tools.")
    if choice is True or choice in ("any", "required"):
        return "required"
    name = choice["function"]["name"] if isinstance(choice, Mapping) and "function" in choice else choice
    if name not in names:
        raise CallRefused(f"tool_choice={choice!r} names no tool; the tools are {', '.join(names)}.")
    return {"type": "function", "function": {"name": name}}


def structured_outputs(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's response_format as a constraint in vLLM's form; None if the answer is free.

    Raises:
        CallRefused: the format is unknown.
    """
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
        case _:
            raise CallRefused(f"response_format={response_format!r} is none of text, json_object and json_schema.")


def structured_output(
    model: BaseChatModel, schema: Any, method: Method, include_raw: bool, strict: bool | None, **kwargs: Any
) -> Runnable[LanguageModelInput, Any]:
    """A runnable that answers with an object of `schema`.

    Raises:
        CallRefused: the method is unknown, or needs a schema and there is none.
    """
    if schema is None and method != "json_mode":
        raise CallRefused(f"method={method!r} needs a schema.")
    if method == "function_calling":
        parser = _tool_parser(schema)
        bound = _bind_as_tool(model, schema, strict, **kwargs)
    elif method in ("json_schema", "json_mode"):
        parser = _text_parser(schema)
        response_format = {"type": "json_object"} if method == "json_mode" else _as_response_format(schema, strict)
        bound = model.bind(
            response_format=response_format, ls_structured_output_format=_traced(schema, method), **kwargs
        )
    else:
        raise CallRefused(f"method={method!r} is none of json_schema, function_calling and json_mode.")
    return _with_raw(bound, parser) if include_raw else bound | parser


def _bind_as_tool(model: BaseChatModel, schema: Any, strict: bool | None, **kwargs: Any) -> Runnable[Any, AIMessage]:
    name = convert_to_openai_tool(schema)["function"]["name"]
    return model.bind_tools(
        [schema],
        tool_choice=name,
        strict=strict,
        parallel_tool_calls=False,
        ls_structured_output_format=_traced(schema, "function_calling"),
        **kwargs,
    )


def _as_response_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    json_schema = convert_to_json_schema(schema, strict=strict)
    return {"type": "json_schema", "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema}}


def _traced(schema: Any, method: Method) -> dict[str, Any]:
    """What LangChain's tracers show of it."""
    return {"kwargs": {"method": method}, "schema": convert_to_json_schema(schema) if schema else None}


def _tool_parser(schema: Any) -> Runnable[Any, Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


class _WholeOnly:
    """Makes a parser refuse JSON that was cut off, which LangChain's would complete by guess."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """What an answer holds."""
        if not partial:
            try:
                json.loads(result[0].text)
            except ValueError as error:
                text = result[0].text
                raise OutputParserException(f"The answer is no JSON ({error}): {text}", llm_output=text) from error
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class _JsonParser(_WholeOnly, JsonOutputParser):
    pass


class _PydanticParser(_WholeOnly, PydanticOutputParser[Any]):
    pass


def _text_parser(schema: Any) -> Runnable[Any, Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _PydanticParser(pydantic_object=schema)
    return _JsonParser()


def _with_raw(bound: Runnable[Any, AIMessage], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")
