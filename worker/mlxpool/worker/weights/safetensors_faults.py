"""What is wrong with a header that the safetensors library refuses, in words.

The library's own errors name neither the tensor nor its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

MAX_HEADER = 100_000_000  # bytes; the library's bound
LENGTH_BYTES = 8  # in front of the header, which hold its length
MAX_COUNT = 2**63 - 1  # of any size or offset in a header
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16,
    "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


def fault_of(raw: bytes, data_bytes: int) -> str:
    """What is wrong with a header in front of `data_bytes` bytes; "" where nothing is found."""
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
    """What is wrong with the description of one tensor; later parts rely on earlier ones."""
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
    """Tensors that overlap, and bytes of the data that no tensor has."""
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
