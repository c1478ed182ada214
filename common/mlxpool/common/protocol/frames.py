"""MLXP/1, the protocol between clients, broker and workers: the only file that knows bytes.

A message is `[header][body?][blob*]`, at most MAX_PARTS parts. The header is a msgpack array
`[1, kind, id, epoch, attempt, pos]`, the body a msgpack map with string keys, blobs are raw bytes.
docs/protocol.md describes every kind.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from mlxpool.common.errors import BadRequest, PoolError, TooLarge, VersionMismatch

VERSION = 1
MAX_PARTS = 4
MAX_HEADER = 128  # bytes
MAX_BODY = 256 * 1024
MAX_BACK_BODY = 2 * MAX_BODY  # between broker and worker: a request, its options filled in
MAX_BLOB = 4 * 1024 * 1024
MAX_TOTAL = 8 * 1024 * 1024
MAX_DEPTH = 32  # of maps and lists in each other
# Twice the largest legal frame: libzmq answers anything larger by cutting the link without a word,
# so what is only somewhat too large has to arrive here to be answered `too_large`.
MAX_FRAME = 2 * MAX_BLOB
TEXT_AS_BLOB = 64 * 1024  # a prompt of more bytes travels as a blob
ID_BYTES = 16
HEADER_FIELDS = 6
MAX_NUMBER = 2**63 - 1

# front: client -> broker
GENERATE, CANCEL, ACK, PING = "generate", "cancel", "ack", "ping"
MODELS, TOKENIZE, DETOKENIZE = "models", "tokenize", "detokenize"
# front: broker -> client
ACCEPTED, DELTA, DELTAS, DONE, ERROR = "accepted", "delta", "deltas", "done", "error"
FATE, PONG, TOKENS = "fate", "pong", "tokens"
# back: worker -> broker
HELLO, BEAT, CREDIT, YIELD, BYE = "hello", "beat", "credit", "yield", "bye"
# back: broker -> worker
WELCOME, HEARD, WHO, WORK, DRAIN, STOP = "welcome", "heard", "who", "work", "drain", "stop"
# admin: the one kind that is answered more than once
WATCH = "watch"


@dataclass(frozen=True, slots=True)
class Header:
    """`epoch`: the worker's epoch on the back socket, the broker's boot number on the front.

    `attempt` counts the sendings of an id. `pos` is the index of the first token id of the frame in
    the completion; in a terminal, the number of ids sent before it.
    """

    kind: str
    id: bytes | None = None
    epoch: int = 0
    attempt: int = 0
    pos: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One decoded message."""

    header: Header
    body: dict[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes, ...] = ()

    @property
    def kind(self) -> str:
        return self.header.kind


class Delta(NamedTuple):
    """What one step adds to one stream: an entry of `deltas`. A tuple, for there are many.

    `ids` holds the new token ids as bytes (see `pack_ids`). `end` is the body of the terminal that
    comes with them; `end["code"]` is set when it is an error.
    """

    id: bytes
    attempt: int
    pos: int
    text: str
    ids: bytes
    logprobs: list[Any] | None = None
    facts: dict[str, Any] | None = None
    end: dict[str, Any] | None = None

    @property
    def n(self) -> int:
        """Number of ids."""
        return len(self.ids) // 4


class Garbage(PoolError):
    """Not a message of this protocol; `error` is what to answer, `id` whom it is about."""

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
    """The parts of a message.

    Raises TooLarge with the size and the bound, BadRequest naming what msgpack cannot hold.
    """
    head = msgpack.packb(
        [VERSION, header.kind, header.id, header.epoch, header.attempt, header.pos]
    )
    parts = [head]
    if body is not None or blobs:
        parts.append(_pack(body or {}))
    parts.extend(blobs)
    _check_sizes(parts, max_body)
    return parts


def _pack(body: Mapping[str, Any]) -> bytes:
    try:
        return bytes(msgpack.packb(body, use_bin_type=True))
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequest(f"cannot be sent: {_culprit(body, '') or error}") from error


