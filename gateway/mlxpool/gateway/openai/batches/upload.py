"""Copies an upload in pieces from a form to a file of the pool, without holding it in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from email.message import Message
from typing import Any
from urllib.parse import unquote

from msgspec import Struct
from starlette.requests import Request

from mlxpool.gateway.content_encoding import decoded
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.openai.batches.bodies import UPLOADED
from mlxpool.gateway.openai.batches.fields import EXPIRY, FORM, MAX_FILE, MAX_KEEP, MIN_KEEP
from mlxpool.gateway.openai.batches.kept import FileWriter, KeptFiles

FORM_DATA = "multipart/form-data"
MAX_HEADERS = 8 * 1024  # most bytes of the headers of a part
MAX_PREAMBLE = 8 * 1024  # most bytes before the first part
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;]+))')
MAX_FIELD = 4096  # most bytes of a field that is not a file
MAX_NAME = 255  # most characters of the name of a file
EXPIRES = "expires_after"


class PartBegin(Struct, frozen=True):
    """A part begins; `filename` is None unless the part is a file."""

    name: str
    filename: str | None


class PartData(Struct, frozen=True):
    """Bytes of the part that began last."""

    data: bytes


class PartEnd(Struct, frozen=True):
    """The part that began last is complete."""


Event = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary in a content type. Raises HttpError for another type."""
    parsed = Message()
    parsed["content-type"] = content_type
    boundary = parsed.get_param("boundary")
    if parsed.get_content_type() != FORM_DATA or not isinstance(boundary, str) or not boundary:
        message = f"content-type must be {FORM_DATA} with a boundary, got {content_type!r:.80}"
        raise HttpError(415, message, "unsupported_media_type", retry=False)
    return boundary.encode("latin-1", "replace")


class MultipartReader:
    """Parses a body in pieces of any size; buffers at most a piece and a boundary."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # makes the first boundary like all later boundaries
        self._step = self._preamble
        self.complete = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yields the events of the next bytes.

        Raises HttpError if the bytes are not a multipart body.
        """
        self._held += data
        while not self.complete:
            events = self._step()
            if events is None:
                return
            yield from events

    def _preamble(self) -> list[Event] | None:
        place = self._held.find(self._mark)
        if place < 0:
            if len(self._held) > MAX_PREAMBLE:
                raise _fault("no part begins with the boundary that the content type names")
            return None
        del self._held[: place + len(self._mark)]
        self._step = self._behind_mark
        return []

    def _behind_mark(self) -> list[Event] | None:
        if len(self._held) < 2:
            return None
        following = bytes(self._held[:2])
        if following not in (b"--", b"\r\n"):
            raise _fault("a boundary is not followed by a line end")
        self.complete = following == b"--"
        del self._held[:2]
        self._step = self._headers
        return []

    def _headers(self) -> list[Event] | None:
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > MAX_HEADERS:
                raise _fault(f"the headers of a part have more than {MAX_HEADERS} bytes")
            return None
        begin = _part_of(bytes(self._held[:end]).decode("utf-8", "replace"))
        del self._held[: end + 4]
        self._step = self._data
        return [begin]

    def _data(self) -> list[Event] | None:
        place = self._held.find(self._mark)
        if place < 0:
            sure = len(self._held) - len(self._mark) + 1
            if sure <= 0:
                return None
            data = bytes(self._held[:sure])
            del self._held[:sure]
            return [PartData(data)] if data else None
        data = bytes(self._held[:place])
        del self._held[: place + len(self._mark)]
        self._step = self._behind_mark
        return [*([PartData(data)] if data else []), PartEnd()]


def _part_of(headers: str) -> PartBegin:
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = {key: quoted or plain for key, quoted, plain in _PARAMETER.findall(value)}
            if "name" in parameters:
                return PartBegin(parameters["name"], _filename(parameters))
    raise _fault("a part has no Content-Disposition with a name")


def _filename(parameters: Mapping[str, str]) -> str | None:
    """Returns the name of a file, perhaps encoded by RFC 5987; None if the part is not a file."""
    encoded = parameters.get("filename*")
    return parameters.get("filename") if encoded is None else unquote(encoded.split("'", 2)[-1])


def _fault(message: str) -> HttpError:
    return bad_request(f"the body is no {FORM_DATA}: {message}", code="not_multipart")


