"""Reads the header of a safetensors file, and finds the faults in it.

The safetensors library checks the header against the file's size. The library's own errors name
neither the tensor nor its bytes; `fault_of` names both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights import wrong_contents
from mlxpool.worker.weights.json_files import require_file
from mlxpool.worker.weights.wrong_contents import HEAD_BYTES

MAX_HEADER = 100_000_000  # the most bytes of a header, as in the library
LENGTH_BYTES = 8  # bytes of the length before the header
MAX_COUNT = 2**63 - 1  # the largest size or offset in a header
MAX_AXES = 32  # the most axes of a tensor
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
    "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


class Tensor(Struct, frozen=True):
    """A stored tensor; `name`: its name in the model, `stored`: its name in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    stored: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class Header(Struct, frozen=True):
    """The header of a file: its bytes, its tensors by name, and its metadata."""

    raw: bytes
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Returns the header of a file; reads no tensor.

    Raises ModelLoadFailed, with the file and the tensor, if the header is invalid, contradicts the
    size of the file, or has a tensor whose dtype or number of axes MLX lacks.
    """
    raw = _header_bytes(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            described = {
                name: (part.get_dtype(), tuple(part.get_shape()))
                for name in opened.keys()  # noqa: SIM118 - it is not a map
                for part in (opened.get_slice(name),)
            }
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        data_bytes = file.stat().st_size - LENGTH_BYTES - len(raw)
        raise ModelLoadFailed(f"{file}: {fault_of(raw, data_bytes) or error}") from error
    return Header(
        raw,
        {name: _tensor(file, name, dtype, shape) for name, (dtype, shape) in described.items()},
        metadata,
    )


def _header_bytes(file: Path) -> bytes:
    """Returns the bytes of the header; raises ModelLoadFailed for a truncated header."""
    require_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        if fault := wrong_contents.fault_of(head, size):
            raise ModelLoadFailed(f"{file} {fault}")
        if len(head) < LENGTH_BYTES:
            raise ModelLoadFailed(f"{file}: truncated: {size} bytes, too few for a header")
        length = int.from_bytes(head[:LENGTH_BYTES], "little")
        if length > MAX_HEADER:
            raise ModelLoadFailed(
                f"{file}: the header claims {length} bytes, at most {MAX_HEADER} are allowed"
            )
        if length > size - LENGTH_BYTES:
            raise ModelLoadFailed(
                f"{file}: truncated: the header claims {length} bytes, the file has {size}; "
                "download it again"
            )
        stream.seek(LENGTH_BYTES)
        return stream.read(length)


def _tensor(file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    where = f"{file}: tensor {name!r}"
    if dtype not in BITS:
        raise ModelLoadFailed(f"{where} has dtype {dtype!r}, known are {', '.join(BITS)}")
    if len(shape) > MAX_AXES:
        raise ModelLoadFailed(f"{where} has {len(shape)} axes, at most {MAX_AXES} are allowed")
    return Tensor(name, dtype, shape, file, name)


def fault_of(raw: bytes, data_bytes: int) -> str:
    """Returns the fault of a safetensors header; "" if it is valid.

    `data_bytes`: the bytes of tensors after the header.
    """
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return f"the header is not JSON: {error}"
    if not isinstance(entries, dict):
        return f"the header is a {type(entries).__name__}, must be a map"
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict | None):
        return f"__metadata__ is a {type(metadata).__name__}, must be a map"
    for key, value in (metadata or {}).items():
        if not isinstance(value, str):
            return f"__metadata__ has {value!r:.60} for {key!r:.60}, must be text"
    for name, entry in entries.items():
        for fault in _tensor_faults(entry, data_bytes):
            return f"tensor {name!r} {fault}"
    return next(_gaps(entries, data_bytes), "")


def _tensor_faults(entry: Any, data_bytes: int) -> Iterator[str]:
    """Yields the faults of one tensor's entry.

    Only the first fault is reliable: it may make later checks fail or raise.
    """
    if not isinstance(entry, dict):
        yield f"is described by {entry!r}, must be a map"
        return
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        yield f"has dtype {dtype!r}, known are {', '.join(BITS)}"
    if not _are_counts(shape):
        yield f"has shape {shape!r}, must be a list of whole numbers"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        yield f"has data_offsets {offsets!r}, must be [begin, end]"
    begin, end = offsets
    if end > data_bytes:
        yield (
            f"ends at byte {end} of the data, the file has {data_bytes}: "
            "it is truncated, download it again"
        )
    needed = math.prod(shape) * BITS[dtype] // 8
    if end - begin != needed:
        yield f"has {end - begin} bytes, its shape {shape} of {dtype} needs {needed}"


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_COUNT for item in value
    )


def _gaps(entries: dict[str, Any], data_bytes: int) -> Iterator[str]:
    """Yields faults: tensors that overlap, and bytes of the data without a tensor."""
    last, covered = "", [0, 0]
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin < covered[1]:
            yield (
                f"tensors {last!r} and {name!r} overlap: "
                f"{covered[0]}..{covered[1]} and {begin}..{end}"
            )
        if begin > covered[1]:
            yield f"tensor {name!r} begins at byte {begin} of the data, {covered[1]} are in use"
        last, covered = name, [begin, end]
    if covered[1] < data_bytes:
        yield f"the tensors have {covered[1]} bytes of data, the file has {data_bytes}"
