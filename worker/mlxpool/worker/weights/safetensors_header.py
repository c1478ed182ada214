"""The header of a safetensors file, which the library reads and checks against the file's size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights import wrong_contents
from mlxpool.worker.weights.json_files import require_file
from mlxpool.worker.weights.safetensors_faults import BITS, LENGTH_BYTES, MAX_HEADER, fault_of
from mlxpool.worker.weights.wrong_contents import HEAD_BYTES

MAX_AXES = 32  # of a tensor


class Tensor(Struct, frozen=True):
    """One tensor of a file. `name` is the model's name for it, `stored` the file's."""

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
    """The header of a file; reads no tensor.

    Raises ModelLoadFailed, naming the file and the tensor, where the header is invalid, does not
    agree with the size of the file, or has a tensor of a dtype or with axes that MLX has not.
    """
    raw = _header_bytes(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            described = {
                name: (part.get_dtype(), tuple(part.get_shape()))
                for name in opened.keys()  # noqa: SIM118 - it is no map
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
    """The bytes of the header; raises ModelLoadFailed for a file that ends before its end."""
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
