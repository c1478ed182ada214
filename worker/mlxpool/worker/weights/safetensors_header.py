"""Reads the header of a safetensors file and checks it against the file's size."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.json_files import require_file

MAX_HEADER = 100 * 2**20  # bytes; the bound of the format
MAX_AXES = 32  # of a tensor
MAX_COUNT = 2**63 - 1  # of any size or offset in a header
_LENGTH = 8  # bytes in front of the header, which hold its length
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
    "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file; `begin` and `end` are offsets behind the header.

    `name` is the model's name for it, `stored` the file's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path
    stored: str

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its bytes, its tensors by name, and its metadata."""

    raw: bytes
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """The checked header of a file.

    Raises ModelLoadFailed, naming the file and the tensor, where the header is invalid or does not
    agree with the size of the file.
    """
    raw = _header_bytes(file)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelLoadFailed(f"{file}: the header is a {type(entries).__name__}, must be a map")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ModelLoadFailed(f"{file}: __metadata__ is a {type(metadata).__name__}, must be a map")
    data_bytes = file.stat().st_size - _LENGTH - len(raw)
    tensors = {name: _tensor(file, name, entry, data_bytes) for name, entry in entries.items()}
    _refuse_overlap(file, tensors)
    return Header(raw, tensors, {key: str(value) for key, value in metadata.items()})


def _header_bytes(file: Path) -> bytes:
    require_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(_LENGTH)
        if head[:4] == b"GGUF":
            raise ModelLoadFailed(f"{file}: this is a GGUF file under another name")
        if len(head) < _LENGTH:
            raise ModelLoadFailed(f"{file}: truncated: {size} bytes, too few for a header")
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER:
            raise ModelLoadFailed(
                f"{file}: the header claims {length} bytes, at most {MAX_HEADER} are allowed"
            )
        if length > size - _LENGTH:
            raise ModelLoadFailed(
                f"{file}: truncated: the header claims {length} bytes, the file has {size}; "
                "download it again"
            )
        return stream.read(length)


def _tensor(file: Path, name: str, entry: Any, data_bytes: int) -> Tensor:
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ModelLoadFailed(f"{where} is described by {entry!r}, must be a map")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelLoadFailed(f"{where} has dtype {dtype!r}, known are {', '.join(_BITS)}")
    if not _are_counts(shape):
        raise ModelLoadFailed(f"{where} has shape {shape!r}, must be a list of whole numbers")
    if len(shape) > MAX_AXES:
        raise ModelLoadFailed(f"{where} has {len(shape)} axes, at most {MAX_AXES} are allowed")
    begin, end = _span(where, entry.get("data_offsets"), data_bytes)
    needed = math.prod(shape) * _BITS[dtype] // 8
    if end - begin != needed:
        raise ModelLoadFailed(
            f"{where} has {end - begin} bytes, its shape {shape} of {dtype} needs {needed}"
        )
    return Tensor(name, dtype, tuple(shape), begin, end, file, name)


def _span(where: str, offsets: Any, data_bytes: int) -> tuple[int, int]:
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelLoadFailed(f"{where} has data_offsets {offsets!r}, must be [begin, end]")
    if offsets[1] > data_bytes:
        raise ModelLoadFailed(
            f"{where} ends at byte {offsets[1]} of the data, the file has {data_bytes}: "
            "it is truncated, download it again"
        )
    return offsets[0], offsets[1]


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_COUNT for item in value
    )


def _refuse_overlap(file: Path, tensors: dict[str, Tensor]) -> None:
    ordered = sorted((t for t in tensors.values() if t.nbytes), key=lambda tensor: tensor.begin)
    for before, after in itertools.pairwise(ordered):
        if after.begin < before.end:
            raise ModelLoadFailed(
                f"{file}: tensors {before.name!r} and {after.name!r} overlap: "
                f"{before.begin}..{before.end} and {after.begin}..{after.end}"
            )
