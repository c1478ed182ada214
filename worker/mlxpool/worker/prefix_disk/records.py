"""The bytes of a segment: a header, then records, each with a key and two checksums. Pure.

A record has named arrays with dtype and shape: the contents of layers for up to BLOCK_TOKENS
inputs, or the states of layers after these inputs. The record's header has the inputs themselves,
which a reader compares. It also has a checksum of its own, so that a scan of a segment need not
read the arrays. Checksums also cover the segment's digest, so a record is valid only in segments of
the same weights, computation and layout. Invalid bytes raise BadRecord; the reader counts them as a
cache miss.

A key is the hash of the previous block's key and of the inputs of its block. So the key identifies
all inputs from the first input on, and their scope. The hash is cryptographic: a client cannot make
two prompts with the same key.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from struct import Struct
from struct import error as StructError
from typing import Any

import msgspec
import xxhash

from mlxpool.worker.prefix_disk.pacing import PIECE

KEY_BYTES = 32
BLOCK_TOKENS = 256  # inputs of a whole block, which begins at a multiple of this number
ID_BYTES = 8  # bytes of a packed input: a token id, or the slot of an image, see media/spans.py
FORMAT = 1  # version of the format; raised with every change of the definitions below
SEGMENT_MAGIC = b"MLXPOOLP"
RECORD_MAGIC = b"kvr1"
ALIGNMENT = 64  # alignment of records and of their arrays, in bytes
MAX_SEGMENT_HEADER = 64 * 1024  # the most bytes of a segment's header
MAX_HEADER = 1024 * 1024  # the most bytes of a record's header; thousands of arrays fit
MAX_PAYLOAD = 2**34  # the most bytes of a record's arrays
MAX_DIMENSIONS = 8

# Bytes of an item of each dtype, by MLX's names; other dtypes are not stored.
ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
}

# Magic, kind, (unused), arrays, inputs, bytes of the header, bytes of the arrays, position of the
# first input, key of the inputs before, own key, checksum of the arrays.
_RECORD = Struct(f"<4sBBHII QQ {KEY_BYTES}s {KEY_BYTES}s 16s")
_SEGMENT = Struct("<8sII")  # magic, format, bytes of the description
_CHECKSUM = 16  # bytes
_SHAPE, _PLACE = Struct("<I"), Struct("<QQ")


class BadRecord(ValueError):
    """Bytes that are not a valid record of this segment."""


class Kind(IntEnum):
    """What the arrays of a record contain."""

    TOKENS = 0  # keys and values of each input
    STATE = 1  # snapshots after the last input


class ArrayPlace(msgspec.Struct, frozen=True):
    """An array of a record: `nbytes` bytes in C order, at `offset` in the record's arrays."""

    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class RecordHeader(msgspec.Struct, frozen=True):
    """The header of a record. `ids`: the packed inputs from index `start` on; the key `parent`
    covers all inputs before.
    """

    kind: Kind
    start: int
    parent: bytes
    key: bytes
    ids: bytes
    arrays: tuple[ArrayPlace, ...]
    payload: int  # bytes of all arrays
    checksum: bytes  # checksum of the arrays
    size: int  # bytes of the header

    @property
    def tokens(self) -> int:
        """The number of inputs."""
        return len(self.ids) // ID_BYTES

    @property
    def end(self) -> int:
        """The index after the record's last input."""
        return self.start + self.tokens

    @property
    def record_bytes(self) -> int:
        """The bytes of header and arrays, without the padding before the next record."""
        return self.size + self.payload


