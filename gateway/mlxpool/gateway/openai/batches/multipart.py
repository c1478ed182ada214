"""Reads multipart/form-data piece by piece. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from email.message import Message
from urllib.parse import unquote

from msgspec import Struct

from mlxpool.gateway.errors import HttpError, bad_request

FORM_DATA = "multipart/form-data"
MAX_HEADERS = 8 * 1024  # bytes of the headers of a part
MAX_PREAMBLE = 8 * 1024  # bytes before the first part
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;]+))')


class PartBegin(Struct, frozen=True):
    """A part begins; `filename` is None unless it is a file."""

    name: str
    filename: str | None


class PartData(Struct, frozen=True):
    """Bytes of the part that began last."""

    data: bytes


class PartEnd(Struct, frozen=True):
    """The part that began last is whole."""


Event = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content type names. Raises HttpError for another type."""
    parsed = Message()
    parsed["content-type"] = content_type
    boundary = parsed.get_param("boundary")
    if parsed.get_content_type() != FORM_DATA or not isinstance(boundary, str) or not boundary:
        message = f"content-type must be {FORM_DATA} with a boundary, got {content_type!r:.80}"
        raise HttpError(415, message, "unsupported_media_type", retry=False)
    return boundary.encode("latin-1", "replace")


class MultipartReader:
    """Takes a body in pieces of any size; holds no more than a piece and a boundary of it."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # so that the first boundary is like the others
        self._step = self._preamble
        self.complete = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events of the next bytes. Raises HttpError for what is no multipart body."""
        self._held += data
        while not self.complete:
            events = self._step()
            if events is None:
                return
            yield from events

    def _preamble(self) -> list[Event] | None:
        found = self._held.find(self._mark)
        if found < 0:
            if len(self._held) > MAX_PREAMBLE:
                raise _fault("no part begins with the boundary that the content type names")
            return None
        del self._held[: found + len(self._mark)]
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
        found = self._held.find(self._mark)
        if found < 0:
            sure = len(self._held) - len(self._mark) + 1
            if sure <= 0:
                return None
            data = bytes(self._held[:sure])
            del self._held[:sure]
            return [PartData(data)] if data else None
        data = bytes(self._held[:found])
        del self._held[: found + len(self._mark)]
        self._step = self._behind_mark
        return [*([PartData(data)] if data else []), PartEnd()]


def _part_of(headers: str) -> PartBegin:
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            given = {key: quoted or plain for key, quoted, plain in _PARAMETER.findall(value)}
            if "name" in given:
                return PartBegin(given["name"], _filename(given))
    raise _fault("a part has no Content-Disposition with a name")


def _filename(given: Mapping[str, str]) -> str | None:
    """The name of a file, which some clients encode as RFC 5987 has it; None: it is no file."""
    encoded = given.get("filename*")
    return given.get("filename") if encoded is None else unquote(encoded.split("'", 2)[-1])


def _fault(message: str) -> HttpError:
    return bad_request(f"the body is no {FORM_DATA}: {message}", code="not_multipart")
