"""Encodes and decodes MLXP/1, the protocol between clients, broker and workers.

A message is `[header][body?][blob*]`; `Bounds` limits its parts and bytes. The header is a msgpack
array `[1, kind, id, epoch, attempt, pos]`, the body a msgpack map with string keys, blobs are raw
bytes. docs/protocol.md describes every kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import msgpack
from msgspec import Struct, field

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest, PoolError, TooLarge, VersionMismatch
from mlxpool.common.protocol.images import MAX_IMAGE, MAX_IMAGE_TOTAL, MAX_IMAGES
from mlxpool.common.protocol.unicode_text import not_unicode

MAX_HEADER = 128  # bytes
MAX_BODY = 256 * 1024
MAX_BACK_BODY = 2 * MAX_BODY  # between broker and worker: `work` has a request with all its options
MAX_BLOB = 4 * 1024 * 1024  # the most bytes of a text or of token ids
MAX_TOTAL = 8 * 1024 * 1024  # the most bytes of a message without images


class Bounds(Struct, frozen=True):
    """The bounds of a message: its number of parts, bytes of one blob, and bytes of all parts."""

    parts: int = 4
    blob: int = MAX_BLOB
    total: int = MAX_TOTAL


PLAIN = Bounds()
WITH_IMAGES = Bounds(PLAIN.parts + MAX_IMAGES, MAX_IMAGE, MAX_TOTAL + MAX_IMAGE_TOTAL)
BY_KIND: Mapping[str, Bounds] = {
    "generate": WITH_IMAGES,
    "job_request": WITH_IMAGES,
    "submit": WITH_IMAGES,
    "work": WITH_IMAGES,
}
MAX_PARTS = WITH_IMAGES.parts  # the most parts of a message of any kind
# Twice the largest legal frame. libzmq closes the connection without an answer if a frame is
# larger. So a frame that is somewhat too large still arrives, and is answered with `too_large`.
MAX_FRAME = 2 * MAX_IMAGE


def bounds_of(kind: str) -> Bounds:
    """Returns the bounds of the messages of a kind."""
    return BY_KIND.get(kind, PLAIN)


__all__ = ["MAX_BACK_BODY", "MAX_BLOB", "MAX_BODY", "MAX_FRAME", "MAX_PARTS", "MAX_TOTAL"]

VERSION = 1
MAX_DEPTH = 32  # the most nested maps and lists
TEXT_AS_BLOB = 64 * 1024  # a prompt of more bytes is sent as a blob
ID_BYTES = 16
HEADER_FIELDS = 6
MAX_NUMBER = 2**63 - 1
EXACT_BITS = 53  # bits of random numbers: JSON readers with doubles hold them exactly


class Header(Struct, frozen=True):
    """The header of a message.

    `epoch` is the worker's epoch between broker and worker, and the broker's boot number between
    broker and client. Between broker and client, `attempt` counts how often the client has sent
    this id; between broker and worker, it is the number of a run, which the broker assigns. `pos`
    is the index of the message's first token id in the completion. In a message that ends a stream,
    `pos` is the number of ids sent before.
    """

    kind: str
    id: bytes | None = None
    epoch: int = 0
    attempt: int = 0
    pos: int = 0


class Message(Struct, frozen=True):
    """One decoded message."""

    header: Header
    body: dict[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes, ...] = ()

    @property
    def kind(self) -> str:
        return self.header.kind


class Garbage(PoolError):
    """A message violates the protocol.

    `error` is the error to answer with; `about` is the id of the message, or None.
    """

    code = "bad_request"

    def __init__(self, error: PoolError, about: bytes | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.about = about


def encode(
    header: Header,
    body: Mapping[str, Any] | None = None,
    blobs: Sequence[bytes] = (),
    *,
    max_body: int = MAX_BODY,
) -> list[bytes]:
    """Returns the parts of a message.

    Raises TooLarge with the size and the bound, and BadRequest naming a value that msgpack cannot
    hold.
    """
    head = msgpack.packb(
        [VERSION, header.kind, header.id, header.epoch, header.attempt, header.pos]
    )
    parts = [head]
    if body is not None or blobs:
        parts.append(_pack(body or {}))
    parts.extend(blobs)
    _check_sizes(header.kind, parts, max_body)
    return parts


def _pack(body: Mapping[str, Any]) -> bytes:
    try:
        return bytes(msgpack.packb(body, use_bin_type=True))
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequest(
            f"the message cannot be sent: {_culprit(body, '', MAX_DEPTH) or error}"
        ) from None


def _culprit(value: Any, path: str, depth: int) -> str:
    """Returns the path of the first value that msgpack cannot hold, and the reason; "" if none."""
    if isinstance(value, Mapping | list | tuple):
        if depth == 0:
            return f"{re.split(r'[.[]', path)[0]} is nested deeper than {MAX_DEPTH}"
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            if isinstance(value, Mapping) and not isinstance(key, str | bytes):
                return f"{path or 'the body'} has the key {shown(key)}, keys are text"
            if isinstance(key, str) and (fault := not_unicode({key: None}, path)):
                return fault
            inside = f"{path}[{key}]" if isinstance(value, list | tuple) else f"{path}.{key}"
            if fault := _culprit(entry, inside if path else str(key), depth - 1):
                return fault
        return ""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"{path} is {shown(value)}, an integer has at most 64 bits"
    if isinstance(value, str) and (fault := not_unicode(value, path)):
        return fault
    known = isinstance(value, str | bytes | bytearray | int | float | None)
    return "" if known else f"{path} is of the type {type(value).__name__}, which has no place here"


def decode(parts: Sequence[bytes], *, max_body: int = MAX_BODY) -> Message:
    """Returns the message that `encode` split into these parts. Raises Garbage if it is malformed.

    `max_body` is above MAX_BODY only on the socket of workers, which are authenticated by a token.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        about = header_of(parts)
        error = BadRequest(f"a message has 1 to {MAX_PARTS} parts, got {len(parts)}")
        raise Garbage(error, None if about is None else about.id)
    header = _decode_header(parts[0])
    try:
        _check_sizes(header.kind, parts, max_body)
        body = _unpack(parts[1]) if len(parts) > 1 else {}
        if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
            raise BadRequest("the body must be a map with string keys")
        if max_body == MAX_BODY:
            check_shape(body, MAX_DEPTH)
    except PoolError as error:
        raise Garbage(error, header.id) from None
    return Message(header, body, tuple(parts[2:]))


