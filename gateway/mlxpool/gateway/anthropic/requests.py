"""Requests of Anthropic's Messages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import shown
from mlxpool.common.options import MAX_COUNT
from mlxpool.common.protocol.chat import LEVELS, check_continued, check_messages
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.anthropic.blocks import conversation_of
from mlxpool.gateway.anthropic.fields import (
    COUNT_TOKENS,
    DISPLAYS,
    EAGER,
    EFFORTS,
    FORMAT,
    MESSAGES,
    OUTPUT_CONFIG,
    SAMPLING,
    THINKING,
    TOOL,
    TOOL_CHOICE,
)
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.sampling import sampling_options

THOUGHTS = ("enabled", "disabled", "adaptive")
CHOICES = ("auto", "any", "tool", "none")


class MessageRequest(Struct, frozen=True):
    """A checked request. `level`: how much a model that knows levels is to think; None: as it does.

    `shows_thoughts` False: thoughts are left out of the answer. `eager`: names of tools whose
    arguments are streamed as the model writes them, whether they are JSON or not.
    """

    chat: ChatRequest
    stream: bool
    max_tokens: int
    stops: Sequence[str]
    level: str | None
    shows_thoughts: bool
    eager: frozenset[str]


def message(body: Mapping[str, Any]) -> MessageRequest:
    """A checked /v1/messages. Raises HttpError naming the field."""
    body = MESSAGES.check(body)
    stops = body.get("stop_sequences")
    if not isinstance(stops, list | None):
        message = f"'stop_sequences' must be a list of texts, got {shown(stops)}"
        raise bad_request(message, "stop_sequences")
    max_tokens = fields.integer(body, "max_tokens", 1, MAX_COUNT)
    if max_tokens is None:
        raise bad_request("'max_tokens' is missing", "max_tokens")
    thinking = _thinking(body)
    options = {**sampling_options(body, SAMPLING), "max_tokens": max_tokens, **_budget(thinking)}
    return MessageRequest(
        _chat(body, options),
        fields.flag(body, "stream", False),
        max_tokens,
        options.get("stop", ()),
        _level(body),
        fields.choice(thinking, "display", DISPLAYS, "thinking.") != "omitted",
        frozenset(str(one.get("name")) for one in body.get("tools") or () if one.get(EAGER)),
    )


def counted(body: Mapping[str, Any]) -> ChatRequest:
    """A checked /v1/messages/count_tokens. Raises HttpError naming the field."""
    body = COUNT_TOKENS.check(body)
    _level(body)
    return _chat(body, {})


def _chat(body: Mapping[str, Any], options: Mapping[str, Any]) -> ChatRequest:
    conversation = conversation_of(body.get("system"), body.get("messages"))
    messages = fields.checked("messages", check_messages, conversation.messages)
    if conversation.continues:
        fields.checked("messages", check_continued, messages)
        options = {**options, "continue_message": True}
    tools, forced, several = _tools(body)
    options = {**options, **_think(body), **_format(body)}
    return ChatRequest(
        fields.text(body, "model"),
        messages,
        options,
        "thinking",
        conversation.images,
        tools,
        forced,
        several,
    )


def _thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given = fields.mapping(body, "thinking")
    return THINKING.check(given, "thinking.")


def _budget(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """The bound of thoughts; empty without."""
    budget = fields.integer(thinking, "budget_tokens", 0, MAX_COUNT)
    enabled = budget is not None and thinking.get("type") == "enabled"
    return {"thinking_budget": budget} if enabled else {}


def _think(body: Mapping[str, Any]) -> dict[str, Any]:
    """The pool's `think`; empty leaves it to the model's template."""
    if body.get("thinking") is None:
        return {}
    kind = fields.choice(_thinking(body), "type", THOUGHTS, "thinking.")
    if kind is None:
        raise bad_request("'thinking.type' is missing", "thinking.type")
    return {} if kind == "adaptive" else {"think": kind == "enabled"}


def _level(body: Mapping[str, Any]) -> str | None:
    """How much is to be thought, of the pool's levels."""
    given = fields.mapping(body, "output_config")
    given = OUTPUT_CONFIG.check(given, "output_config.")
    effort = fields.choice(given, "effort", EFFORTS, "output_config.")
    return effort if effort is None or effort in LEVELS else LEVELS[-1]


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """The option `format` of `output_config`, or of its older form; empty without."""
    field, given = "output_config.format", fields.mapping(body, "output_config").get("format")
    if given is None:
        field, given = "output_format", body.get("output_format")
    given = fields.mapping({field: given}, field)
    if not given:
        return {}
    FORMAT.check(given, f"{field}.")
    if fields.choice(given, "type", ("json_schema",), f"{field}.") is None:
        raise bad_request(f"'{field}.type' is missing", f"{field}.type")
    format = {"type": "json_schema", "schema": given.get("schema")}
    return {"format": fields.option(f"{field}.schema", format, "format")}


def _tools(
    body: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """The tools in the pool's form, those of which one has to be called, and whether the answer
    may have several calls.
    """
    given = fields.tools_of_kind(body, (None, "custom"))
    tools = [_tool(f"tools[{number}]", tool) for number, tool in given]
    choice = fields.mapping(body, "tool_choice")
    TOOL_CHOICE.check(choice, "tool_choice.")
    kind = fields.choice(choice, "type", CHOICES, "tool_choice.")
    if body.get("tool_choice") is not None and kind is None:
        raise bad_request("'tool_choice.type' is missing", "tool_choice.type")
    several = not fields.flag(choice, "disable_parallel_tool_use", False, "tool_choice.")
    if kind == "none":
        return [], [], several
    forced: list[dict[str, Any]] = []
    if kind in ("any", "tool"):
        name = choice.get("name")
        forced = [tool for tool in tools if kind == "any" or tool["function"]["name"] == name]
        if not forced:
            raise fields.no_such_tool(None if kind == "any" else name)
    return tools, forced, several


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """One tool in the pool's form. Raises HttpError."""
    prefix = f"{where}."
    TOOL.check(tool, prefix)
    schema = {} if tool.get("input_schema") is None else tool["input_schema"]
    if not isinstance(schema, Mapping):
        raise bad_request(f"{prefix}input_schema must be a map, got {shown(schema)}", "tools")
    fields.text(tool, "description", "")
    strict = fields.flag(tool, "strict", False, prefix)
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {
        "type": "function",
        "function": {
            **function,
            "parameters": schema,
            **({"strict": True} if strict else {}),
        },
    }