def _culprit(value: Any, path: str) -> str:
    """The first thing in it that msgpack cannot hold, and why; "" when there is none."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        inner = (_culprit(entry, f"{path}.{key}" if path else str(key)) for key, entry in entries)
        return next(filter(None, inner), "")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"{path} is {value!r:.60}, an integer has at most 64 bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeError as error:
            return f"{path} is not Unicode text: {error}"
    known = isinstance(value, str | bytes | bytearray | int | float | None)
    return "" if known else f"{path} is of the type {type(value).__name__}, which has no place here"


def decode(parts: Sequence[bytes], *, max_body: int = MAX_BODY) -> Message:
    """Undo `encode`. Raises Garbage for everything that is not a legal message.

    `max_body` above MAX_BODY is for the back socket, whose peers hold a token.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise Garbage(BadRequest(f"a message has 1 to {MAX_PARTS} parts, got {len(parts)}"))
    header = _decode_header(parts[0])
    try:
        _check_sizes(parts, max_body)
        body = _unpack(parts[1]) if len(parts) > 1 else {}
        if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
            raise BadRequest("the body must be a map with string keys")
        if max_body == MAX_BODY:
            _check_shape(body, MAX_DEPTH)
    except PoolError as error:
        raise Garbage(error, header.id) from None
    return Message(header, body, tuple(parts[2:]))


def header_of(parts: Sequence[bytes]) -> Header | None:
    """The header alone of what is not to be decoded; None when it has none."""
    try:
        return _decode_header(parts[0]) if parts else None
    except Garbage:
        return None


@lru_cache(maxsize=256)  # a worker's frames all have the same header
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


def _check_shape(value: Any, depth: int) -> None:
    """What is nested too deep cannot even be printed safely; msgpack makes times by itself."""
    if isinstance(value, msgpack.Timestamp):
        raise BadRequest("ext type -1 is not part of the protocol")
    if isinstance(value, dict | list):
        if depth == 0:
            raise BadRequest(f"the body is nested deeper than {MAX_DEPTH}")
        for entry in value.values() if isinstance(value, dict) else value:
            _check_shape(entry, depth - 1)


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"ext type {code} is not part of the protocol")