def packed(ids: Sequence[int]) -> bytes:
    """Packs inputs as little-endian 64-bit numbers."""
    numbers = array("Q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(data: bytes) -> tuple[int, ...]:
    """Returns the inputs that `packed` has packed."""
    numbers = array("Q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def root_key(scope: str) -> bytes:
    """Returns the parent key of a sequence's first block, the same for a whole scope."""
    return hashlib.blake2b(b"root:" + scope.encode(), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Returns the key of the packed inputs `ids` that follow the inputs of `parent`."""
    return hashlib.blake2b(parent + ids, digest_size=KEY_BYTES, person=b"block").digest()


def chain(root: bytes, ids: Sequence[int]) -> list[bytes]:
    """Returns the key of each whole block of `ids`, in order.

    A block has BLOCK_TOKENS inputs; an incomplete block at the end has no key.
    """
    keys, key = [], root
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = block_key(key, packed(ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys


def aligned(size: int) -> int:
    """Returns `size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def places_of(arrays: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[ArrayPlace, ...]:
    """Returns the offsets and sizes (places) of arrays with these names, dtypes and shapes.

    Raises ValueError for a dtype that is not stored.
    """
    places, offset = [], 0
    for name, dtype, shape in arrays:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"array {name!r} has the dtype {dtype}, which is not stored")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        places.append(ArrayPlace(name, dtype, shape, offset, nbytes))
        offset = aligned(offset + nbytes)
    return tuple(places)


def payload_bytes(places: Sequence[ArrayPlace]) -> int:
    """Returns the bytes of all arrays, with the padding after each array."""
    return aligned(places[-1].offset + places[-1].nbytes) if places else 0


def encode_header(
    digest: bytes,
    kind: Kind,
    start: int,
    parent: bytes,
    ids: bytes,
    places: Sequence[ArrayPlace],
    checksum: bytes,
) -> bytes:
    """Returns a record's header for these arrays; `checksum`: from `checksum_of`."""
    table = b"".join(map(_encoded_place, places))
    size = aligned(_RECORD.size + len(ids) + len(table) + _CHECKSUM)
    fixed = _RECORD.pack(
        RECORD_MAGIC,
        kind,
        0,
        len(places),
        len(ids) // ID_BYTES,
        size,
        payload_bytes(places),
        start,
        parent,
        block_key(parent, ids),
        checksum,
    )
    body = (fixed + ids + table).ljust(size - _CHECKSUM, b"\0")
    return body + xxhash.xxh3_128_digest(digest + body)


def checksum_of(digest: bytes, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Returns the checksum of a record's arrays; `pieces`: the bytes of the arrays, in order."""
    state = xxhash.xxh3_128(digest)
    for piece in pieces:
        state.update(piece)
    return state.digest()


def pieces_of(whole: memoryview, size: Callable[[], int] = lambda: PIECE) -> Iterator[memoryview]:
    """Yields the bytes of a buffer in pieces; other threads can take the GIL between them.

    `size` returns the most bytes of the next piece.
    """
    at = 0
    while at < len(whole):
        end = at + size()
        yield whole[at:end]
        at = end


def header_size(head: bytes) -> int:
    """Returns the size of the header that begins with these bytes. Raises BadRecord."""
    if len(head) < _RECORD.size:
        raise BadRecord(f"a header of {len(head)} bytes, at least {_RECORD.size} are needed")
    magic, _, _, _, tokens, size, payload, *_ = _RECORD.unpack_from(head)
    if magic != RECORD_MAGIC:
        raise BadRecord(f"a record begins with {magic!r}, must begin with {RECORD_MAGIC!r}")
    if not _RECORD.size + _CHECKSUM <= size <= MAX_HEADER or size % ALIGNMENT:
        raise BadRecord(f"a header claims {size} bytes, at most {MAX_HEADER} are allowed")
    if payload > MAX_PAYLOAD or tokens > BLOCK_TOKENS:
        raise BadRecord(f"a header claims {tokens} inputs and {payload} bytes")
    return int(size)


HEAD_BYTES = _RECORD.size  # the bytes that `header_size` reads


def decode_header(digest: bytes, data: bytes) -> RecordHeader:
    """Decodes the header of a record; `data` is exactly the header. Raises BadRecord."""
    size = header_size(data)
    if len(data) != size:
        raise BadRecord(f"a header has {len(data)} bytes and claims {size}")
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if xxhash.xxh3_128_digest(digest + body) != checksum:
        raise BadRecord("the checksum of a header is wrong")
    _, kind, _, count, tokens, _, payload, start, parent, key, check = _RECORD.unpack_from(data)
    ids_end = _RECORD.size + tokens * ID_BYTES
    ids = data[_RECORD.size : ids_end]
    try:
        places = _decoded_places(body, ids_end, count, payload)
        return RecordHeader(Kind(kind), start, parent, key, ids, places, payload, check, size)
    except (StructError, ValueError, IndexError) as error:
        raise BadRecord(f"the table of arrays is wrong: {error}") from None


def check_payload(digest: bytes, header: RecordHeader, payload: bytes | memoryview) -> None:
    """Raises BadRecord unless `payload` has the size and the checksum in the header."""
    if len(payload) != header.payload:
        raise BadRecord(f"the arrays have {len(payload)} bytes, must have {header.payload}")
    if checksum_of(digest, pieces_of(memoryview(payload))) != header.checksum:
        raise BadRecord("the checksum of the arrays is wrong")


def _encoded_place(place: ArrayPlace) -> bytes:
    name, dtype = place.name.encode(), place.dtype.encode()
    shape = b"".join(map(_SHAPE.pack, place.shape))
    sizes = bytes([len(name), len(dtype), len(place.shape)])
    return sizes + name + dtype + shape + _PLACE.pack(place.offset, place.nbytes)


def _decoded_places(data: bytes, at: int, count: int, payload: int) -> tuple[ArrayPlace, ...]:
    places = []
    for _ in range(count):
        name_bytes, dtype_bytes, dimensions = data[at], data[at + 1], data[at + 2]
        at += 3
        name = data[at : at + name_bytes].decode()
        at += name_bytes
        dtype = data[at : at + dtype_bytes].decode()
        at += dtype_bytes
        if dimensions > MAX_DIMENSIONS or dtype not in ITEM_BYTES:
            raise ValueError(f"array {name!r} has {dimensions} dimensions and the dtype {dtype!r}")
        shape = tuple(_SHAPE.unpack_from(data, at + 4 * n)[0] for n in range(dimensions))
        at += 4 * dimensions
        offset, nbytes = _PLACE.unpack_from(data, at)
        at += _PLACE.size
        if nbytes != math.prod(shape) * ITEM_BYTES[dtype] or offset + nbytes > payload:
            raise ValueError(f"array {name!r} of shape {shape} has {nbytes} bytes at {offset}")
        places.append(ArrayPlace(name, dtype, shape, offset, nbytes))
    return tuple(places)


def encode_segment_header(digest: bytes, about: Mapping[str, Any]) -> bytes:
    """Returns the header of a segment; `about`: a readable description of the digest."""
    text = json.dumps({**about, "digest": digest.hex()}, sort_keys=True).encode()
    size = aligned(_SEGMENT.size + len(text) + _CHECKSUM)
    body = (_SEGMENT.pack(SEGMENT_MAGIC, FORMAT, len(text)) + text).ljust(size - _CHECKSUM, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def segment_header_size(head: bytes) -> int:
    """Returns the size of the segment's header that begins with these bytes. Raises BadRecord."""
    if len(head) < _SEGMENT.size:
        raise BadRecord(f"a segment of {len(head)} bytes, at least {_SEGMENT.size} are needed")
    magic, form, text = _SEGMENT.unpack_from(head)
    if magic != SEGMENT_MAGIC:
        raise BadRecord(f"a segment begins with {magic!r}, must begin with {SEGMENT_MAGIC!r}")
    if form != FORMAT:
        raise BadRecord(f"a segment has the format {form}, this version reads {FORMAT}")
    if text > MAX_SEGMENT_HEADER:
        raise BadRecord(f"the description of a segment claims {text} bytes")
    return aligned(_SEGMENT.size + text + _CHECKSUM)


def decode_segment_header(data: bytes) -> dict[str, Any]:
    """Returns the description in a segment's header; `data` is exactly the header.

    Raises BadRecord.
    """
    size = segment_header_size(data)
    body, checksum = data[: size - _CHECKSUM], data[size - _CHECKSUM :]
    if len(data) != size or xxhash.xxh3_128_digest(body) != checksum:
        raise BadRecord("the checksum of a segment's header is wrong")
    text = _SEGMENT.unpack_from(data)[2]
    try:
        about = json.loads(data[_SEGMENT.size : _SEGMENT.size + text])
    except ValueError as error:
        raise BadRecord(f"the description of a segment is no JSON: {error}") from None
    if not isinstance(about, dict) or not isinstance(about.get("digest"), str):
        raise BadRecord("the description of a segment has no digest")
    return about


def digest_of(about: Mapping[str, Any]) -> bytes:
    """Returns the digest in the description of a segment. Raises BadRecord."""
    try:
        digest = bytes.fromhex(about["digest"])
    except ValueError:
        raise BadRecord("the digest of a segment is no hexadecimal number") from None
    if len(digest) != KEY_BYTES:
        raise BadRecord(f"the digest of a segment has {len(digest)} bytes")
    return digest
