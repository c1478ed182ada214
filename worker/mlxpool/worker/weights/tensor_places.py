"""Where the tensors of a safetensors file are in it, and their dtypes in MLX."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.safetensors_faults import LENGTH_BYTES

DTYPES = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
}


class Place(Struct, frozen=True):
    """The bytes [begin, end) of a file that are a tensor."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorPlaces:
    """The places of a file's tensors, as its header has them now."""

    def __init__(self, file: Path) -> None:
        """Raises ModelLoadFailed where the header cannot be read."""
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
                self._header: Mapping[str, Mapping[str, Any]] = json.loads(opened.read(length))
        except (OSError, ValueError) as error:
            raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
        self._start = LENGTH_BYTES + length

    def find(self, name: str) -> Place | None:
        """The place of a tensor; None where there is none of this name, or of no known dtype."""
        found = self._header.get(name) if name != "__metadata__" else None
        if found is None or found["dtype"] not in DTYPES:
            return None
        dtype, shape = DTYPES[found["dtype"]], tuple(found["shape"])
        begin, end = found["data_offsets"]
        if end - begin != math.prod(shape) * dtype.size:
            return None
        return Place(dtype, shape, self._start + begin, self._start + end)