def _unpack(part: bytes) -> Any:
    try:
        return msgpack.unpackb(part, raw=False, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise BadRequest(f"not msgpack: {type(error).__name__}: {str(error)[:100]}") from None


def _check_sizes(parts: Sequence[bytes], max_body: int) -> None:
    if len(parts) > 1 and len(parts[1]) > max_body:
        raise TooLarge(
            f"the body has {len(parts[1])} bytes, at most {max_body};"
            " send long prompts and token ids as blobs"
        )
    for blob in parts[2:]:
        if len(blob) > MAX_BLOB:
            raise TooLarge(f"a blob has {len(blob)} bytes, at most {MAX_BLOB}")
    total, most = sum(map(len, parts)), MAX_TOTAL + max_body - MAX_BODY
    if total > most:
        raise TooLarge(f"the message has {total} bytes, at most {most}")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32. Raises BadRequest for what is no u32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError, ValueError):
        raise BadRequest(f"token ids must be integers from 0 to {2**32 - 1}{_wrong(ids)}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _wrong(ids: Any) -> str:
    """Which of them is none."""
    every = enumerate(ids if isinstance(ids, list | tuple) else ())
    wrong = ((at, one) for at, one in every if not isinstance(one, int) or not 0 <= one < 2**32)
    at, one = next(wrong, (None, ids))
    return f", got {one!r:.60}" + ("" if at is None else f" at {at}")


def unpack_ids(blob: bytes) -> list[int]:
    """Undo `pack_ids`. Raises BadRequest for a length that is no multiple of 4."""
    if len(blob) % 4:
        raise BadRequest(f"a blob of token ids has {len(blob)} bytes, must be a multiple of 4")
    ids = array("I", blob)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def pack_deltas(deltas: Sequence[Delta]) -> tuple[dict[str, Any], bytes]:
    """Body and blob of a `deltas` message: trailing absent fields of an entry are left out."""
    return {"rows": [_pack_row(delta) for delta in deltas]}, b"".join(d.ids for d in deltas)


ROW_BYTES = 512  # an entry without its text, ids, log-probabilities
LOGPROB_BYTES = 96  # one reported token


def size_of_logprobs(logprobs: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that reported tokens take at most."""
    return LOGPROB_BYTES * sum(1 + len(entry.get("top", ())) for entry in logprobs)


def size_of(delta: Delta) -> int:
    """Bytes that a delta takes at most, its text counted as its longest encoding."""
    size = 4 * len(delta.text) + len(delta.ids)
    if delta.logprobs:
        size += size_of_logprobs(delta.logprobs)
    if delta.end:
        size += 4 * len(delta.end.get("text", ""))
    return size


def batches(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """The deltas in groups that each fit one message."""
    group: list[Delta] = []
    size = 0
    for delta in deltas:
        more = ROW_BYTES + size_of(delta)
        if group and size + more > MAX_BODY:
            yield group
            group, size = [], 0
        group.append(delta)
        size += more
    if group:
        yield group


def _pack_row(delta: Delta) -> list[Any]:
    row = [delta.id, delta.attempt, delta.pos, delta.text, len(delta.ids) // 4]
    if delta.logprobs is None and delta.facts is None and delta.end is None:
        return row
    rest = [delta.logprobs, delta.facts, delta.end]
    while rest[-1] is None:
        rest.pop()
    return [*row, *rest]


def unpack_deltas(message: Message) -> list[Delta]:
    """Undo `pack_deltas`. Raises BadRequest for a malformed entry or a blob that does not fit."""
    rows = message.body.get("rows")
    blob = message.blobs[0] if message.blobs else b""
    if not isinstance(rows, list):
        raise BadRequest("deltas: rows must be a list")
    deltas, start = [], 0
    for row in rows:  # the hot path of broker and client: as few calls as can be
        if type(row) is not list or not 5 <= len(row) <= 8:
            raise BadRequest("deltas: a row has 5 to 8 fields")
        if len(row) < 8:
            row = (*row, None, None, None)[:8]
        request_id, attempt, pos, text, count, logprobs, facts, end = row
        if not (
            type(request_id) is bytes
            and len(request_id) == ID_BYTES
            and type(text) is str
            and type(attempt) is type(pos) is type(count) is int
            and attempt >= 0
            and pos >= 0
            and count >= 0
        ):
            raise BadRequest(
                "deltas: a row is [id, attempt, pos, text, n, logprobs?, facts?, end?]"
            )
        after = start + 4 * count
        ids = blob[start:after]
        if len(ids) != after - start:
            raise BadRequest(f"deltas: a row of {count} ids finds only {len(ids) // 4} in the blob")
        if not (
            (logprobs is None or type(logprobs) is list)
            and (facts is None or type(facts) is dict)
            and (end is None or type(end) is dict)
        ):
            raise BadRequest("deltas: logprobs must be a list, facts and end maps")
        start = after
        deltas.append(_tuple(Delta, (request_id, attempt, pos, text, ids, logprobs, facts, end)))
    if start != len(blob):
        raise BadRequest(f"deltas: the rows name {start // 4} ids, the blob has {len(blob) / 4:g}")
    return deltas


_tuple = tuple.__new__  # half the time of Delta's own


# What may differ between two sendings of one request.
_PER_SENDING = frozenset({"resume", "deadline_ms", "queue_ms", "first_token_ms", "window", "batch"})


def request_digest(body: Mapping[str, Any], blobs: Sequence[bytes]) -> bytes:
    """What makes two `generate` messages the same request: 16 bytes, equal for every sending."""
    kept = {key: body[key] for key in sorted(body) if key not in _PER_SENDING}
    digest = hashlib.sha256(msgpack.packb(kept, use_bin_type=True))
    prompts = int(body.get("prompt") is True or body.get("tokens") is True)
    for blob in blobs[:prompts]:  # what follows is the blob of `resume`
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    return digest.digest()[:16]
