"""Fast products of one row with a quantised weight on a Linux CPU.

MLX's products of one row are slow there. OpenBLAS copies the dense weight for each product. MLX's
`quantized_matmul` is compiled to vector instructions only without `transpose`. Then numbers of
several outputs share a scale, but in a checkpoint numbers of one output share a scale. So the
numbers q of a weight are stored again as bytes, column by column, and multiplied without scales.
Each group of inputs is a separate matrix:

    y[n] = sum over groups g of scales[g, n] * (x[g] @ q[g, :, n]) + biases[g, n] * sum(x[g])

The q are numbers around 0, because larger sums would be rounded more. Products with bytes are
faster than products with 4-bit numbers. A second row takes as long as the first, so several rows
are multiplied with the dense weight.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.kernels.cpu_exp import on_linux_cpu
from mlxpool.worker.layers.dense_weights import unpacked
from mlxpool.worker.layers.quantisation import COLUMN_ROWS, byte_columns_bytes
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

MAX_WIDTH = 8192  # the most outputs of a block: their sums fit into the L1 cache of a core
UNIT_WIDTHS = (128, 64, 32)  # group sizes of MLX: the numbers of outputs that can share a scale
ZERO = 128  # the byte that stores the number 0

Bytes = npt.NDArray[np.uint8]


class ByteColumns(Struct, frozen=True):
    """A weight [out, in] with its outputs in blocks of `width`.

    `numbers` are words of four bytes [blocks, groups, inputs of a group, width / 4]; `scales`
    [blocks, groups, width] and `biases` [groups, out] are float32.
    """

    numbers: mx.array
    scales: mx.array
    biases: mx.array

    def takes(self, x: mx.array) -> bool:
        """Returns True if x is one row [1, in] of float32."""
        return x.ndim == 2 and x.shape[0] == 1 and x.dtype == mx.float32

    def __call__(self, x: mx.array) -> mx.array:
        """Multiplies x [1, in] with weight.T -> [1, out]."""
        blocks, groups, size, words = self.numbers.shape
        width = 4 * words
        shared = next(unit for unit in UNIT_WIDTHS if width % unit == 0)
        scale, bias = _units((blocks, groups, size, width // shared))
        parts = x.reshape(1, groups, 1, size)
        sums = mx.quantized_matmul(
            mx.broadcast_to(parts, (blocks, groups, 1, size)),
            self.numbers,
            scale,
            bias,
            transpose=False,
            group_size=shared,
            bits=8,
        )
        scaled = (sums.reshape(self.scales.shape) * self.scales).sum(axis=1)
        return mx.addmm(scaled.reshape(1, -1), parts.sum(axis=-1).reshape(1, -1), self.biases)


def byte_columns(weights: Sequence[QuantisedWeight]) -> ByteColumns | None:
    """Returns weights [out, in] concatenated along `out`; None if this form cannot store them."""
    group = weights[0].layout.group_size
    columns = weights[0].scales.shape[-1] * group
    rows = [weight.weight.shape[-2] for weight in weights]
    for weight, out in zip(weights, rows, strict=True):
        shape = (*weight.weight.shape[:-2], out, columns)
        if not byte_columns_bytes(weight.layout, shape) or weight.factor is not None:
            return None
    if not on_linux_cpu() or any(weight.layout.group_size != group for weight in weights):
        return None
    blocks = _blocks(sum(rows))
    numbers = mx.zeros((blocks, columns, sum(rows) // blocks), mx.uint8)
    mx.eval(numbers)
    target, begin = np.array(numbers, copy=False), 0
    for weight, out in zip(weights, rows, strict=True):
        packed = np.ascontiguousarray(np.array(weight.weight, copy=False)).view(np.uint8)
        _unpack(packed, weight.layout.bits, target, begin)
        begin += out
    words = numbers.view(mx.uint32).reshape(blocks, columns // group, group, -1)
    scales = mx.concatenate([weight.scales for weight in weights]).astype(mx.float32)
    biases = mx.concatenate([_biases_of_centred(weight) for weight in weights])
    converted = ByteColumns(
        words,
        mx.contiguous(scales.reshape(blocks, -1, columns // group).swapaxes(1, 2)),
        mx.contiguous(biases.astype(mx.float32).T),
    )
    mx.eval(converted.numbers, converted.scales, converted.biases)
    return converted


def _biases_of_centred(weight: QuantisedWeight) -> mx.array:
    """Returns the biases [out, groups] for the weight's numbers minus half of their range."""
    assert weight.biases is not None  # weights of mode affine have biases
    biases: mx.array = weight.biases + 2 ** (weight.layout.bits - 1) * weight.scales
    return biases


def _blocks(out: int) -> int:
    """Returns the number of blocks for `out` outputs."""
    units = out // COLUMN_ROWS
    least = -(-out // MAX_WIDTH)
    return next(blocks for blocks in range(least, units + 1) if units % blocks == 0)


def _unpack(packed: Bytes, bits: int, target: Bytes, begin: int) -> None:
    """Writes the numbers of `packed` [rows, bytes] into `target` [blocks, in, width].

    `begin`: the first output in `target`. NumPy releases the GIL meanwhile.
    """
    rows, width = packed.shape[0], target.shape[-1]

    def strip(row: int) -> None:
        block, column = divmod(begin + row, width)
        _unpack_strip(
            packed[row : row + COLUMN_ROWS], bits, target[block, :, column : column + COLUMN_ROWS]
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(strip, range(0, rows, COLUMN_ROWS)):
            pass


def _unpack_strip(packed: Bytes, bits: int, target: Bytes) -> None:
    """Writes the rows of `packed` [rows, bytes] into `target` [in, rows]."""
    numbers = unpacked(packed, bits)
    if bits < 8:
        numbers = numbers + np.uint8(ZERO - 2 ** (bits - 1))
    target[:] = numbers.T


@cache
def _units(shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Returns scales of 1 and biases of -ZERO, with which MLX reads bytes as numbers around 0.

    All weights with the same shape share the arrays.
    """
    units = mx.ones(shape), mx.full(shape, -float(ZERO))
    mx.eval(*units)
    return units
