"""Responses that the pool stores as jobs; the job's note has settings of the response. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.client.jobs import SubmittedJob
from mlxpool.common.protocol.kept.job_messages import MAX_NOTE
from mlxpool.common.records import as_map
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame, response_id
from mlxpool.gateway.resumption import GENERATION

KIND = "response"
MAX_UNPACKED = 16 * 1024 * 1024  # most bytes of a note, unpacked
# state of the job -> status of the response
WAITING = {"waiting": "queued", "running": "in_progress"}
SIGNATURES = {  # first bytes of a file -> its type
    b"\x89PNG": "image/png",
    b"\xff\xd8": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class ResponseNote(Struct, frozen=True):
    """The properties of a response that are stored as the note of its job.

    The job itself lacks them; ResponseFrame and KeptAnswer need them. `tools` and `several_calls`
    come from the request, `formats` from the model.
    """

    created: int
    echoed: Mapping[str, Any]
    summary: bool
    formats: tuple[str | None, str | None]  # formats of tools and thoughts
    tools: Sequence[Mapping[str, Any]]
    several_calls: bool
    background: bool

    @property
    def chat(self) -> ChatFormats:
        return ChatFormats(*self.formats)

    def packed(self) -> bytes:
        """Returns the bytes that are stored with the job. Raises HttpError if they are too many."""
        text = json.dumps({"kind": KIND, **as_map(self)}, separators=(",", ":"))
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
        if len(packed) > MAX_NOTE:
            raise bad_request(
                f"the settings of a response that is kept have {len(packed)} bytes, compressed;"
                f" the limit is {MAX_NOTE} bytes: give fewer or shorter tools and instructions",
                "tools",
            )
        return packed

    @classmethod
    def unpacked(cls, note: bytes) -> ResponseNote | None:
        """Reads the note of a response; None if the bytes are not such a note."""
        try:
            text = zlib.decompressobj().decompress(note, MAX_UNPACKED)
            members = json.loads(text.decode("utf-8", "surrogatepass"))
            if members.pop("kind") != KIND:
                return None
            tools, thoughts = members.pop("formats")
            return cls(formats=(tools, thoughts), **members)
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
            return None


class KeptResponse(Struct, frozen=True):
    """A response that the pool stores as a job, as read from the pool."""

    id: str  # the response's id without prefix
    job: Mapping[str, Any]  # the map of the job
    request: Mapping[str, Any]  # the body of the job's `submit`
    images: Sequence[bytes]
    note: ResponseNote

    @classmethod
    def of(cls, submitted: SubmittedJob) -> KeptResponse | None:
        """Returns the response of a job; None if the job was not made by this interface."""
        note, key = ResponseNote.unpacked(submitted.note), str(submitted.row["key"])
        prefix = response_id("")
        if note is None or not key.startswith(prefix):
            return None
        return cls(
            key.removeprefix(prefix), submitted.row, submitted.request, submitted.blobs, note
        )

    @property
    def frame(self) -> ResponseFrame:
        return ResponseFrame(self.id, self.note.created, self.note.echoed, self.note.summary)

    @property
    def waiting(self) -> str | None:
        """The status of a response that has not ended; None after its end."""
        return WAITING.get(str(self.job["state"]))

    @property
    def stops(self) -> bool:
        """Whether the answer may end at a stop text of the request."""
        return bool((self.request.get("options") or {}).get("stop"))

    @property
    def first_number(self) -> int:
        """The number of the first event of this generation."""
        return GENERATION * int(self.job["gen"])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages that the model got, without the instructions."""
        messages = list(self.request.get("messages") or ())
        return messages[1:] if self.note.echoed.get("instructions") else messages

    def check_number(self, after: int | None) -> None:
        """Raises HttpError if the event with this number belongs to another generation."""
        number = 0 if after is None else after
        if after is None or self.first_number <= number < self.first_number + GENERATION:
            return
        raise HttpError(
            409,
            f"starting_after is {after}, and the events of this response are numbered from"
            f" {self.first_number} on: it was started again because its model has changed;"
            " read it without starting_after",
            "job_restarted",
            "starting_after",
            retry=False,
        )


def items_of(
    messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], id: str
) -> list[dict[str, Any]]:
    """Returns the items of messages, each with its own id; `id`: the id of their response."""
    items: list[dict[str, Any]] = []
    for message in messages:
        for item in _items(message, images):
            prefix = {"message": "msg", "reasoning": "rs"}.get(item["type"], "fc")
            name = f"{prefix}_{id}_in{len(items)}"
            items.append({"id": name, "status": "completed", **item})
    return items


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
        members = {"call_id": call_id, "name": name, "arguments": arguments}
        yield {"type": "function_call", **members}


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
