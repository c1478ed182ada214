"""Converts the items of a request's `input` into the pool's messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import MAX_MESSAGES
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.field_checks import ELSEWHERE, NO_ROOM, log_left_out
from mlxpool.gateway.generation.images import DETAILS, from_data_url
from mlxpool.gateway.openai.responses_api.fields import MESSAGE_ROLES, TEXT_PARTS

NAMESPACE = "namespace"  # the type of a group of tools; in a call, the member with the group's name
_BETWEEN = "__"
KNOWN = "must be a map with a type, such as message or function_call"
READ = (*TEXT_PARTS, "refusal", "input_image")
PARTS = "must be input_text, output_text, input_image or refusal"
# Types of calls that a client has answered -> the member with their arguments.
CALLS: Mapping[str, str] = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
    "mcp_call": "arguments",
}
OUTPUT = "_output"  # the end of the type of a call's result


def joined(group: object, name: str) -> str:
    """Returns a function's name as the model sees it: after the name of its namespace, if any."""
    if not isinstance(group, str) or not group:
        return name
    return f"{group}{name}" if group.endswith(_BETWEEN) else f"{group}{_BETWEEN}{name}"


def divided(name: str, tools: object) -> dict[str, str]:
    """Splits a name that `joined` made into the members `namespace` and `name` of a call item.

    `tools`: the tools of the request.
    """
    for group in tools if isinstance(tools, list) else ():
        if isinstance(group, Mapping) and group.get("type") == NAMESPACE:
            for tool in group.get("tools") or ():
                if joined(group["name"], _name_of(tool)) == name:
                    return {NAMESPACE: group["name"], "name": tool["name"]}
    return {"name": name}


def _name_of(tool: Any) -> str:
    return str(tool.get("name")) if isinstance(tool, Mapping) else ""


