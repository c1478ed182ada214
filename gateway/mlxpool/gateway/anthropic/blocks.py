"""Turns the messages of a request, whose contents are blocks, into the pool's messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import MAX_MESSAGES, arguments_map
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.field_checks import ELSEWHERE, NO_ROOM, log_left_out
from mlxpool.gateway.generation.images import FETCHED, from_base64

ROLES = ("user", "assistant", "system")
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
OF_USERS = "must be text, image, document (of text) or tool_result"
CALLED = "the last message calls tools: their results are missing"
# Type of a block that a model reads as text -> the member with its text.
TEXTS: Mapping[str, str] = {"text": "text", "compaction": "content"}
SEEN = "[an image, which follows]"
# Blocks without text for the model: an assistant's blocks, and references to files of other
# servers.
LEFT_OUT = frozenset(
    {
        "container_upload",
        "mid_conv_system",
        "thinking",
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "tool_use",
    }
)
FOREIGN_RESULT = "_tool_result"  # suffix of the result types of tools of other servers
LEFT_OUT_EVENT = "a block of a conversation is left out"
AS_TEXT = (
    "models read text and images only: send the text of it, as {type: 'document', source: {type:"
    " 'text', media_type: 'text/plain', data: TEXT}}"
)
ERROR = "Error: "  # prefix of the result of a failed tool


class Conversation:
    """Collects a request's messages in the pool's form, and the images of their parts.

    A part with an image has the image's index in `images`.
    """

    def __init__(self, system: object) -> None:
        """`system`: the request's field of this name. Raises HttpError."""
        self.messages: list[dict[str, Any]] = []
        self.images: list[bytes] = []
        self._names: dict[str, str] = {}  # names of called tools by the id of the call
        text = texts("system", system, "must be text", "system")
        if text:
            self.messages.append({"role": "system", "content": text})

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's, so that the answer continues it."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def add(self, where: str, message: object) -> None:
        """Adds a message of the request. Raises HttpError naming the block."""
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ROLES:
            names = ", ".join(ROLES)
            raise _fault(f"{where} must be a map with a role of {names}, got {shown(message)}")
        where, content = f"{where}.content", message.get("content")
        if role == "system":
            text = texts(where, content, "must be text")
            self.messages.append({"role": "system", "content": text})
        elif isinstance(content, str | None):
            content = content or ""
            self.messages.append({"role": role, "content": content})
        elif role == "user":
            self._user(where, blocks(where, content))
        else:
            self._assistant(where, blocks(where, content))

    def _user(self, where: str, user_blocks: Sequence[Mapping[str, Any]]) -> None:
        """Adds a message for each tool result, and a message for the blocks between results."""
        parts: list[dict[str, Any]] = []
        images: list[dict[str, Any]] = []  # images of results, placed after the results
        for number, block in enumerate(user_blocks):
            at = f"{where}[{number}]"
            if block["type"] == "tool_result":
                self._say(parts)
                parts = []
                images += self._result(at, block)
            elif block["type"] in LEFT_OUT or block["type"].endswith(FOREIGN_RESULT):
                log_left_out(LEFT_OUT_EVENT, block["type"], ELSEWHERE)
            else:
                parts.append(self._part(at, block))
        self._say([*images, *parts])

    def _say(self, parts: list[dict[str, Any]]) -> None:
        if parts:
            plain = all(part["type"] == "text" for part in parts)
            content = "\n".join(part["text"] for part in parts) if plain else parts
            self.messages.append({"role": "user", "content": content})

    def _part(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        if block["type"] == "text":
            return {"type": "text", "text": _text(where, block, "text")}
        if block["type"] != "image":
            return {"type": "text", "text": _read(where, block)}
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

    def _result(self, where: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Adds a tool message with the texts of a result. Returns parts with the result's images.

        The caller adds these parts to a user's message.
        """
        call = _text(where, block, "tool_use_id")
        content = block.get("content")
        if isinstance(content, Mapping):  # a result that is not wrapped in blocks
            content = json.dumps(content, ensure_ascii=False)
        inner = [] if isinstance(content, str | None) else blocks(f"{where}.content", content)
        images = [image for image in inner if image["type"] == "image"]
        parts = [self._part(f"{where}.content", image) for image in images]
        said = [
            _of_result(f"{where}.content[{number}]", part)
            for number, part in enumerate(inner)
            if part["type"] != "image"
        ]
        text = content if isinstance(content, str) else "\n".join(said) or SEEN * bool(images)
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
        return parts

    def _assistant(self, where: str, assistant_blocks: Sequence[Mapping[str, Any]]) -> None:
        thoughts, texts_said, calls = "", [], []
        for number, block in enumerate(assistant_blocks):
            at, kind = f"{where}[{number}]", block["type"]
            if kind in TEXTS:
                texts_said.append(_text(at, {TEXTS[kind]: "", **block}, TEXTS[kind]))
            elif kind == "thinking":
                thoughts += _text(at, block, "thinking")
            elif kind == "tool_use":
                calls.append(self._call(at, block))
            else:  # blocks that another server ran or encrypted
                log_left_out(LEFT_OUT_EVENT, kind, ELSEWHERE)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts_said)}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        id, name = _text(where, block, "id"), _text(where, block, "name")
        arguments = {} if block.get("input") is None else block["input"]
        if isinstance(arguments, str):
            arguments = arguments_map(arguments)
        if not isinstance(arguments, Mapping):
            raise _fault(f"{where}.input must be a map, got {shown(arguments)}")
        self._names[id] = name
        function = {"name": name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


def conversation_of(system: object, messages: object) -> Conversation:
    """Returns the conversation of `system` and `messages`.

    Raises HttpError naming message and block.
    """
    conversation = Conversation(system)
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        got = len(messages) if isinstance(messages, list) else shown(messages)
        raise _fault(f"'messages' must be a list of 1 to {MAX_MESSAGES} maps, got {got}")
    for number, message in enumerate(messages):
        conversation.add(f"messages[{number}]", message)
    last = conversation.messages[-1] if conversation.continues else {}
    if last.get("tool_calls"):
        raise _fault(CALLED)
    if (
        last
        and len(conversation.messages) > 1
        and not (last["content"] or last.get("reasoning_content"))
    ):
        conversation.messages.pop()  # an empty answer, as of a request that failed
    return conversation


def _read(where: str, block: Mapping[str, Any]) -> str:
    """Returns the text of a block that has text.

    Raises HttpError for a block that a model cannot read.
    """
    kind, source = block["type"], block.get("source")
    if kind == "search_result":
        return texts(f"{where}.content", block.get("content"), "must be text")
    if kind == "document" and isinstance(source, Mapping):
        title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
        if source.get("type") == "text":
            return title + _text(f"{where}.source", source, "data")
        if source.get("type") == "content":
            return title + texts(f"{where}.source.content", source.get("content"), "must be text")
        if source.get("type") == "base64" and _is_text(source.get("media_type")):
            return title + _decoded(f"{where}.source.data", source.get("data"))
        got = source.get("media_type") if source.get("type") == "base64" else source.get("type")
        raise _fault(f"{where} is a document of {shown(got)}: {AS_TEXT}")
    raise _fault(f"{where} has the type {shown(kind)}, {OF_USERS}")


def _is_text(media_type: object) -> bool:
    """Whether a document of this type, such as text/plain, is text."""
    return isinstance(media_type, str) and media_type.lower().startswith("text/")


def _decoded(where: str, data: object) -> str:
    """Returns the text of a document in base64. Raises HttpError."""
    try:
        return from_base64(where, data, "messages").decode()
    except UnicodeDecodeError as error:
        raise _fault(f"{where} is not text in UTF-8: {error}") from None


def _of_result(where: str, block: Mapping[str, Any]) -> str:
    """Returns the text of a block in a tool result.

    For a block that no model can read, returns a text that names the block's type.
    """
    if block["type"] == "text":
        return _text(where, block, "text")
    if block["type"] == "tool_reference":
        return f"The tool {block.get('tool_name')} is available."
    try:
        return _read(where, block)
    except HttpError:
        return NO_ROOM.format(kind=block["type"])


def blocks(where: str, content: object, param: str = "messages") -> Sequence[Mapping[str, Any]]:
    """Returns a checked list of blocks, each with a type. Raises HttpError."""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be text or a list of blocks, got {shown(content)}", param)
    for number, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            message = f"{where}[{number}] must be a map with a type, got {shown(block)}"
            raise bad_request(message, param)
    return content


def texts(where: str, content: object, advice: str, param: str = "messages") -> str:
    """Returns a content as text: its text, or the texts of its blocks, one a line; "" for null.

    Raises HttpError for a block of another type; `advice` ends the error message.
    """
    if content is None or isinstance(content, str):
        return content or ""
    text_blocks = blocks(where, content, param)
    for number, block in enumerate(text_blocks):
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            message = f"{where}[{number}] has the type {shown(block['type'])}, {advice}"
            raise bad_request(message, param)
    return "\n".join(block["text"] for block in text_blocks)


def _text(where: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise _fault(f"{where}.{key} must be text, got {shown(value)}")
    return value


def _fault(message: str) -> HttpError:
    return bad_request(message, "messages")
