"""Reads tensors of a GGUF file into MLX arrays, divided into the parts of MLX's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.gguf.architectures import NO_BLOCKS, Architecture
from mlxpool.worker.weights.gguf.blocks import packed_rows
from mlxpool.worker.weights.gguf.header import StoredTensor


class GgufReads:
    """Reads the tensors of a GGUF file; each is read when its first part is taken.

    The parts are the tensors of the MLX layout: weight, scales and biases.
    """

    def __init__(
        self,
        file: Path,
        tensors: Mapping[str, StoredTensor],
        architecture: Architecture,
        config: Mapping[str, Any],
    ) -> None:
        """`tensors`: the tensors in the file's header."""
        self._file, self._architecture, self._config = file, architecture, config
        self._tensors = tensors
        self._parts: dict[str, mx.array] = {}  # parts that were read and not yet taken

    def pop(self, name: str, default: None = None) -> mx.array | None:
        """Takes a part of a tensor; None if the part was already taken or never existed."""
        if name not in self._parts:
            stored, _, _ = name.rpartition(":")
            tensor = self._tensors.get(stored)
            if tensor is not None:
                self._parts.update(self._read(tensor))
        return self._parts.pop(name, default)

    def read(self, name: str, shape: tuple[int, ...], cut: Cut) -> mx.array | None:
        """Takes a slice (`cut`) of the part of this name and shape; reads the whole part.

        Returns None if the part was already taken, never existed, or has another shape.
        """
        whole = self.pop(name)
        if whole is None or whole.shape != shape:
            return None
        part = cut.of(whole)
        mx.eval(part)  # so that `whole` can be freed
        return part

    def _read(self, tensor: StoredTensor) -> dict[str, mx.array]:
        name = self._architecture.name_of(tensor.name) or tensor.name
        rows = self._order(name, tensor)
        layout = tensor.kind.layout
        raw = self._bytes(tensor)
        if layout is None:
            array = _floats(raw, tensor)
            if self._architecture.norms_plus_one and name.endswith("norm.weight"):
                array = array.astype(mx.float32) - 1
            return {f"{tensor.name}:{NO_BLOCKS}": array if rows is None else array[mx.array(rows)]}
        parts = packed_rows(tensor.kind, raw, tensor.shape[-1])
        arrays = {"weight": parts.weight, "scales": parts.scales, "biases": parts.biases}
        lead = tensor.shape[:-1]
        return {
            f"{tensor.name}:{part}": mx.array(
                (array if rows is None else array[rows]).reshape(*lead, -1)
            )
            for part, array in arrays.items()
            if array is not None
        }

    def _bytes(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        try:
            raw = np.fromfile(self._file, np.uint8, tensor.nbytes, offset=tensor.begin)
        except OSError as error:
            raise ModelLoadFailed(f"{self._file} cannot be read: {error}") from error
        if len(raw) < tensor.nbytes:
            raise ModelLoadFailed(f"{self._file} became shorter while it was read; load again")
        return raw

    def _order(self, name: str, tensor: StoredTensor) -> npt.NDArray[np.int64] | None:
        """Returns the order of a rotated weight's rows; None: the rows keep their stored order.

        llama.cpp's RoPE rotates pairs of neighbours in a head; a pair of our RoPE has one number
        from each half of the head.
        """
        heads = self._architecture.heads_of(name, self._config)
        if not heads:
            return None
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ModelLoadFailed(
                f"{self._file}: tensor {tensor.name!r} has {rows} rows, no multiple of twice its"
                f" {heads} heads"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _floats(raw: npt.NDArray[np.uint8], tensor: StoredTensor) -> mx.array:
    dtypes = {"F32": (np.float32, mx.float32), "F16": (np.uint16, mx.float16)}
    stored, dtype = dtypes.get(tensor.kind.dtype, (np.uint16, mx.bfloat16))
    return mx.array(raw.view(stored)).view(dtype).reshape(tensor.shape)
