"""The checked chat of a request, and its check against the formats of the model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.config.schema import OFF
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request, unsupported_parameter
from mlxpool.gateway.formats import NO_CHAT, ChatFormats
from mlxpool.gateway.formats.forced_calls import calls_or_answer, forced_call, strict_calls
from mlxpool.gateway.formats.generic_tools import offered_tools
from mlxpool.gateway.generation.choice_streams import ChoiceRequest
from mlxpool.gateway.models import ModelInfo

ENABLE_THINKING = "chat_template_kwargs.enable_thinking"
NO_FORCED_CALL = "this model's format of calls does not allow a forced call; use 'auto' or 'none'"
NO_CALL_BESIDE = (
    "calls in this model's format of calls cannot be combined with this format of the"
    " answer; leave `tools` or the format out"
)
NOT_STRICT = (
    "with 'auto' the arguments of calls in this model's format of calls cannot be"
    " held to a schema; leave it out, or have a call forced by 'tool_choice'"
)


class ChatRequest(Struct, frozen=True):
    """A chat with one answer.

    Parts of the messages name the images by their index. `forced`: the tools of which the answer
    must call one; if empty, the model decides whether to call a tool. `think_field`: the name of
    the field that requests thoughts. If `several_calls` is False, the answer has at most one call.
    `function`: the path of the function inside a tool, for error messages.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    think_field: str
    images: Sequence[bytes] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    forced: Sequence[Mapping[str, Any]] = ()
    several_calls: bool = True
    function: str = ""

    def choice(self, model: ModelInfo) -> ChoiceRequest:
        """Returns the chat as a request to the pool.

        Raises HttpError for features that the model's template lacks.
        """
        own, tools, forced = model.chat or NO_CHAT, self.tools, self.forced
        offered = offered_tools(own, self.messages, tools, forced=bool(forced))
        chat = offered.formats
        known = check_formats(self.model, chat, tools, self.options, self.think_field)
        options = {**known, **calls_format(chat, tools, forced, known, self.function)}
        arguments = {
            "messages": offered.messages,
            **({"images": self.images} if self.images else {}),
            **({"tools": offered.tools} if offered.tools else {}),
            **options,
        }
        return ChoiceRequest(
            model.name, arguments, chat, self.tools, several_calls=self.several_calls
        )


def check_formats(
    name: str,
    chat: ChatFormats,
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    think_field: str,
) -> Mapping[str, Any]:
    """Checks a request's tools and thoughts against the chat template of the model `name`.

    Returns the options, without `think` if the template does not support thoughts. Raises HttpError
    for tools if the template does not support tools. Raises HttpError if the request switches
    thoughts on by `enable_thinking` and the template does not support thoughts. A field that names
    an effort is ignored instead, because programs send it to every model. `think_field`: the name
    of the field that the request has for thoughts.
    """
    if tools and chat.tools is None:
        advice = "" if chat.generic_tools == OFF else ", or have a call forced by `tool_choice`"
        message = f"the chat template of {name!r} knows no tools; leave `tools` out{advice}"
        raise bad_request(message, "tools", "unsupported_parameter")
    if "think" not in options or chat.thinking is not None:
        return options
    if options["think"] and think_field == ENABLE_THINKING:
        message = f"the chat template of {name!r} knows no thinking; leave it out"
        raise bad_request(message, think_field, "unsupported_parameter")
    return {name: value for name, value in options.items() if name != "think"}


def calls_format(
    chat: ChatFormats,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    function: str = "",
) -> dict[str, Any]:
    """Returns the option `format` of an answer that may have calls.

    If the result is empty, the format in `options` stays. `forced`: the tools of which the answer
    must call one. Without `forced`, arguments of strict tools follow their schemas; if `options`
    also has a format, the answer is calls, or a text in that format. `function`: the path of the
    function inside a tool, for error messages. Raises HttpError if the model's format of calls has
    no grammar, if the format in `options` cannot be combined with calls, or if a grammar cannot
    follow a strict schema.
    """
    strict = [number for number, tool in enumerate(tools) if tool["function"].get("strict")]
    text_format = options.get("format") if tools else None
    if not forced and not strict and text_format is None:
        return {}
    try:
        if forced:
            field, advice = "tool_choice", NO_FORCED_CALL
            format = forced_call(chat.tools, forced)
        elif text_format is not None:
            field, advice = "tools", NO_CALL_BESIDE
            format = calls_or_answer(chat.tools, tools, text_format)
        else:
            field, advice = f"tools[{strict[0]}]{function}.strict", NOT_STRICT
            format = strict_calls(chat.tools, tools)
    except ValueError as error:
        raise bad_request(str(error), "tools") from None
    if format is None:
        raise unsupported_parameter(field, advice)
    return {"format": fields.option("tools", format, "format")}
