"""The items of a request's `input`, as the pool's messages. Pure."""

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

NAMESPACE = "namespace"  # the type of a group, and the member of its calls
_BETWEEN = "__"
KNOWN = "must be a map with a type, such as message or function_call"
READ = (*TEXT_PARTS, "refusal", "input_image")
PARTS = "must be input_text, output_text, input_image or refusal"
# Items of calls of other kinds that a client has answered: their member with what was asked.
CALLS: Mapping[str, str] = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
    "mcp_call": "arguments",
}
OUTPUT = "_output"  # behind the type of a call: its result


def joined(group: object, name: str) -> str:
    """The name by which a model knows a function; without a group its own."""
    if not isinstance(group, str) or not group:
        return name
    return f"{group}{name}" if group.endswith(_BETWEEN) else f"{group}{_BETWEEN}{name}"


def divided(name: str, tools: object) -> dict[str, str]:
    """The members of a call that name its function, by the `tools` of the request."""
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
        self._names: dict[str, str] = {}  # of called functions, by the id of the call

    def add(self, where: str, item: object) -> None:
        """Add one item of `input`. Raises HttpError naming it."""
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
        """A call of another kind, as the call of a function, or its result."""
        call_id = item.get("call_id") or item.get("id") or kind
        if kind not in CALLS:
            self._result(str(call_id), _as_text(item.get("output")))
            return
        asked = item.get(CALLS[kind])
        arguments = asked if isinstance(asked, Mapping) else {"input": asked}
        name = item.get("name") or kind.removesuffix("_call")
        self._calls(str(call_id), str(name), json.dumps(arguments, ensure_ascii=False))
        if kind == "mcp_call":  # its result is in the same item
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
        """Thoughts of an earlier answer: its `content`, or its summary if it has no other.

        What another server has encrypted nobody can read here: it is left out.
        """
        text = _texts(f"{where}.content", item.get("content"))
        text = text or _texts(f"{where}.summary", item.get("summary"))
        if text:
            message = self._assistant(lacks=("reasoning_content", "content", "tool_calls"))
            message["reasoning_content"] = text
            message["content"] = ""

    def _assistant(self, lacks: Sequence[str] = ()) -> dict[str, Any]:
        """The last message if it is the assistant's without these members, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in lacks):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last

    def _content(self, where: str, content: object) -> str | list[dict[str, Any]]:
        """Text if all parts are text, else parts."""
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
    """The conversation of an earlier response: what its model was given, and what it answered."""

    messages: Sequence[dict[str, Any]]
    images: Sequence[bytes]
    output: Sequence[Mapping[str, Any]]  # items


def conversation_of(
    given: object, instructions: str, earlier: Earlier | None = None
) -> Conversation:
    """The conversation of `input`, after instructions as a system message and what was before.

    Raises HttpError naming the item.
    """
    found = Conversation()
    if instructions:
        found.messages.append({"role": "system", "content": instructions})
    if earlier is not None:
        found.messages += earlier.messages
        found.images += earlier.images
        for number, item in enumerate(earlier.output):
            found.add(f"previous_response_id: output[{number}]", item)
    if isinstance(given, str):
        found.messages.append({"role": "user", "content": given})
        return found
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_MESSAGES:
        got = len(given) if isinstance(given, list) else shown(given)
        raise _fault(f"'input' must be text or a list of 1 to {MAX_MESSAGES} items, got {got}")
    for number, item in enumerate(given):
        found.add(f"input[{number}]", item)
    return found


def _readable(part: object) -> object:
    """A part of a result; a note in place of a file and the like, which no model reads."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind in READ:
        return part
    return {"type": "input_text", "text": NO_ROOM.format(kind=kind)}


def _as_text(value: object) -> str:
    """A result as text, be it text, parts of text or anything else."""
    if isinstance(value, list) and all(isinstance(one, Mapping) and "text" in one for one in value):
        return "".join(str(one["text"]) for one in value)
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
    """The texts of parts, joined; "" for null."""
    if isinstance(parts, str | None):
        return parts or ""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise _fault(f"{where} must be a list of parts with text, got {shown(parts)}")
    return "".join(_text(f"{where}[{number}]", part, "text") for number, part in enumerate(parts))
