"""Responses that the pool keeps as jobs: what is noted with a job, and what is made of it. Pure."""

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
MAX_UNPACKED = 16 * 1024 * 1024  # bytes of a note
WAITING = {"waiting": "queued", "running": "in_progress"}  # state of the job -> of the response
SIGNATURES = {  # first bytes of a file -> its type
    b"\x89PNG": "image/png",
    b"\xff\xd8": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class ResponseNote(Struct, frozen=True):
    """What a response has beside its job: see ResponseFrame and KeptAnswer.

    `tools` and `several_calls` are those of the request, `formats` those of the model.
    """

    created: int
    echoed: Mapping[str, Any]
    summary: bool
    formats: tuple[str | None, str | None]  # of tools and thoughts
    tools: Sequence[Mapping[str, Any]]
    several_calls: bool
    background: bool

    @property
    def chat(self) -> ChatFormats:
        return ChatFormats(*self.formats)

    def packed(self) -> bytes:
        """The bytes that are kept with the job. Raises HttpError for too many."""
        text = json.dumps({"kind": KIND, **as_map(self)}, separators=(",", ":"))
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
        if len(packed) > MAX_NOTE:
            raise bad_request(
                f"the settings of a response that is kept have {len(packed)} bytes, compressed, at"
                f" most {MAX_NOTE} are taken: give fewer or shorter tools and instructions",
                "tools",
            )
        return packed

    @classmethod
    def unpacked(cls, note: bytes) -> ResponseNote | None:
        """The note of a response from its bytes; None if the bytes are no such note."""
        try:
            text = zlib.decompressobj().decompress(note, MAX_UNPACKED)
            found = json.loads(text.decode("utf-8", "surrogatepass"))
            if found.pop("kind") != KIND:
                return None
            tools, thoughts = found.pop("formats")
            return cls(formats=(tools, thoughts), **found)
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
            return None


class KeptResponse(Struct, frozen=True):
    """A response whose job was found."""

    id: str  # without its prefix
    job: Mapping[str, Any]  # the map of the job
    request: Mapping[str, Any]  # the body of its `submit`
    images: Sequence[bytes]
    note: ResponseNote

    @classmethod
    def of(cls, found: SubmittedJob) -> KeptResponse | None:
        """The response that a job keeps; None if the job was not made by this interface."""
        note, key = ResponseNote.unpacked(found.note), str(found.row["key"])
        prefix = response_id("")
        if note is None or not key.startswith(prefix):
            return None
        return cls(key.removeprefix(prefix), found.row, found.request, found.blobs, note)

    @property
    def frame(self) -> ResponseFrame:
        return ResponseFrame(self.id, self.note.created, self.note.echoed, self.note.summary)

    @property
    def waiting(self) -> str | None:
        """The status of a response that has not ended; None: it has."""
        return WAITING.get(str(self.job["state"]))

    @property
    def stops(self) -> bool:
        """Whether the answer may end at a text of the request's."""
        return bool((self.request.get("options") or {}).get("stop"))

    @property
    def first_number(self) -> int:
        """The number of the first event of this generation."""
        return GENERATION * int(self.job["gen"])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the model was given, without the instructions."""
        given = list(self.request.get("messages") or ())
        return given[1:] if self.note.echoed.get("instructions") else given

    def check_number(self, after: int | None) -> None:
        """Raises HttpError for the number of an event that another generation had."""
        number = 0 if after is None else after
        if after is None or self.first_number <= number < self.first_number + GENERATION:
            return
        raise HttpError(
            409,
            f"starting_after is {after}, and the events of this response are numbered from"
            f" {self.first_number} on: it was begun anew, for its model has changed; read it"
            " without starting_after",
            "job_restarted",
            "starting_after",
            retry=False,
        )


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