def header_of(parts: Sequence[bytes]) -> Header | None:
    """Returns the header of a message, without decoding its body; None if it is malformed."""
    try:
        return _decode_header(parts[0]) if parts else None
    except Garbage:
        return None


@lru_cache(maxsize=256)  # fast path: a worker's frames all have the same header
def _decode_header(part: bytes) -> Header:
    if len(part) > MAX_HEADER:
        raise Garbage(TooLarge(f"the header has {len(part)} bytes, at most {MAX_HEADER}"))
    try:
        fields = _unpack(part)
    except PoolError as error:
        raise Garbage(error) from None
    if not isinstance(fields, list) or not fields or not _is_count(fields[0]):
        raise Garbage(BadRequest("the header must be [1, kind, id, epoch, attempt, pos]"))
    if fields[0] != VERSION:
        raise Garbage(
            VersionMismatch(
                f"the message is of protocol version {fields[0]}, this side speaks {VERSION}",
                details={"version": VERSION},
            )
        )
    if len(fields) < HEADER_FIELDS:
        raise Garbage(BadRequest(f"the header has {len(fields)} fields, must have {HEADER_FIELDS}"))
    _, kind, request_id, epoch, attempt, pos = fields[:HEADER_FIELDS]
    if not isinstance(kind, str) or not all(map(_is_count, (epoch, attempt, pos))):
        raise Garbage(BadRequest("header: kind must be a string, epoch, attempt, pos counts"))
    if request_id is not None and not (
        isinstance(request_id, bytes) and len(request_id) == ID_BYTES
    ):
        raise Garbage(BadRequest(f"header: id must be nil or {ID_BYTES} bytes"))
    return Header(kind, request_id, epoch, attempt, pos)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def check_shape(value: Any, depth: int) -> None:
    """Raises BadRequest for a value with more than `depth` nested maps and lists, or a timestamp.

    A deeper value cannot be printed safely. Timestamps are checked here, because msgpack does not
    call the hook for extension types for them.
    """
    if isinstance(value, msgpack.Timestamp):
        raise BadRequest("ext type -1 is not part of the protocol")
    if isinstance(value, dict | list):
        if depth == 0:
            raise BadRequest(f"the body is nested deeper than {MAX_DEPTH}")
        for entry in value.values() if isinstance(value, dict) else value:
            check_shape(entry, depth - 1)


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"ext type {code} is not part of the protocol")


