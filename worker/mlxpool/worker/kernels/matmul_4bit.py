"""Products of few lines with affine weights of 4 bits, which take as long as reading these."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, LANES, Constant, kernel, warps_of, works
from mlxpool.worker.kernels.matmul_small import INPUTS, PLAIN, Around, few, sums_of

BITS = 4
GROUPS = (32, 64)
MOST_LINES = 32
COLUMNS = 128  # of a weight, that a warp takes at a time
ROWS = 16  # of a weight, that are a tile
TILES = (4, 2, 1)  # of a thread block: with more, lines are read less often
SUMS = 8  # tiles times sets of eight lines, whose sums a thread has room for
BLOCKS = 120  # thread blocks that keep a large GPU busy
FLIGHT = 48 * 1024  # bytes that a thread block has asked for at a time
MOST_STAGES = 8
MOST_WARPS = 8  # with more, a thread has too few registers


@cache
def serves(lines: int, rows: int, columns: int, group: int, dtype: mx.Dtype) -> bool:
    """Whether `product` takes so many lines and a weight [rows, columns] here; it is tried once."""
    if not 0 < lines <= MOST_LINES or dtype not in HALVES or group not in GROUPS:
        return False
    return rows % (2 * ROWS) == 0 and columns % COLUMNS == 0 and _works(group, dtype)


def product(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    group: int,
    around: Around = PLAIN,
) -> mx.array:
    """x [T, in] and a weight [out, in / 8] in uint32 -> x @ numbers.T [T, out].

    scales and biases [out, in / group] are of x's dtype.
    """
    lines, columns = x.shape
    sets, rows = -(-lines // 8), weight.shape[0]
    tiles, warps = tiles_of(rows, sets, around.gated), warps_of(columns // COLUMNS, MOST_WARPS)
    threads = warps * LANES
    found: list[mx.array] = _kernel(sets, warps, tiles, group, x.dtype, *around.constants.items())(
        inputs=[x, weight, scales, biases, *around.inputs(x)],
        grid=(rows // (ROWS * tiles) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, rows // (1 + around.gated))],
        output_dtypes=[x.dtype],
    )
    return found[0]


def tiles_of(rows: int, sets: int, gated: bool) -> int:
    """Of a thread block: as many as leave work for all; gates and what they gate have their own."""
    fitting = [n for n in TILES if rows % (ROWS * n) == 0 and n * sets <= SUMS and n > gated]
    return next((n for n in fitting if rows // (ROWS * n) >= BLOCKS), fitting[-1])


@cache
def _kernel(
    sets: int, warps: int, tiles: int, group: int, dtype: mx.Dtype, *around: tuple[str, Constant]
) -> Any:
    words = warps * LANES * tiles * 2 * 16
    scales = warps * tiles * 2 * ROWS * (COLUMNS // group) * 2
    stages = max(2, min(MOST_STAGES, FLIGHT // (words + scales)))
    constants: dict[str, Constant] = {
        "SETS": sets,
        "WARPS": warps,
        "TILES": tiles,
        "GROUP": group,
        "STAGES": stages,
        "N": dtype,
        **dict(around),
    }
    shared = max(stages * (words + scales), sums_of(sets, warps, tiles))
    inputs = ["x", "weight", "scales", "biases", *INPUTS]
    end = "warp_sums.cuh"
    return kernel("matmul_4bit", inputs, ["out"], constants, whole=True, shared=shared, end=end)


@cache
def _works(group: int, dtype: mx.Dtype) -> bool:
    return works("products with weights of 4 bits", lambda: _right(group, dtype))


def _right(group: int, dtype: mx.Dtype) -> bool:
    columns = 4 * MOST_WARPS * COLUMNS
    numbers = mx.random.normal((64, columns), key=mx.random.key(1)).astype(dtype) * columns**-0.5
    weight = mx.quantize(numbers, group_size=group, bits=BITS)
    x = mx.random.normal((3, columns), key=mx.random.key(2)).astype(dtype)
    opened = mx.dequantize(*weight, group_size=group, bits=BITS).T
    right = mx.allclose(product(x, *weight, group), x @ opened, 0.02, 0.1)
    if few(x):
        gain, beside = 1 + numbers[0], x[:, :64]
        around = Around(gain=gain, eps=1e-5, beside=beside)
        normed = mx.fast.rms_norm(x, gain, 1e-5) @ opened + beside
        right = right & mx.allclose(product(x, *weight, group, around), normed, 0.02, 0.2)
    return bool(right.item())
