"""Requests of Anthropic's interface: their fields with schemas, and the checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import shown
from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_STOP_BYTES, MAX_STOPS
from mlxpool.common.protocol.chat import (
    LEVELS,
    MAX_MESSAGES,
    MAX_TOOLS,
    check_continued,
    check_messages,
)
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.anthropic.blocks import ROLES, conversation_of
from mlxpool.gateway.description.schemas import (
    ANY,
    API_CHECKS,
    FLAG,
    MAP,
    NAME,
    TEXT,
    Schema,
    choice,
    described,
    integer,
    listed,
    one_of,
    option,
    other_tool,
)
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body, RefusedFields
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.pool_options import sampling_options

EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = ("summarized", "omitted")
EAGER = "eager_input_streaming"  # a member of a tool

# field -> option of the pool
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "seed": "seed",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "ignore_eos": "ignore_eos",
    "plain_contents": "plain_contents",
}
CACHED: Mapping[str, Schema] = {"cache_control": ANY}  # the prefix cache needs no marks

THINKING = Body(
    {
        "type": choice("enabled", "disabled", "adaptive"),
        "display": described("omitted: thoughts are not sent", choice(*DISPLAYS)),
        "budget_tokens": described("of thoughts, which count towards max_tokens", integer(0)),
    },
    required=("type",),
    accepted={"block_tokens": ANY},
)
FORMAT = Body({"type": {"const": "json_schema"}, "schema": MAP}, required=("type", "schema"))
OUTPUT_CONFIG = Body(
    {
        "effort": described("of a model whose template knows levels", choice(*EFFORTS)),
        "format": FORMAT.schema(),
    },
    accepted={"task_budget": ANY},
)
TOOL = Body(
    {
        "type": {"const": "custom"},
        "name": NAME,
        "description": TEXT,
        "input_schema": described("a JSON schema", MAP),
        "strict": FLAG,
        EAGER: described("arguments are streamed as the model writes them", FLAG),
    },
    required=("name",),
    refused={"parameters": ((), "use `input_schema`")},
    open=True,  # other members only describe the calls of a tool
)
ANY_TOOL: Schema = one_of(
    TOOL.schema(),
    other_tool("custom"),
)
TOOL_CHOICE = Body(
    {
        "type": choice("auto", "any", "tool", "none"),
        "name": NAME,
        "disable_parallel_tool_use": FLAG,
    },
    required=("type",),
)
_BLOCK: Schema = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": choice(*ROLES),
        "content": described(
            "text, or blocks: text, image, tool_use, tool_result, thinking",
            one_of(TEXT, listed(_BLOCK)),
        ),
    },
    "required": ["role", "content"],
}
_TEXT_BLOCK: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
PROMPT: Mapping[str, Schema] = {
    "model": described("a name of /v1/models", NAME),
    "messages": listed(MESSAGE, 1, MAX_MESSAGES),
    "system": one_of(TEXT, listed(_TEXT_BLOCK)),
    "tools": listed(ANY_TOOL, 0, MAX_TOOLS),
    "tool_choice": TOOL_CHOICE.schema(),
    "thinking": THINKING.schema(),
    "output_config": OUTPUT_CONFIG.schema(),
    "output_format": described("the older form of output_config.format", FORMAT.schema()),
}
# Fields that do not change the answer, or that have no meaning here.
ACCEPTED: Mapping[str, Schema] = {
    **CACHED,
    **dict.fromkeys(
        (
            "metadata",
            "service_tier",
            "container",  # for tools that the server runs, like the next field
            "mcp_servers",
            "context_management",  # nothing is cleared or compacted
            "diagnostics",
            "inference_geo",
            "speed",
            "betas",
            "anthropic_beta",
            "anthropic_version",
            "fallbacks",
            "fallback_credit_token",
            "billing_policy",
            "mcp_toolsets",
            "user",
        ),
        ANY,
    ),
}
_REFUSED: RefusedFields = {
    "prefill": ((), "leave it out"),
    "compaction": ((), "ask for a summary in a message"),
    "thread": ((), "send the whole conversation"),
    "max_completion_tokens": ((), "use `max_tokens`"),
    "stop": ((), "use `stop_sequences`"),
}
MESSAGES = Body(
    {
        **PROMPT,
        "max_tokens": integer(1, MAX_COUNT),
        "stream": FLAG,
        **{name: option(target, API_CHECKS) for name, target in SAMPLING.items()},
        "stop_sequences": listed({"type": "string", "maxLength": MAX_STOP_BYTES}, 0, MAX_STOPS),
        "seed": integer(-1, MAX_SEED),
        "top_k": integer(-1, MAX_COUNT),
    },
    required=("model", "messages", "max_tokens"),
    accepted=ACCEPTED,
    refused=_REFUSED,
)
# Programs count the tokens of a request before they send it, so all its fields are accepted.
COUNT_TOKENS = Body(
    PROMPT,
    ("model", "messages"),
    {**{name: ANY for name in MESSAGES.honoured if name not in PROMPT}, **ACCEPTED},
    _REFUSED,
)
THOUGHTS = ("enabled", "disabled", "adaptive")
CHOICES = ("auto", "any", "tool", "none")


class MessageRequest(Struct, frozen=True):
    """A checked request.

    `level`: the level of thinking for a model with levels; None means the model's default. If
    `shows_thoughts` is False, the answer's blocks of thoughts are empty. `eager`: names of tools
    whose arguments are streamed as the model writes them, even if they are not JSON.
    """

    chat: ChatRequest
    stream: bool
    max_tokens: int
    stops: Sequence[str]
    level: str | None
    shows_thoughts: bool
    eager: frozenset[str]


def message(body: Mapping[str, Any]) -> MessageRequest:
    """Checks the body of a request to /v1/messages. Raises HttpError naming the field."""
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
        frozenset(str(tool.get("name")) for tool in body.get("tools") or () if tool.get(EAGER)),
    )


def counted(body: Mapping[str, Any]) -> ChatRequest:
    """Checks the body of a request to /v1/messages/count_tokens.

    Raises HttpError naming the field.
    """
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
    thinking = fields.mapping(body, "thinking")
    return THINKING.check(thinking, "thinking.")


def _budget(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option that bounds thought tokens; empty if the request has no bound."""
    budget = fields.integer(thinking, "budget_tokens", 0, MAX_COUNT)
    enabled = budget is not None and thinking.get("type") == "enabled"
    return {"thinking_budget": budget} if enabled else {}


