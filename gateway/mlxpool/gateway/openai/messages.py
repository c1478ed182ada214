"""Converts messages of Chat Completions, in all forms that clients send, into the pool's form.

Pure. Parts of an earlier answer of another server are kept as text, or are left out if no model
reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxpool.gateway.field_checks import NO_ROOM

# Types of parts of an earlier answer that the model does not read for the next answer.
NOT_SAID = ("thinking", "redacted_thinking", "reasoning", "audio")
READ = ("text", "image_url")
# Further types of parts of a tool's result, which no model reads.
FILES = ("file", "input_file", "image", "input_image", "input_audio", "audio_url", "video_url")
# Types of text parts in other interfaces -> the member with the text.
TEXTS: Mapping[str, str] = {
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}


def as_taken(raw: object) -> object:
    """Returns the messages in the pool's form. Invalid values are unchanged, and refused later."""
    if not isinstance(raw, list):
        return raw
    return [_message(message) if isinstance(message, Mapping) else message for message in raw]


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    converted = dict(message)
    if converted.get("role") == "function":  # the older form of a tool's result
        converted["role"] = "tool"
    role, called = converted.get("role"), converted.pop("function_call", None)
    if role == "assistant" and isinstance(called, Mapping) and not converted.get("tool_calls"):
        converted["tool_calls"] = [{"type": "function", "function": called}]
    if role == "assistant" and isinstance(converted.get("tool_calls"), list):
        converted["tool_calls"] = [_call(call) for call in converted["tool_calls"]]
    content = _parts(role, converted.get("content"))
    refusal = converted.pop("refusal", None)
    if not content and role == "assistant":
        content = refusal if isinstance(refusal, str) else ""
    return {**converted, "content": content}


def _parts(role: Any, content: Any) -> Any:
    """Returns the content of a message of this role, "" for null.

    Other values are unchanged, and refused later.
    """
    if content is None or content == []:
        return ""
    if role == "tool" and not isinstance(content, str) and not _is_parts(content):
        return json.dumps(content, ensure_ascii=False)  # a result that is not wrapped in parts
    if isinstance(content, Mapping) and "type" in content:
        content = [content]
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if role == "assistant":
        return [part for part in parts if _type(part) not in NOT_SAID] or ""
    return [_readable(part) for part in parts] if role == "tool" else parts


def _is_parts(content: Any) -> bool:
    """Whether the content of a tool result is a list of content parts.

    The content may also be a list of other values.
    """
    kinds = (*READ, *TEXTS, *FILES)
    return isinstance(content, list) and all(_type(part) in kinds for part in content)


def _part(part: Any) -> Any:
    """Converts a content part in another interface's form into the form of Chat Completions."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _type(part)
    if kind is None and isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "type": "text"}
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": "text", "text": part.get(TEXTS[kind]) or ""}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"], "detail": part.get("detail")}
        return {"type": "image_url", "image_url": image}
    return part


def _call(call: Any) -> Any:
    """Returns a call; a custom tool's free text becomes the argument `input` of a function call."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    arguments = json.dumps({"input": custom.get("input")}, ensure_ascii=False)
    known = {key: value for key, value in call.items() if key != "custom"}
    function = {"name": custom.get("name"), "arguments": arguments}
    return {**known, "type": "function", "function": function}


def _readable(part: Any) -> Any:
    """Returns a part of a tool result that models can read.

    A part that no model can read, such as a file, is replaced by a text part that names its type.
    """
    kind = _type(part)
    if not isinstance(kind, str) or kind in READ:
        return part
    return {"type": "text", "text": NO_ROOM.format(kind=kind)}


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None
