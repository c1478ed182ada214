"""Checks the messages, tools and thinking of a chat, and converts them for chat templates.

The broker checks them and forwards the original; the worker gives the converted form to a template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

from mlxpool.common.checks import is_integer, shown
from mlxpool.common.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_TOOL_CALLS = 256  # the most tool calls of one message
NO_TEMPLATE = (
    "this model has no chat template, so it takes no `messages`: send the finished text as `prompt`"
)
LEVELS = ("low", "medium", "high")  # levels of thinking, for templates that have levels
_TEXTS = (
    "name",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
)  # keys whose value is a text or nil


def check_messages(raw: object) -> list[dict[str, Any]]:
    """Returns the messages. The arguments of tool calls become maps; other keys are unchanged.

    Raises BadRequest naming the message's index, the value and the bound.
    """
    if not _is_list(raw) or not 1 <= len(raw) <= MAX_MESSAGES:
        got = f"{len(raw)}" if _is_list(raw) else shown(raw)
        raise BadRequest(f"messages must be a list of 1 to {MAX_MESSAGES} maps, got {got}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(raw)]


def check_tools(raw: object) -> list[dict[str, Any]]:
    """Returns the tools that a template may offer to the model; [] for None.

    Raises BadRequest naming the tool's index, the value and the bound.
    """
    if raw is None:
        return []
    if not _is_list(raw) or len(raw) > MAX_TOOLS:
        got = f"{len(raw)}" if _is_list(raw) else shown(raw)
        raise BadRequest(f"tools must be a list of at most {MAX_TOOLS} maps, got {got}")
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(raw)]


def check_think(raw: object) -> bool | str | None:
    """Returns a checked `think`: True, False, a level of thinking, or None.

    With None the chat template decides. Raises BadRequest naming the value and the allowed values.
    """
    if raw is None or isinstance(raw, bool) or (isinstance(raw, str) and raw in LEVELS):
        return raw
    raise BadRequest(f"think must be true, false or one of {', '.join(LEVELS)}, got {shown(raw)}")


def check_continued(messages: object) -> None:
    """Checks the messages of a chat whose last message the model is to continue.

    Raises BadRequest unless the last message has the role assistant and a text, and no tool calls.
    """
    last = messages[-1] if _is_list(messages) and messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        what = "calls tools" if last.get("tool_calls") else f"has the role {last.get('role')!r}"
        raise BadRequest(
            f"continue_message: the last message must be an assistant's text to continue; it {what}"
        )
    if not joined(last.get("content")) and not last.get("reasoning_content"):
        raise BadRequest("continue_message: the last message has no text to continue")


def joined(content: object) -> str:
    """Returns the text of a checked content: of a text, of a list of parts, or of None.

    Images are left out.
    """
    if isinstance(content, list | tuple):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""


def _is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be a map with a role and a content, got {shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role is {shown(role)}, must be one of {', '.join(ROLES)}")
    for key in _TEXTS:
        if not isinstance(message.get(key), str | None):
            raise BadRequest(f"{where}.{key} must be text, got {shown(message[key])}")
    if message.get("images"):
        raise BadRequest(
            f"{where}.images is not supported: name each image by a part"
            " {type: 'image', blob: n} of the content"
        )
    checked = dict(message)
    # `reasoning` is an alias of reasoning_content, which has precedence.
    thoughts = checked.pop("reasoning", None)
    if thoughts and not checked.get("reasoning_content"):
        checked["reasoning_content"] = thoughts
    if checked.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(f"{where}.tool_calls", role, checked["tool_calls"])
    elif checked.get("content") is None:
        raise BadRequest(f"{where} has no content; only one with tool_calls may lack it")
    _check_content(f"{where}.content", checked.get("content"))
    return checked


def _check_content(where: str, content: object) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise BadRequest(
            f"{where} must be text or a list of {{type: 'text', text}} and {{type: 'image', blob}},"
            f" got {type(content).__name__}"
        )
    for number, part in enumerate(content):
        _check_part(f"{where}[{number}]", part)


def _check_part(where: str, part: object) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return
    if isinstance(part, Mapping) and kind == "image":
        blob = part.get("blob")
        if is_integer(blob) and blob >= 0:
            return
        raise BadRequest(f"{where}.blob must be the index of an image, got {shown(blob)}")
    raise BadRequest(
        f"{where} must be {{type: 'text', text}} or {{type: 'image', blob}}, for models take text"
        f" and images only; its type is {shown(kind)}"
    )


def _tool_calls(where: str, role: str, calls: object) -> list[dict[str, Any]]:
    if role != "assistant":
        raise BadRequest(f"{where}: only an assistant calls tools, the role is {role!r}")
    if not _is_list(calls) or len(calls) > MAX_TOOL_CALLS:
        got = f"{len(calls)}" if _is_list(calls) else shown(calls)
        raise BadRequest(f"{where} must be a list of at most {MAX_TOOL_CALLS} maps, got {got}")
    return [_tool_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadRequest(f"{where} must be a map with a `function`, got {shown(call)}")
    _check_name(f"{where}.function", function)
    arguments = _arguments(f"{where}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(where: str, raw: object) -> Mapping[str, Any]:
    """Returns the arguments of a tool call as a map; most chat APIs send them as JSON text."""
    if raw is None:
        return {}
    if isinstance(raw, str):
        return arguments_map(raw)
    if not isinstance(raw, Mapping):
        raise BadRequest(f"{where} must be a map or the JSON text of one, got {shown(raw)}")
    return raw


def _tool(where: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where} must be a map, got {shown(tool)}")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}.function must be a map, got {shown(function)}")
    _check_name(where if function is tool else f"{where}.function", function)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise BadRequest(f"{where}: parameters must be a map (JSON schema)")
    return dict(tool)


def _check_name(where: str, function: Mapping[str, Any]) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name must be text that is not empty, got {shown(name)}")


# ---- call arguments ------------------------------------------------------------------------------
# A model writes the arguments of a call as JSON text; templates and programs read a map. A model's
# text may not be a JSON map. That is not a fault of the request or of the server, so the map then
# has the text as its only member INVALID_JSON. Anthropic's API has the same name for its clients.


INVALID_JSON = "INVALID_JSON"  # the key whose value is a model's text, if that is not a JSON map
MAX_ARGUMENT_DEPTH = 20  # the most nested maps and lists; less than MAX_DEPTH of a message's body
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1  # bounds of integers of 64 bits


def arguments_map(text: str) -> dict[str, Any]:
    """Returns the map of a JSON text; {INVALID_JSON: text} for another text."""
    arguments = parsed_arguments(text)
    return {INVALID_JSON: text} if arguments is None else arguments


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """Returns the map of a JSON text. Strings in the text may contain unescaped line breaks.

    Returns {} for an empty text and for null. Returns None for a text that is not a map, or whose
    values some JSON readers cannot represent. Every reader can represent Unicode text, integers of
    64 bits, finite numbers, and MAX_ARGUMENT_DEPTH nested maps and lists.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) and _is_plain(value) else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_plain(value: Any, depth: int = MAX_ARGUMENT_DEPTH) -> bool:
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return MIN_INTEGER <= value <= MAX_INTEGER
    inside = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value or []
    if inside and not depth:
        return False
    return all(_is_plain(item, depth - 1) for item in inside)
