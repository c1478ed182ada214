"""Requests of OpenAI's Responses, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import shown
from mlxpool.common.options import MAX_COUNT, MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import check_messages, check_tools
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.pool_options import sampling_options, session_option
from mlxpool.gateway.openai.fields import EFFORTS
from mlxpool.gateway.openai.requests import plain_choice, think_effort, wanted_tool
from mlxpool.gateway.openai.responses_api.fields import (
    FORMAT,
    LOGPROBS,
    MAX_KEY,
    MAX_METADATA,
    MAX_VALUE,
    REASONING,
    RESPONSE,
    SAMPLING,
    STREAM_OPTIONS,
    SUMMARIES,
    TEXT_CONFIG,
    TOOL,
)
from mlxpool.gateway.openai.responses_api.items import NAMESPACE, Earlier, conversation_of, joined

TOOL_CHOICES = (
    "must be auto, none, required, {type: 'function', name: …} or"
    " {type: 'allowed_tools', mode: …, tools: […]}"
)


class ResponseRequest(Struct, frozen=True):
    """A checked request to /v1/responses.

    If `truncates`, old items are left out until the request fits. If `summary`, thoughts are sent
    as a summary. `echoed`: members of the response that repeat the request. If `store`, the
    response is stored; responses in the `background` are always stored.
    """

    chat: ChatRequest
    stream: bool
    truncates: bool
    summary: bool
    echoed: Mapping[str, Any]
    background: bool = False
    store: bool = False

    @property
    def logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return "logprobs" in self.chat.options


def response(body: Mapping[str, Any], earlier: Earlier | None = None) -> ResponseRequest:
    """Checks the body of a request to /v1/responses. Raises HttpError naming the field."""
    body = RESPONSE.check(body)
    instructions = fields.text(body, "instructions", "")
    conversation = conversation_of(body.get("input"), instructions, earlier)
    messages = fields.checked("input", check_messages, conversation.messages)
    tools, forced = _tools(body)
    several = fields.flag(body, "parallel_tool_calls", True)
    options = {
        **sampling_options(body, SAMPLING),
        **session_option(body),
        **_format(body),
        **_logprobs(body),
    }
    max_tokens = fields.integer(body, "max_output_tokens", 1, MAX_COUNT)
    options |= {} if max_tokens is None else {"max_tokens": max_tokens}
    effort, summary, budget = _reasoning(body)
    think = effort or think_effort(body)
    options |= {} if think is None else {"think": EFFORTS.get(think, think == "enabled")}
    options |= {} if budget is None else {"think": True, "thinking_budget": budget, **options}
    stream = fields.flag(body, "stream", False)
    STREAM_OPTIONS.check(fields.mapping(body, "stream_options"), "stream_options.")
    chat = ChatRequest(
        fields.text(body, "model"),
        messages,
        options,
        "reasoning.effort",
        conversation.images,
        tools,
        forced,
        several,
    )
    background = fields.flag(body, "background", False)
    store = fields.flag(body, "store", background)
    if background and not store:
        raise bad_request("a response in the background is kept: leave 'store': false out", "store")
    truncation = fields.choice(body, "truncation", ("auto", "disabled")) or "disabled"
    echoed = {
        **_echoed(body, options),
        "instructions": instructions or None,
        "metadata": metadata_of(body),
        "parallel_tool_calls": several,
        "reasoning": {"effort": effort, "summary": summary},
        "truncation": truncation,
        "background": background,
        "store": store,
        "previous_response_id": previous_id(body),
    }
    return ResponseRequest(
        chat, stream, truncation == "auto", summary is not None, echoed, background, store
    )


def previous_id(body: Mapping[str, Any]) -> str | None:
    """Returns the id of the response that the request continues; None if it continues none."""
    return fields.text(body, "previous_response_id", "") or None


def _echoed(body: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of a response that repeat a field of the request, or its default."""
    text = fields.mapping(body, "text")
    return {
        "max_output_tokens": options.get("max_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "model": body["model"],
        "prompt_cache_key": body.get("prompt_cache_key"),
        "safety_identifier": body.get("safety_identifier"),
        "temperature": options["temperature"],
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": options["top_p"],
        "user": body.get("user"),
    }


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the offered and the required tools; the answer must call one of the required tools.

    All tools are in the pool's form. Raises HttpError.
    """
    functions: list[dict[str, Any]] = []
    for number, tool in fields.tools_of_kind(body, ("function", NAMESPACE)):
        if tool["type"] == NAMESPACE:
            functions += [
                _function(f"tools[{number}].tools[{place}].", function, tool["name"])
                for place, function in fields.tools_of_kind(tool, ("function",))
            ]
        else:
            functions.append(_function(f"tools[{number}].", tool))
    fields.checked("tools", check_tools, functions)
    choice = plain_choice(body.get("tool_choice"))
    if isinstance(choice, Mapping):
        offered, forced = _chosen(choice, functions)
    else:
        mode = fields.choice({"tool_choice": choice}, "tool_choice", ("auto", "none", "required"))
        offered = [] if mode == "none" else functions
        forced = functions if mode == "required" else []
        if mode == "required" and not functions:
            raise fields.no_such_tool()
    return offered, forced


def _function(prefix: str, tool: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Returns a function in the pool's form; `group`: the namespace that it is in.

    Raises HttpError.
    """
    inside = tool.get("function")
    if isinstance(inside, Mapping):  # the form of /v1/chat/completions
        tool = {**inside, "type": "function"}
    TOOL.check(tool, prefix)
    fields.flag(tool, "strict", False, prefix)
    fields.text(tool, "description", "")
    known = {key: tool[key] for key in TOOL.honoured if key != "type" and tool.get(key) is not None}
    return {"type": "function", "function": {**known, "name": joined(group, tool["name"])}}


def _chosen(
    choice: Mapping[str, Any], tools: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the tools to offer and the tools to require, for a `tool_choice` that names tools.

    The answer must call one of the required tools.
    """
    if choice.get("type") == "function":
        named = [choice]
    elif choice.get("type") == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        named = choice["tools"] if isinstance(choice.get("tools"), list) else []
    elif choice.get("type") != "allowed_tools" and (tool_name := wanted_tool(choice)) is not None:
        raise fields.no_such_tool(tool_name)
    else:
        named = []
    names = [
        tool_named.get("name") if isinstance(tool_named, Mapping) else None for tool_named in named
    ]
    elsewhere = [
        tool_named
        for tool_named in named
        if isinstance(tool_named, Mapping) and tool_named.get("type") != "function"
    ]
    if not names or not all(isinstance(name, str) for name in names if not elsewhere):
        raise bad_request(f"'tool_choice' is {shown(choice)}, {TOOL_CHOICES}", "tool_choice")
    if choice["type"] == "allowed_tools":  # tools that run elsewhere are not offered anyway
        names = [
            tool_named["name"]
            for tool_named in named
            if tool_named.get("type", "function") == "function"
        ]
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    if len(chosen) < len(set(names)):
        offered = {tool["function"]["name"] for tool in chosen}
        raise fields.no_such_tool(next(name for name in names if name not in offered))
    if choice["type"] == "function":
        return list(tools), chosen
    return chosen, chosen if choice["mode"] == "required" else []


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the pool's option `format` from the request's `text.format`; empty for plain text."""
    text = fields.mapping(body, "text")
    text = TEXT_CONFIG.check(text, "text.")
    format_field = fields.mapping(text, "format")
    if not format_field:
        return {}
    FORMAT.check(format_field, "text.format.")
    kind = fields.choice(
        format_field, "type", ("text", "json_object", "json_schema"), "text.format."
    )
    if kind == "json_object":
        return {"format": {"type": "json"}}
    if kind == "json_schema":
        format = {"type": "json_schema", "schema": format_field.get("schema")}
        return {"format": fields.option("text.format.schema", format, "format")}
    if kind is None:
        raise bad_request("'text.format.type' is missing", "text.format.type")
    return {}


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    included = body.get("include")
    if included is None:
        included = []
    if not isinstance(included, list):
        raise bad_request(f"'include' must be a list, got {shown(included)}", "include")
    for name in included:
        if not isinstance(name, str):
            raise bad_request(f"'include' must be a list of texts, got {shown(name)}", "include")
    top = fields.integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if LOGPROBS in included:
        return {"logprobs": True, "top_logprobs": top or 0}
    if top:
        message = f"'top_logprobs' goes with {LOGPROBS!r} in 'include'"
        raise bad_request(message, "top_logprobs")
    return {}


def _reasoning(body: Mapping[str, Any]) -> tuple[str | None, str | None, int | None]:
    """Returns the effort, the kind of summary, and the bound of thoughts.

    Absent values are None.
    """
    reasoning = fields.mapping(body, "reasoning")
    prefix = "reasoning."
    reasoning = REASONING.check(reasoning, prefix)
    older = fields.choice(reasoning, "generate_summary", SUMMARIES, prefix)
    summary = fields.choice(reasoning, "summary", (*SUMMARIES, "none"), prefix) or older
    effort = fields.choice(reasoning, "effort", ("none", *EFFORTS), prefix)
    bound = fields.options(reasoning, {"max_tokens": "thinking_budget"}, prefix).get(
        "thinking_budget"
    )
    return effort, None if summary == "none" else summary, bound


def metadata_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the checked field `metadata`. Raises HttpError."""
    metadata = fields.mapping(body, "metadata")
    if len(metadata) > MAX_METADATA:
        raise bad_request(
            f"'metadata' has {len(metadata)} pairs, at most {MAX_METADATA} are taken", "metadata"
        )
    for key, value in metadata.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or len(key) > MAX_KEY:
            raise bad_request(
                f"'metadata' has {shown(key)}: {shown(value)}; keys have at most {MAX_KEY}"
                f" characters, values are texts of at most {MAX_VALUE}",
                "metadata",
            )
    return metadata
