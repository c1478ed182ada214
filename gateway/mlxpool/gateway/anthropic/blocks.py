"""The messages of a request, whose contents are blocks, as the pool's messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import MAX_MESSAGES
from mlxpool.gateway.anthropic.fields import IMAGE_TYPES, ROLES
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.generation.images import FETCHED, from_base64

OF_USERS = "must be text, image or tool_result"
OF_ASSISTANTS = "must be text, thinking or tool_use"
REDACTED = "another server has encrypted these thoughts: leave the block out"
IN_RESULTS = "must be text; send an image as a block of the message, beside the tool_result"
PREFILLED = (
    "the last message is the assistant's: an answer that is begun cannot be continued; end with a"
    " message of the user"
)
ERROR = "Error: "  # begins the result of a tool that failed


class Conversation:
    """Collects messages, and the images that their parts name by index."""

    def __init__(self, system: object) -> None:
        """`system`: the field of this name. Raises HttpError."""
        self.messages: list[dict[str, Any]] = []
        self.images: list[bytes] = []
        self._names: dict[str, str] = {}  # of called tools, by the id of the call
        text = texts("system", system, "must be text", "system")
        if text:
            self.messages.append({"role": "system", "content": text})

    def add(self, where: str, message: object) -> None:
        """Add one of `messages`. Raises HttpError naming the block."""
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ROLES:
            names = ", ".join(ROLES)
            raise _fault(f"{where} must be a map with a role of {names}, got {shown(message)}")
        where, content = f"{where}.content", message.get("content")
        if role == "system":
            text = texts(where, content, "must be text")
            self.messages.append({"role": "system", "content": text})
        elif isinstance(content, str):
            self.messages.append({"role": role, "content": content})
        elif role == "user":
            self._user(where, blocks(where, content))
        else:
            self._assistant(where, blocks(where, content))

    def _user(self, where: str, given: Sequence[Mapping[str, Any]]) -> None:
        """A message for each result of a tool, and one for the blocks between them."""
        parts: list[dict[str, Any]] = []
        for number, block in enumerate(given):
            at = f"{where}[{number}]"
            if block["type"] == "tool_result":
                self._say(parts)
                parts = []
                self._result(at, block)
            else:
                parts.append(self._part(at, block))
        self._say(parts)

    def _say(self, parts: list[dict[str, Any]]) -> None:
        if parts:
            plain = all(part["type"] == "text" for part in parts)
            content = "\n".join(part["text"] for part in parts) if plain else parts
            self.messages.append({"role": "user", "content": content})

    def _part(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        if block["type"] == "text":
            return {"type": "text", "text": _text(where, block, "text")}
        if block["type"] != "image":
            raise _fault(f"{where} has the type {shown(block['type'])}, {OF_USERS}")
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or kind != "base64":
            why = FETCHED if kind == "url" else "must be {type: 'base64', media_type: …, data: …}"
            raise _fault(f"{where}.source is {shown(source)}: {why}")
        if source.get("media_type") not in IMAGE_TYPES:
            names = ", ".join(IMAGE_TYPES)
            got = shown(source.get("media_type"))
            raise _fault(f"{where}.source.media_type is {got}, must be one of {names}")
        self.images.append(from_base64(f"{where}.source.data", source.get("data"), "messages"))
        return {"type": "image", "blob": len(self.images) - 1}

    def _result(self, where: str, block: Mapping[str, Any]) -> None:
        call = _text(where, block, "tool_use_id")
        text = texts(f"{where}.content", block.get("content"), IN_RESULTS)
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise _fault(f"{where}.is_error must be true or false, got {shown(failed)}")
        name = self._names.get(call)
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call,
                **({"name": name} if name else {}),
                "content": f"{ERROR}{text}" if failed else text,
            }
        )

    def _assistant(self, where: str, given: Sequence[Mapping[str, Any]]) -> None:
        thoughts, said, calls = "", [], []
        for number, block in enumerate(given):
            at, kind = f"{where}[{number}]", block["type"]
            if kind == "text":
                said.append(_text(at, block, "text"))
            elif kind == "thinking":
                thoughts += _text(at, block, "thinking")
            elif kind == "tool_use":
                calls.append(self._call(at, block))
            elif kind == "redacted_thinking":
                raise _fault(f"{at} is redacted_thinking: {REDACTED}")
            else:
                raise _fault(f"{at} has the type {shown(kind)}, {OF_ASSISTANTS}")
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said)}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        id, name = _text(where, block, "id"), _text(where, block, "name")
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise _fault(f"{where}.input must be a map, got {shown(arguments)}")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


def conversation_of(system: object, given: object) -> Conversation:
    """The conversation of `system` and `messages`. Raises HttpError naming message and block."""
    found = Conversation(system)
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_MESSAGES:
        got = len(given) if isinstance(given, list) else shown(given)
        raise _fault(f"'messages' must be a list of 1 to {MAX_MESSAGES} maps, got {got}")
    for number, message in enumerate(given):
        found.add(f"messages[{number}]", message)
    if found.messages and found.messages[-1]["role"] == "assistant":
        raise _fault(PREFILLED)
    return found


def blocks(where: str, given: object, param: str = "messages") -> Sequence[Mapping[str, Any]]:
    """A list of blocks, each with a type. Raises HttpError."""
    if not isinstance(given, list):
        raise bad_request(f"{where} must be text or a list of blocks, got {shown(given)}", param)
    for number, block in enumerate(given):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            message = f"{where}[{number}] must be a map with a type, got {shown(block)}"
            raise bad_request(message, param)
    return given


def texts(where: str, given: object, advice: str, param: str = "messages") -> str:
    """A text, or the texts of blocks, a line each; "" for null. Raises HttpError."""
    if given is None or isinstance(given, str):
        return given or ""
    found = blocks(where, given, param)
    for number, block in enumerate(found):
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            message = f"{where}[{number}] has the type {shown(block['type'])}, {advice}"
            raise bad_request(message, param)
    return "\n".join(block["text"] for block in found)


def _text(where: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _fault(f"{where}.{key} must be text, got {shown(value)}")
    return value


def _fault(message: str) -> HttpError:
    return bad_request(message, "messages")
