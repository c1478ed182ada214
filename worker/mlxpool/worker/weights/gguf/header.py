"""Reads the header of a GGUF file: metadata and positions of tensors. No MLX, no numpy.

llama.cpp's own package makes an object for each number of each list, which takes 15 seconds for a
vocabulary of 262,144 tokens. This module takes a few tenths of a second and bounds its reads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.gguf.block_types import BLOCK_TYPES, UNREAD_TYPES, BlockType
from mlxpool.worker.weights.json_files import MAX_FILE_BYTES, require_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32  # bytes
_CHUNK = 4 * 2**20  # bytes of one read
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class StoredTensor(Struct, frozen=True):
    """A tensor of a file: `shape` has rows before columns, `begin` is the offset in the file."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return math.prod(self.shape) // self.kind.numbers * self.kind.nbytes


class GgufHeader(Struct, frozen=True):
    """The header of a file: its bytes, its metadata, and its tensors in the order of the file."""

    file: Path
    raw: bytes
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_gguf_header(file: Path) -> GgufHeader:
    """Returns the header of a GGUF file; reads no tensor.

    Raises ModelLoadFailed with the file and the fault: another format or version, a truncated file,
    or a tensor of an unknown type.
    """
    require_file(file)
    try:
        with file.open("rb") as stream:
            return _read(file, _Cursor(file, stream, file.stat().st_size))
    except OSError as error:
        raise ModelLoadFailed(f"{file} cannot be read: {error.strerror or error}") from error


def _read(file: Path, cursor: _Cursor) -> GgufHeader:
    magic = cursor.take(min(len(MAGIC), cursor.size))
    if magic != MAGIC:
        raise ModelLoadFailed(
            f"{file} is no GGUF file: it begins with {magic!r}, must begin with {MAGIC!r}"
        )
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "is big-endian" if swapped else f"has version {version} of GGUF"
        raise ModelLoadFailed(f"{file} {what}, read are versions 2 and 3, little-endian")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text()
        metadata[key] = cursor.value(key)
    infos = [_tensor_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0:
        raise ModelLoadFailed(f"{file} has general.alignment {alignment!r}, must be above 0")
    start = -(-cursor.at // alignment) * alignment
    stored: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in infos:
        if name in stored:
            raise ModelLoadFailed(f"{file} has two tensors named {name!r}")
        stored[name] = _stored(file, cursor.size, name, kind, shape, start + offset)
    return GgufHeader(file, bytes(cursor.data[: cursor.at]), metadata, stored)


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Returns the name, type, shape and offset of a tensor."""
    name, axes = cursor.text(), cursor.number("I")
    if not 1 <= axes <= MAX_AXES:
        raise ModelLoadFailed(
            f"{cursor.file}: tensor {name!r:.80} has {axes} axes, must have 1 to {MAX_AXES}"
        )
    sizes = [cursor.number("Q") for _ in range(axes)]
    return name, cursor.number("I"), tuple(reversed(sizes)), cursor.number("Q")


def _stored(
    file: Path, size: int, name: str, kind: int, shape: tuple[int, ...], begin: int
) -> StoredTensor:
    where = f"{file}: tensor {name!r:.80}"
    block = BLOCK_TYPES.get(kind)
    if block is None:
        known = ", ".join(block_type.name for block_type in BLOCK_TYPES.values())
        shown = UNREAD_TYPES.get(kind, f"number {kind}")
        raise ModelLoadFailed(
            f"{where} is of the type {shown}, which is not read; take a file with types of {known}"
        )
    if not math.prod(shape) or shape[-1] % block.numbers:
        raise ModelLoadFailed(
            f"{where} has shape {list(shape)}, rows of {block.name} are whole blocks of"
            f" {block.numbers}"
        )
    tensor = StoredTensor(name, block, shape, begin)
    if begin + tensor.nbytes > size:
        raise ModelLoadFailed(
            f"{where} ends at byte {begin + tensor.nbytes}, the file has {size}: it is cut short;"
            " download it again"
        )
    return tensor


class _Cursor:
    """Reads values one after the other; `data[:at]` are the bytes of the values so far."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.data, self.at = bytearray(), 0
        self._stream = stream

    def _require(self, count: int) -> int:
        """Reads until `count` more bytes are in `data`; returns the index of the first of these."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            self._read_to(end)
        self.at = end
        return begin

    def _read_to(self, end: int) -> None:
        if end > self.size:
            raise ModelLoadFailed(
                f"{self.file}: its header goes on to byte {end}, the file has {self.size}: it is"
                " cut short; download it again"
            )
        if end > MAX_FILE_BYTES:
            raise ModelLoadFailed(
                f"{self.file}: its header has more than {MAX_FILE_BYTES} bytes, the most that are"
                " read"
            )
        self.data += self._stream.read(max(end - len(self.data), _CHUNK))
        if end > len(self.data):
            raise ModelLoadFailed(f"{self.file} became shorter while it was read")

    def take(self, count: int) -> bytes:
        begin = self._require(count)
        return bytes(self.data[begin : begin + count])

    def number(self, kind: str) -> Any:
        part = _STRUCTS[kind]
        return part.unpack_from(self.data, self._require(part.size))[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Returns the next `count` texts; makes few calls, because a vocabulary has many texts."""
        texts, data, size_at, at = [], self.data, _STRUCTS["Q"].unpack_from, self.at
        for _ in range(count):
            begin = at + 8
            if begin > len(data):
                self._read_to(begin)
            at = begin + size_at(data, at)[0]
            if at > len(data):
                self._read_to(at)
            texts.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return texts

    def value(self, key: str) -> Any:
        kind, count = self.number("I"), None
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.text() if count is None else self.texts(count)
        if kind not in _SCALARS:
            raise ModelLoadFailed(
                f"{self.file}: {key!r:.80} of the metadata is of the type {kind}, which is unknown"
            )
        scalar = _SCALARS[kind]
        if count is None:
            return self.number(scalar)
        begin = self._require(struct.calcsize(scalar) * count)
        return list(struct.unpack_from(f"<{count}{scalar}", self.data, begin))


_STRUCTS = {kind: struct.Struct(f"<{kind}") for kind in _SCALARS.values()}