class Conversation:
    """Collects messages, and the images that their parts name by index.

    Thoughts, text and calls that follow each other are one message of the assistant.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[bytes] = []
        self._names: dict[str, str] = {}  # names of called functions, by the id of the call

    def add(self, where: str, item: object) -> None:
        """Adds an item of `input`. Raises HttpError naming the item."""
        if not isinstance(item, Mapping):
            raise _fault(f"{where} {KNOWN}, got {shown(item)}")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(where, item)
        elif kind == "function_call":
            self._call(where, item)
        elif kind == "function_call_output":
            self._output(where, item)
        elif kind == "reasoning":
            self._reasoning(where, item)
        elif not isinstance(kind, str) or not kind:
            raise _fault(f"{where}.type is {shown(kind)}, {KNOWN}")
        elif kind in CALLS or kind.removesuffix(OUTPUT) in CALLS:
            self._foreign(kind, item)
        else:
            log_left_out("an item of a conversation is left out", shown(kind), ELSEWHERE)

    def _foreign(self, kind: str, item: Mapping[str, Any]) -> None:
        """Adds a call of a tool that is not a function, or its result, as a function call."""
        call_id = item.get("call_id") or item.get("id") or kind
        if kind not in CALLS:
            self._result(str(call_id), _as_text(item.get("output")))
            return
        argument = item.get(CALLS[kind])
        arguments = argument if isinstance(argument, Mapping) else {"input": argument}
        name = item.get("name") or kind.removesuffix("_call")
        self._calls(str(call_id), str(name), json.dumps(arguments, ensure_ascii=False))
        if kind == "mcp_call":  # the call's result is in the same item
            self._result(str(call_id), _as_text(item.get("output") or item.get("error")))

    def _message(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in MESSAGE_ROLES:
            raise _fault(
                f"{where}.role is {shown(role)}, must be one of {', '.join(MESSAGE_ROLES)}"
            )
        content = self._content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self.messages.append({"role": role, "content": content})
            return
        message = self._assistant(lacks=("content", "tool_calls"))
        message["content"] = content

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        call_id, name = _name(where, item, "call_id"), _name(where, item, "name")
        arguments = item.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str | None):
            raise _fault(f"{where}.arguments must be JSON text, got {shown(arguments)}")
        self._calls(call_id, joined(item.get(NAMESPACE), name), arguments or "")

    def _calls(self, call_id: str, name: str, arguments: str) -> None:
        self._names[call_id] = name
        message = self._assistant()
        message.setdefault("content", "")
        message.setdefault("tool_calls", []).append(
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    def _output(self, where: str, item: Mapping[str, Any]) -> None:
        call_id, output = _name(where, item, "call_id"), item.get("output")
        if isinstance(output, list):
            output = self._content(f"{where}.output", [_readable(part) for part in output])
        self._result(call_id, output if isinstance(output, list) else _as_text(output))

    def _result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        name = self._names.get(call_id)
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                **({"name": name} if name else {}),
                "content": content,
            }
        )

    def _reasoning(self, where: str, item: Mapping[str, Any]) -> None:
        """Adds thoughts of an earlier answer: its `content`, or its summary if it has no content.

        Encrypted thoughts of another server cannot be read here and are left out.
        """
        text = _texts(f"{where}.content", item.get("content"))
        text = text or _texts(f"{where}.summary", item.get("summary"))
        if text:
            message = self._assistant(lacks=("reasoning_content", "content", "tool_calls"))
            message["reasoning_content"] = text
            message["content"] = ""

    def _assistant(self, lacks: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the assistant's message to add to: the last message, or else a new message.

        If the last message already has one of the members `lacks`, a new message is added.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in lacks):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last

    def _content(self, where: str, content: object) -> str | list[dict[str, Any]]:
        """Returns a text if all parts are text, else the parts."""
        if isinstance(content, str | None):
            return content or ""
        if not isinstance(content, list):
            raise _fault(f"{where} must be text or a list of parts, got {shown(content)}")
        parts = [self._part(f"{where}[{number}]", part) for number, part in enumerate(content)]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def _part(self, where: str, part: object) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise _fault(f"{where} {PARTS}, got {shown(part)}")
        if kind in TEXT_PARTS:
            return {"type": "text", "text": _text(where, part, "text")}
        if kind == "refusal":
            return {"type": "text", "text": _text(where, part, "refusal")}
        if kind != "input_image":
            raise _fault(f"{where} has the type {shown(kind)}, {PARTS}")
        if part.get("detail") not in (*DETAILS, "original"):
            raise _fault(f"{where}.detail is {shown(part['detail'])}, must be auto, low or high")
        if part.get("file_id") is not None:
            raise _fault(f"{where}.file_id is not supported: send the image as a data URL")
        self.images.append(from_data_url(f"{where}.image_url", part.get("image_url"), "input"))
        return {"type": "image", "blob": len(self.images) - 1}


class Earlier(Struct, frozen=True):
    """The conversation of an earlier response: the input of its model, and its output."""

    messages: Sequence[dict[str, Any]]
    images: Sequence[bytes]
    output: Sequence[Mapping[str, Any]]  # items of the answer


def conversation_of(
    items: object, instructions: str, earlier: Earlier | None = None
) -> Conversation:
    """Returns the conversation: instructions as a system message, earlier messages, then `input`.

    Raises HttpError naming the item.
    """
    conversation = Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if earlier is not None:
        conversation.messages += earlier.messages
        conversation.images += earlier.images
        for number, item in enumerate(earlier.output):
            conversation.add(f"previous_response_id: output[{number}]", item)
    if isinstance(items, str):
        conversation.messages.append({"role": "user", "content": items})
        return conversation
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_MESSAGES:
        got = len(items) if isinstance(items, list) else shown(items)
        raise _fault(f"'input' must be text or a list of 1 to {MAX_MESSAGES} items, got {got}")
    for number, item in enumerate(items):
        conversation.add(f"input[{number}]", item)
    return conversation


def _readable(part: object) -> object:
    """Returns a part of a tool result unchanged, or a text in its place if no model can read it.

    A file, for example, is replaced by a text part that names its type.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind in READ:
        return part
    return {"type": "input_text", "text": NO_ROOM.format(kind=kind)}


def _as_text(value: object) -> str:
    """Returns a result as text: from text, parts of text or any other value."""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and "text" in part for part in value
    ):
        return "".join(str(part["text"]) for part in value)
    if isinstance(value, str | None):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _fault(message: str) -> HttpError:
    return bad_request(message, "input")


def _name(where: str, item: Mapping[str, Any], key: str) -> str:
    if not _text(where, item, key):
        raise _fault(f"{where}.{key} must not be empty")
    return str(item[key])


def _text(where: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _fault(f"{where}.{key} must be text, got {shown(value)}")
    return value


def _texts(where: str, parts: object) -> str:
    """Returns the texts of parts, joined; "" for null."""
    if isinstance(parts, str | None):
        return parts or ""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _fault(f"{where} must be a list of parts with text, got {shown(parts)}")
    return "".join(_text(f"{where}[{number}]", part, "text") for number, part in enumerate(parts))
