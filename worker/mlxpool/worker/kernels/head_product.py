"""Products of each head of a step's tokens with the head's own weight, in Hopper's tensor cores.

MLX's batched products cost the host some 20 us, and need arrays [heads, tokens, ...]: two more
copies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
)
from mlxpool.worker.kernels.matmul_tiled import (
    COLUMNS,
    FEWER_ROWS,
    ROWS,
    SHARED_ALIGNMENT,
    group_mma,
    tile_of_rows,
)

INPUTS = ("x", "weight", "cosines", "sines")
SETS = (1, 2, 4, 8, 16)  # numbers of sets of 8 tokens with a kernel
VECTOR = 8  # numbers in 16 bytes
MIN_STAGES, MAX_STAGES = 3, 6


@cache
def supports(columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Returns whether `product` supports weights [heads, rows, columns] on this device.

    The first call for a dtype tries the kernel.
    """
    fits = columns % COLUMNS == 0 == rows % FEWER_ROWS and dtype in HALF_DTYPES
    return fits and _works(dtype)


def product(x: mx.array, weight: mx.array, turns: RopeTables | None = None) -> mx.array:
    """Returns x [T, heads, in] times the weight [heads, out, in] of each head: [T, heads, out].

    With `turns`, a head of x has more than `in` numbers. The further numbers are rotated, and
    follow the head's products in the result.
    """
    lines, heads, size = x.shape
    _, out, columns = weight.shape
    turned = size - columns
    assert turned == 0 or (turns is not None and turned == 2 * turns.cosines.shape[-1])
    sets = next((n for n in SETS if 8 * n >= lines), SETS[-1])
    rows = _tile_rows(sets, out)
    blocks, threads = heads * (out // rows + (turned > 0)), 2 * rows
    traditional = turns is not None and turns.traditional
    outputs: list[mx.array] = _kernel(heads, columns, out, turned, traditional, sets, x.dtype)(
        inputs=[x, weight, *((None, None) if turns is None else (turns.cosines, turns.sines))],
        grid=(blocks * threads, -(-lines // (8 * sets)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, heads, out + turned)],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


def _tile_rows(sets: int, out: int) -> int:
    """Returns a thread block's weight rows: fewer for few tokens, to use more thread blocks."""
    return FEWER_ROWS if sets < SETS[-1] or out % ROWS else ROWS


@cache
def _kernel(
    heads: int, columns: int, out: int, turned: int, traditional: bool, sets: int, dtype: mx.Dtype
) -> Any:
    rows, lines, steps = _tile_rows(sets, out), 8 * sets, columns // COLUMNS
    stages = max(MIN_STAGES, min(MAX_STAGES, steps + 2)) if sets < SETS[-1] else MIN_STAGES
    constants: dict[str, Constant] = {
        "HEADS": heads,
        "IN": columns,
        "OUT": out,
        "X_HEAD": columns + turned,
        "OUT_HEAD": out + turned,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "SETS": sets,
        "STAGES": stages,
        "N": dtype,
    }
    stage = (rows + lines) * COLUMNS * 2
    sums = lines * (rows + 1) * 4
    return build_kernel(
        "head_product",
        INPUTS,
        ["out"],
        constants,
        contiguous=True,
        shared=max(stages * stage, sums) + SHARED_ALIGNMENT,
        header=tile_of_rows(rows) + group_mma(sets, dtype) + include_line("tiled_product.cuh"),
    )


@cache
def _works(dtype: mx.Dtype) -> bool:
    return kernel_works("products of heads", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns True if a product and rotated numbers equal NumPy's.

    Unlike MLX's operations, NumPy needs no compilation.
    """
    lines, heads, columns, half, rng = 11, 2, 2 * COLUMNS, 8, np.random.default_rng(1)
    x, weight = (
        mx.array(rng.normal(size=size).astype(np.float32)).astype(dtype)
        for size in ((lines, heads, columns + 2 * half), (heads, FEWER_ROWS, columns))
    )
    angles = rng.uniform(0, 6, (lines, 1, half)).astype(np.float32)
    turns = RopeTables(mx.array(np.cos(angles)), mx.array(np.sin(angles)), False)
    result = product(x, weight, turns)
    numbers, factors, mine = (np.array(array.astype(mx.float32)) for array in (x, weight, result))
    plain = np.einsum("thi,hoi->tho", numbers[..., :columns], factors)
    first, second = numbers[..., columns : columns + half], numbers[..., columns + half :]
    left = first * np.cos(angles) - second * np.sin(angles)
    right = second * np.cos(angles) + first * np.sin(angles)
    expected = np.concatenate([plain, left, right], axis=-1)
    return np.allclose(mine, expected, 0.02, 0.1)
