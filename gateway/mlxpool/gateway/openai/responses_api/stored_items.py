"""The messages that a model was given, as items of OpenAI's Responses. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SIGNATURES = {  # first bytes of a file -> its type
    b"\x89PNG": "image/png",
    b"\xff\xd8": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def items_of(
    messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], id: str
) -> list[dict[str, Any]]:
    """The items, each with an id of its own; `id`: of the response that they belong to."""
    found: list[dict[str, Any]] = []
    for message in messages:
        for item in _items(message, images):
            prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
            name = f"{prefix}_{id}_in{len(found)}"
            found.append({"id": name, "status": "completed", **item})
    return found


def _items(message: Mapping[str, Any], images: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        call = message.get("tool_call_id") or ""
        yield {"type": "function_call_output", "call_id": call, "output": _text(content)}
        return
    thoughts = message.get("reasoning_content") or message.get("thinking")
    if thoughts:
        parts = [{"type": "reasoning_text", "text": thoughts}]
        yield {"type": "reasoning", "summary": [], "content": parts}
    calls = message.get("tool_calls") or ()
    if content or not (thoughts or calls):
        kind = "output_text" if role == "assistant" else "input_text"
        yield {"type": "message", "role": role, "content": _parts(content, images, kind)}
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_id, name = call.get("id") or "", function["name"]
        made = {"call_id": call_id, "name": name, "arguments": arguments}
        yield {"type": "function_call", **made}


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _parts(content: Any, images: Sequence[bytes], kind: str) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return [_text_part(kind, content or "")]
    return [
        _image_part(images[part["blob"]])
        if part["type"] == "image"
        else _text_part(kind, part["text"])
        for part in content
    ]


def _text_part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _image_part(data: bytes) -> dict[str, Any]:
    known = (kind for head, kind in SIGNATURES.items() if data.startswith(head))
    url = f"data:{next(known, 'image/png')};base64,{base64.b64encode(data).decode()}"
    return {"type": "input_image", "detail": "auto", "image_url": url, "file_id": None}