def _unpack(part: bytes) -> Any:
    try:
        return msgpack.unpackb(part, raw=False, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        fault = _text_fault(part) if isinstance(error, UnicodeDecodeError) else ""
        why = fault or f"not msgpack: {type(error).__name__}: {str(error)[:100]}"
        raise BadRequest(why) from None


def _text_fault(part: bytes) -> str:
    """Returns the position of half a surrogate pair in a part; "" if the part has another fault."""
    try:
        value = msgpack.unpackb(
            part, raw=False, strict_map_key=True, unicode_errors="surrogatepass",
            ext_hook=_no_extension,
        )  # fmt: skip
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
        return ""
    return not_unicode(value)


def _check_sizes(kind: str, parts: Sequence[bytes], max_body: int) -> None:
    bounds = bounds_of(kind)
    if len(parts) > bounds.parts:
        raise BadRequest(
            f"a message of the kind {kind!r:.40} has 1 to {bounds.parts} parts, got {len(parts)}"
        )
    if len(parts) > 1 and len(parts[1]) > max_body:
        raise TooLarge(
            f"the body has {len(parts[1])} bytes, at most {max_body}: messages and options must"
            " be shorter; only prompts and token ids can be sent as blobs, which may be longer"
        )
    for blob in parts[2:]:
        if len(blob) > bounds.blob:
            raise TooLarge(f"a blob has {len(blob)} bytes, at most {bounds.blob}")
    total, most = sum(map(len, parts)), bounds.total + max_body - MAX_BODY
    if total > most:
        raise TooLarge(f"the message has {total} bytes, at most {most}")


# ---- contents ---------------------------------------------------------------------------------


class Content:
    """Base of every typed message. A subclass is a frozen record of the message's fields.

    Messages that are also received have a method `parse`, which makes the record from a body and
    its blobs. Unknown keys are ignored.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def body(self) -> dict[str, Any] | None:
        """Returns the body for msgpack: by default the fields by their names.

        If the body is None, only the header is sent.
        """
        return {name: getattr(self, name) for name in getattr(self, "__struct_fields__", ())}

    def blobs(self) -> tuple[bytes, ...]:
        """Returns the raw parts after the body."""
        return ()


def encoded(
    content: Content,
    id: bytes | None = None,
    epoch: int = 0,
    attempt: int = 0,
    pos: int = 0,
    *,
    max_body: int = MAX_BODY,
) -> list[bytes]:
    """Returns the parts of a message with this content. Raises the errors of `encode`."""
    header = Header(content.kind, id, epoch, attempt, pos)
    return encode(header, content.body(), content.blobs(), max_body=max_body)


# ---- stored values -------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Returns the bytes of a value of maps, lists, texts, bytes and numbers."""
    return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass"))


def unpack(data: bytes) -> Any:
    """Returns the value of bytes that `pack` made. Raises ValueError for other bytes."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
