"""Makes dense weights from dense or quantised weights, in the memory order that the device needs.

A device multiplies faster with weights in this order. On a CPU a quantised weight is dequantised in
parts of some rows, in reused memory: writing to new memory takes longer than dequantising.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

Weight = mx.array | QuantisedWeight  # [out, in]
Read = Callable[[slice], np.ndarray]  # returns some rows of a weight in float32

STRIP_ROWS = 16  # rows of a strip: in float32 a strip's column fills whole cache lines
STRIP_NUMBERS = 2**16  # approximate count of numbers in a dequantised strip


def dense(weight: Weight, dtype: mx.Dtype) -> mx.array:
    """Returns the weight [..., out, in], dequantised if it is quantised."""
    if not isinstance(weight, QuantisedWeight):
        return weight
    if weight.weight.ndim > 2 or not _in_strips(dtype):
        whole = weight.dequantised(dtype)
        mx.eval(whole)
        return whole
    whole = mx.zeros(_shape(weight), dtype=dtype)
    mx.eval(whole)
    target = np.array(whole, copy=False)  # a view of the array, not a copy

    def write(rows: slice, strip: np.ndarray) -> None:
        target[rows] = strip

    _write_strips([weight], write)
    return whole


def laid_out(weights: Sequence[Weight], dtype: mx.Dtype) -> mx.array:
    """Returns weights concatenated along `out`; column-major on a CPU, see `to_column_major`."""
    if not on_gpu():
        return to_column_major(weights, dtype)
    whole = [dense(weight, dtype) for weight in weights]
    return concatenated(whole, axis=0)


def concatenated(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Returns the arrays concatenated along an axis, already evaluated."""
    if len(arrays) == 1:
        return arrays[0]
    whole = mx.concatenate(list(arrays), axis=axis)
    mx.eval(whole)
    return whole


def to_column_major(weights: Sequence[Weight], dtype: mx.Dtype) -> mx.array:
    """Returns weights concatenated along `out`, in column-major order.

    Small products on the CPU read this order faster. MLX transposes a matrix one number at a time,
    ten times slower than a file is read. Several threads that transpose strips of rows are as fast
    as reading: a strip fits into a core's L1 cache.
    """
    if not _in_strips(dtype) or any(_dtype(weight, dtype) != dtype for weight in weights):
        columns = mx.contiguous(mx.concatenate([dense(weight, dtype) for weight in weights]).T)
        mx.eval(columns)
        return columns.T
    rows = sum(_shape(weight)[0] for weight in weights)
    columns = mx.zeros((_shape(weights[0])[1], rows), dtype=dtype)
    mx.eval(columns)
    target = np.array(columns, copy=False)

    def transpose(rows: slice, strip: np.ndarray) -> None:
        for row in range(0, len(strip), STRIP_ROWS):
            some = strip[row : row + STRIP_ROWS]
            begin = rows.start + row
            target[:, begin : begin + len(some)] = some.T

    _write_strips(weights, transpose)
    return columns.T


def _in_strips(dtype: mx.Dtype) -> bool:
    return dtype == mx.float32 and not on_gpu()


def _dtype(weight: Weight, dtype: mx.Dtype) -> mx.Dtype:
    return dtype if isinstance(weight, QuantisedWeight) else weight.dtype


def _shape(weight: Weight) -> tuple[int, int]:
    if not isinstance(weight, QuantisedWeight):
        return weight.shape[0], weight.shape[1]
    rows, words = weight.weight.shape
    return rows, words * weight.weight.dtype.size * 8 // weight.layout.bits


def _write_strips(weights: Sequence[Weight], write: Callable[[slice, np.ndarray], None]) -> None:
    """Calls `write` for each strip of rows, with the strip's range of rows and its numbers.

    Several threads call `write`; NumPy releases the GIL meanwhile. Returns after the last call.
    """
    begin = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for weight in weights:
            rows, columns = _shape(weight)
            read = _reader(weight)
            step = max(1, STRIP_NUMBERS // columns // STRIP_ROWS) * STRIP_ROWS
            parts = [slice(at, min(at + step, rows)) for at in range(0, rows, step)]

            def work(part: slice, read: Read = read, begin: int = begin) -> None:
                write(slice(begin + part.start, begin + part.stop), read(part))

            for _ in pool.map(work, parts):
                pass
            begin += rows


def _reader(weight: Weight) -> Read:
    """Returns a function that reads rows of the weight in float32; several threads may call it."""
    if not isinstance(weight, QuantisedWeight):
        mx.eval(weight)
        view = np.array(weight, copy=False)
        return lambda rows: view[rows]
    scales, biases = weight.scales, weight.biases
    if biases is None or weight.factor is not None or scales.dtype != mx.float32:
        return _reader(_whole(weight))
    return _PackedRows(weight.weight, scales, biases, weight.layout.bits).read


def _whole(weight: QuantisedWeight) -> mx.array:
    whole = weight.dequantised(mx.float32)
    mx.eval(whole)
    return whole


class _PackedRows:
    """The rows of a weight in the affine layout."""

    def __init__(self, weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> None:
        mx.eval(weight, scales, biases)
        self._weight = np.array(weight, copy=False).view(np.uint8)
        self._scales = np.array(scales, copy=False)[:, :, None]
        self._biases = np.array(biases, copy=False)[:, :, None]
        self._bits = bits

    def read(self, rows: slice) -> np.ndarray:
        """Returns these rows in float32 [rows, columns], equal to MLX's dequantised rows."""
        scales = self._scales[rows]
        numbers = unpacked(self._weight[rows], self._bits).reshape(*scales.shape[:2], -1)
        dequantised = np.multiply(numbers, scales, dtype=np.float32)
        dequantised += self._biases[rows]
        whole: np.ndarray = dequantised.reshape(len(dequantised), -1)
        return whole


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Returns bytes [n, m] as numbers [n, 8 * m / bits] of `bits` bits, the lowest bits first."""
    if bits == 8:
        return packed
    if bits == 4:
        pairs = packed.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        return pairs.view(np.uint8)
    words = np.zeros(packed.size // bits, dtype=np.uint64)  # words with eight numbers each
    for index, column in enumerate(packed.reshape(-1, bits).T):
        words |= column.astype(np.uint64) << np.uint64(8 * index)
    numbers = np.empty((len(words), 8), dtype=np.uint8)
    for index in range(8):
        numbers[:, index] = words >> np.uint64(bits * index)
    numbers &= np.uint8(2**bits - 1)
    return numbers.reshape(len(packed), -1)
