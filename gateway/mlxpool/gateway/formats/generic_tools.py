"""Writes tools, calls and results into message texts, for chat templates without tools. Pure.

The model writes its calls in the format llama_json, with that format's grammar and parser. The
model's setting `generic_tools` decides when this is used. Earlier calls are written as sentences,
because SmolLM2 repeats a call that it reads as JSON instead of answering with its result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.config.schema import ALWAYS, OFF
from mlxpool.gateway.formats import ChatFormats

FORMAT = "llama_json"
SHOWN = ("name", "description", "parameters")  # members of a function that the model reads
INSTRUCTION = """\
You can call functions. Here are their names, what they do and JSON schemas of their parameters:

{functions}

To call one, answer only with a JSON object of its name and its parameters, and nothing else:
{{"name": "NAME", "parameters": {{"PARAMETER": VALUE}}}}"""


class OfferedTools(Struct, frozen=True):
    """The messages and tools that a prompt is made of.

    `tools` are given to the chat template; empty if the texts of `messages` describe the tools.
    `formats`: the formats of the answer.
    """

    formats: ChatFormats
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


def offered_tools(
    chat: ChatFormats,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    forced: bool,
) -> OfferedTools:
    """Returns the messages and tools for a prompt, with calls and tools as text if necessary.

    Returns both unchanged if the chat template supports tools, or if the setting `generic_tools` is
    "off". Otherwise earlier calls become texts of messages. The tools become text if the setting is
    "always", or if the answer has to call a tool (`forced`).
    """
    if chat.tools is not None or chat.generic_tools == OFF:
        return OfferedTools(chat, messages, tools)
    messages = with_calls_as_text(messages)
    if not tools or not (forced or chat.generic_tools == ALWAYS):
        return OfferedTools(chat, messages, tools)
    return OfferedTools(replace(chat, tools=FORMAT), with_tools_as_text(messages, tools), ())


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Appends a description of the tools to the system message, which is added if absent."""
    functions = [tool.get("function", tool) for tool in tools]
    shown = [{key: function[key] for key in SHOWN if function.get(key)} for function in functions]
    text = INSTRUCTION.format(functions="\n".join(map(_json, shown)))
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _joined(first["content"], text)}, *messages[1:]]


def with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the messages with earlier calls as assistant texts, and their results as user texts.

    Consecutive results and the user's next text become one message, because some templates
    require alternating roles.
    """
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return messages
    names: dict[Any, str] = {}  # id of a call -> its function
    texts: list[Mapping[str, Any]] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            name = names.get(message.get("tool_call_id")) or message.get("name") or "the function"
            content = _joined(f"Result of {name}:", content, "\n")
            message = {"role": "user", "content": content}
        elif calls := message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
            text = "\n".join(_call(call["function"]) for call in calls)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**kept, "content": _joined(content, text)}
        if after_result and message["role"] == "user":
            content = _joined(texts.pop()["content"], content)
            message = {**message, "content": content}
        texts.append(message)
        after_result = message["role"] == "user" and (role == "tool" or after_result)
    return texts


def _call(function: Mapping[str, Any]) -> str:
    return f"Called {function['name']} with {_json(function['arguments'])}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Joins two contents into one: a text, or a list of parts if one of them is a list."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    return [*_parts(first), {"type": "text", "text": between}, *_parts(second)]


def _parts(content: Any) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
