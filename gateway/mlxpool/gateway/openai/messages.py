"""Messages of Chat Completions in the one form that the pool takes, from all that clients send.

Pure. What an earlier answer had of other servers is kept as text, or left out where no model reads
it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxpool.gateway.left_out import NO_ROOM

# Types of parts of an earlier answer that are no text for the next one.
NOT_SAID = ("thinking", "redacted_thinking", "reasoning", "audio")
READ = ("text", "image_url")
MAY_LACK_CONTENT = ("assistant", "tool")


def as_taken(raw: object) -> object:
    """The messages; what is none is left as it is, for the check of messages."""
    if not isinstance(raw, list):
        return raw
    return [_message(message) if isinstance(message, Mapping) else message for message in raw]


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    found = dict(message)
    if found.get("role") == "function":  # the older form of a tool's result
        found["role"] = "tool"
    role, called = found.get("role"), found.pop("function_call", None)
    if role == "assistant" and isinstance(called, Mapping) and not found.get("tool_calls"):
        found["tool_calls"] = [{"type": "function", "function": called}]
    if role == "assistant" and isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
    content = found.get("content")
    if role == "assistant" and isinstance(content, list):
        content = [_said(part) for part in content if _type(part) not in NOT_SAID]
    if role == "tool" and isinstance(content, list):
        content = [_readable(part) for part in content]
    refusal = found.pop("refusal", None)
    if not content and role in MAY_LACK_CONTENT and isinstance(content, list | None):
        content = refusal if isinstance(refusal, str) else ""
    return {**found, "content": "" if content == [] else content}


def _call(call: Any) -> Any:
    """A call; that of a tool with free text becomes one with the argument `input`."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    arguments = json.dumps({"input": custom.get("input")}, ensure_ascii=False)
    known = {key: value for key, value in call.items() if key != "custom"}
    function = {"name": custom.get("name"), "arguments": arguments}
    return {**known, "type": "function", "function": function}


def _readable(part: Any) -> Any:
    """A part of a result; a note in place of a file and the like, which no model reads."""
    kind = _type(part)
    if not isinstance(kind, str) or kind in READ:
        return part
    return {"type": "text", "text": NO_ROOM.format(kind=kind)}


def _said(part: Any) -> Any:
    if _type(part) in ("refusal", "output_text"):
        return {"type": "text", "text": part.get("refusal") or part.get("text") or ""}
    return part


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None
