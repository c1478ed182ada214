"""The tensors of a GGUF file as a checkpoint's header lists them, by our names. No MLX, no numpy.

A weight in blocks is listed as the tensors that its layout has: `weight`, `scales` and `biases`.
A tensor's `stored` name is llama.cpp's, a colon, and the part.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlxpool.worker.weights.gguf.architectures import Architecture
from mlxpool.worker.weights.gguf.header import GgufHeader, StoredTensor
from mlxpool.worker.weights.safetensors_header import Header, Tensor

WHOLE = "whole"  # the part of a tensor that is in no blocks


def as_checkpoint(header: GgufHeader, architecture: Architecture) -> Header:
    """The header of a file with the tensors that are used, or are unknown."""
    tensors: dict[str, Tensor] = {}
    for stored in header.tensors.values():
        name = architecture.name_of(stored.name)
        if name is None:
            continue
        module = name.removesuffix(".weight")
        for part, dtype, shape in _parts(stored, architecture.scales):
            full = name if part == WHOLE else f"{module}.{part}"
            tensors[full] = Tensor(full, dtype, shape, header.file, f"{stored.name}:{part}")
    return Header(header.raw, tensors, {})


def _parts(stored: StoredTensor, scales: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The parts of a tensor, with the dtype and the shape of each."""
    layout = stored.kind.layout
    if layout is None:
        yield WHOLE, stored.kind.dtype, stored.shape
        return
    floats = scales if layout.mode == "affine" else "U8"
    for part, shape in layout.tensors(stored.shape):
        yield part, "U32" if part == "weight" else floats, shape
