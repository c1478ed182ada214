"""Parsers of models' formats of thoughts and tool calls, one class for each format. Pure.

The pool reports the names of a model's formats (docs/text.md); docs/gateway.md lists architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.config.schema import OFF
from mlxpool.gateway.formats.call_filters import OneCall, WholeCalls
from mlxpool.gateway.formats.events import Parser, PlainParser
from mlxpool.gateway.formats.harmony import Harmony, with_template_thoughts
from mlxpool.gateway.formats.json_call import Hermes, LlamaJson
from mlxpool.gateway.formats.mistral import Mistral
from mlxpool.gateway.formats.system_text import with_stable_first
from mlxpool.gateway.formats.tagged_call import FunctionXml, Glm
from mlxpool.gateway.formats.thinking import Thinking

HARMONY = "harmony"  # parsed also without tools: one format has thoughts and calls

TOOLS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], Parser]] = {
    "function_xml": FunctionXml,
    "glm": Glm,
    HARMONY: Harmony,
    "hermes": Hermes,
    "llama_json": LlamaJson,
    "mistral": Mistral,
}
THINKING = {"brackets": ("[THINK]", "[/THINK]"), "tags": ("<think>", "</think>")}


class ChatFormats(Struct, frozen=True):
    """The names of the formats of tool calls and of thoughts in a model's chat template.

    `tools` is None if the template does not support tools, `thinking` if it does not support
    thoughts. `generic_tools`: the model's setting that decides when tools become text of messages,
    if the template does not support tools: `off`, `forced` (if a call is required) or `always`.
    """

    tools: str | None = None
    thinking: str | None = None
    generic_tools: str = OFF


NO_CHAT = ChatFormats()


def make_parser(
    chat: ChatFormats,
    tools: Sequence[Mapping[str, Any]],
    *,
    thinks: bool,
    several_calls: bool = True,
    stops: bool = False,
) -> Parser:
    """Makes a parser for one completion.

    `thinks`: the prompt has opened the thoughts, so the completion begins inside them. If
    `several_calls` is False, everything after the first call is left out. `stops`: a stop string
    may end the completion; a call that is therefore incomplete is left out.
    """
    tool_format = chat.tools or ""
    rest: Parser = PlainParser()
    if tool_format in TOOLS and (tools or tool_format == HARMONY):
        rest = TOOLS[tool_format](tools)
        rest = WholeCalls(rest) if stops else rest
        rest = rest if several_calls else OneCall(rest)
    marks = THINKING.get(chat.thinking or "")
    return rest if marks is None else Thinking(rest, marks, inside=thinks)


def template_messages(
    chat: ChatFormats, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns a request's messages in the form that the model's chat template reads.

    A system message at the beginning is reordered for the prefix cache.
    """
    messages = with_stable_first(messages)
    if chat.thinking == HARMONY:
        return with_template_thoughts(messages)
    return messages