class Upload:
    """One upload, whose parts come in any order.

    `run` returns when the file is on the disk.
    """

    def __init__(self, files: KeptFiles, key: str, silence: float) -> None:
        """`silence`: seconds without a byte after which the upload is given up."""
        self._files = files
        self._key = key
        self._silence = silence
        self._fields: dict[str, str] = {}
        self._field: str | None = None  # the field that is read; None for the file
        self._writer: FileWriter | None = None
        self._in_file = False

    async def run(self, request: Request) -> None:
        """Copies the file of the request's form into the pool.

        Raises HttpError, PoolError, ClientDisconnect, and then leaves no file.
        """
        reader = MultipartReader(boundary_of(request.headers.get("content-type", "")))
        try:
            async for data in _pieces(request, self._silence):
                for event in reader.feed(data):
                    if isinstance(event, PartBegin):
                        self._begin(event)
                    elif isinstance(event, PartData):
                        await self._data(event.data)
                    else:
                        self._field, self._in_file = None, False
            if not reader.complete:
                raise bad_request("the form ends before its last boundary", code="not_multipart")
            await self._finish()
        except BaseException:
            if self._writer is not None:
                await self._writer.discard()
            raise

    def _begin(self, part: PartBegin) -> None:
        name = part.name.removesuffix("[]")
        if name.partition("[")[0] not in FORM.names:
            FORM.check({name: ""})
        if name != "file":
            self._field = name
            self._fields[name] = ""
            return
        if self._writer is not None:
            raise bad_request("the form has several files: send each by itself", "file")
        if part.filename is None:
            raise bad_request("'file' must be a file, with a filename", "file")
        if "purpose" in self._fields:
            self._check_purpose()
        shown = "".join(char for char in part.filename if char.isprintable())[:MAX_NAME]
        self._in_file = True
        self._writer = FileWriter(self._files, self._key, UPLOADED, shown)

    async def _data(self, data: bytes) -> None:
        if self._in_file and self._writer is not None:
            if self._writer.size + len(data) > MAX_FILE:
                message = (
                    f"the file has more than {MAX_FILE} bytes, which is the bound: divide it into"
                    " several batches"
                )
                raise HttpError(413, message, "file_too_large", "file", retry=False)
            return await self._writer.add(data)
        if self._field is not None:
            text = self._fields[self._field] + data.decode("utf-8", "replace")
            if len(text) > MAX_FIELD:
                raise bad_request(f"{self._field!r} has more than {MAX_FIELD} bytes", self._field)
            self._fields[self._field] = text

    async def _finish(self) -> None:
        if self._writer is None:
            raise bad_request("'file' is missing", "file")
        if not self._writer.size:
            raise bad_request("the file is empty", "file")
        self._check_purpose()
        await self._writer.finish(self._keep())

    def _check_purpose(self) -> None:
        purpose = self._fields.get("purpose")
        if purpose != UPLOADED:
            got = "missing" if purpose is None else repr(purpose[:60])
            message = f"'purpose' is {got}: only {UPLOADED!r} is supported"
            raise bad_request(message, "purpose")

    def _keep(self) -> float | None:
        """Returns the seconds until the file expires; None means the pool's settings decide."""
        prefix = f"{EXPIRES}["
        expiry_fields: dict[str, Any] = {
            name.removeprefix(prefix).rstrip("]"): value
            for name, value in self._fields.items()
            if name.startswith(prefix)
        }
        if expiry_fields.get("seconds", "").isdecimal():
            expiry_fields["seconds"] = int(expiry_fields["seconds"])
        return expiry({EXPIRES: expiry_fields} if expiry_fields else {}, EXPIRES)


def expiry(body: Mapping[str, Any], name: str) -> float | None:
    """Returns the seconds of a field like `expires_after`; None without it. Raises HttpError."""
    expires = body.get(name)
    if expires is None:
        return None
    if not isinstance(expires, Mapping):
        raise bad_request(f"{name!r} must be a map with anchor and seconds", name)
    EXPIRY.check(expires, f"{name}.")
    if expires.get("anchor") != "created_at":
        raise bad_request(f"'{name}.anchor' must be created_at", f"{name}.anchor")
    seconds = expires.get("seconds")
    if type(seconds) is not int or not MIN_KEEP <= seconds <= MAX_KEEP:
        message = f"'{name}.seconds' must be from {MIN_KEEP} to {MAX_KEEP}"
        raise bad_request(message, f"{name}.seconds")
    return float(seconds)


async def _pieces(request: Request, silence: float) -> AsyncIterator[bytes]:
    pieces = decoded(request.stream(), request.headers.getlist("content-encoding"))
    while True:
        try:
            async with asyncio.timeout(silence):
                data = await anext(pieces, None)
        except TimeoutError:
            message = f"no byte of the upload came for {silence:g} s"
            raise HttpError(408, message, "body_too_slow", retry=False) from None
        if data is None:
            return
        yield data