def _think(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `think` as a map; empty if the chat template decides about thoughts."""
    if body.get("thinking") is None:
        return {}
    kind = fields.choice(_thinking(body), "type", THOUGHTS, "thinking.")
    if kind is None:
        raise bad_request("'thinking.type' is missing", "thinking.type")
    return {} if kind == "adaptive" else {"think": kind == "enabled"}


def _level(body: Mapping[str, Any]) -> str | None:
    """Returns the level of thinking that the request names, in the pool's words.

    Returns None if the request names none.
    """
    config = fields.mapping(body, "output_config")
    config = OUTPUT_CONFIG.check(config, "output_config.")
    effort = fields.choice(config, "effort", EFFORTS, "output_config.")
    return effort if effort is None or effort in LEVELS else LEVELS[-1]


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `format` from `output_config` or its older form; empty if absent."""
    field, raw = "output_config.format", fields.mapping(body, "output_config").get("format")
    if raw is None:
        field, raw = "output_format", body.get("output_format")
    raw = fields.mapping({field: raw}, field)
    if not raw:
        return {}
    FORMAT.check(raw, f"{field}.")
    if fields.choice(raw, "type", ("json_schema",), f"{field}.") is None:
        raise bad_request(f"'{field}.type' is missing", f"{field}.type")
    format = {"type": "json_schema", "schema": raw.get("schema")}
    return {"format": fields.option(f"{field}.schema", format, "format")}


def _tools(
    body: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Returns the offered tools, the tools of which one must be called, and a boolean.

    The boolean is True if several calls are allowed. The second list is empty if the model decides
    whether to call a tool.
    """
    numbered = fields.tools_of_kind(body, (None, "custom"))
    tools = [_tool(f"tools[{number}]", tool) for number, tool in numbered]
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
    """Returns a tool in the pool's form. Raises HttpError."""
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
