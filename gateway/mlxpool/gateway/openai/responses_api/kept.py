"""Responses that the pool keeps as jobs: what is noted with a job, and what is made of it. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.client.jobs import SubmittedJob
from mlxpool.common.protocol.kept.job_messages import MAX_NOTE
from mlxpool.common.records import as_map
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.event_numbers import GENERATION
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame, response_id

KIND = "response"
MAX_UNPACKED = 16 * 1024 * 1024  # bytes of a note
WAITING = {"waiting": "queued", "running": "in_progress"}  # state of the job -> of the response


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
