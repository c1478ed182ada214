"""Matrix products of few tokens with affine 4-bit weights, limited by the weights' memory reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
    warps_of,
)
from mlxpool.worker.kernels.matmul_small import (
    FUSED_INPUTS,
    NO_FUSED_OPS,
    FusedOps,
    is_fusable,
    sums_of,
)

BITS = 4
GROUPS = (32, 64)
MAX_TOKENS = 32
COLUMNS = 128  # columns of a weight that a warp reads at a time
ROWS = 16  # rows of a weight in a tile
TILES = (4, 2, 1)  # tiles of a thread block; more tiles mean fewer reads of the tokens
MAX_SUMS = 8  # tiles times sets of 8 tokens whose sums fit into registers
FULL_GPU_BLOCKS = 120  # thread blocks that keep a large GPU busy
BYTES_IN_FLIGHT = 48 * 1024  # bytes in flight for a thread block
MAX_STAGES = 8
MAX_WARPS = 8  # with more warps, a thread has too few registers


@cache
def supports(tokens: int, rows: int, columns: int, group: int, dtype: mx.Dtype) -> bool:
    """Returns whether `kernel_matmul` supports `tokens` tokens and a weight [rows, columns]."""
    if not 0 < tokens <= MAX_TOKENS or dtype not in HALF_DTYPES or group not in GROUPS:
        return False
    return rows % (2 * ROWS) == 0 and columns % COLUMNS == 0 and _kernel_works(group, dtype)


def kernel_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    group: int,
    fused: FusedOps = NO_FUSED_OPS,
) -> mx.array:
    """Returns x @ W.T [T, out] of x [T, in] and the quantised `weight` [out, in / 8] in uint32.

    scales and biases [out, in / group] have the dtype of x.
    """
    tokens, columns = x.shape
    sets, rows = -(-tokens // 8), weight.shape[0]
    tiles, warps = tiles_of(rows, sets, fused.gated), warps_of(columns // COLUMNS, MAX_WARPS)
    threads = warps * WARP_SIZE
    outputs: list[mx.array] = _kernel(sets, warps, tiles, group, x.dtype, *fused.constants.items())(
        inputs=[x, weight, scales, biases, *fused.inputs],
        grid=(rows // (ROWS * tiles) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, rows // (1 + fused.gated))],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


def tiles_of(rows: int, sets: int, gated: bool) -> int:
    """Returns the number of tiles of weight rows in a thread block.

    It is the largest number in TILES with which the thread blocks occupy the whole GPU; if there is
    none, the smallest number that the kernel supports.
    """
    fitting = [n for n in TILES if rows % (ROWS * n) == 0 and n * sets <= MAX_SUMS and n > gated]
    return next((n for n in fitting if rows // (ROWS * n) >= FULL_GPU_BLOCKS), fitting[-1])


@cache
def _kernel(
    sets: int, warps: int, tiles: int, group: int, dtype: mx.Dtype, *fused: tuple[str, Constant]
) -> Any:
    words = warps * WARP_SIZE * tiles * 2 * 16
    scales = warps * tiles * 2 * ROWS * (COLUMNS // group) * 2
    stages = max(2, min(MAX_STAGES, BYTES_IN_FLIGHT // (words + scales)))
    constants: dict[str, Constant] = {
        "SETS": sets,
        "WARPS": warps,
        "TILES": tiles,
        "GROUP": group,
        "STAGES": stages,
        "N": dtype,
        **dict(fused),
    }
    shared = max(stages * (words + scales), sums_of(sets, warps, tiles))
    inputs = ["x", "weight", "scales", "biases", *FUSED_INPUTS]
    ends = ("warp_sums.cuh",)
    return build_kernel(
        "matmul_4bit", inputs, ["out"], constants, contiguous=True, shared=shared, ends=ends
    )


@cache
def _kernel_works(group: int, dtype: mx.Dtype) -> bool:
    return kernel_works("products with weights of 4 bits", lambda: _is_right(group, dtype))


def _is_right(group: int, dtype: mx.Dtype) -> bool:
    columns = 4 * MAX_WARPS * COLUMNS
    numbers = mx.random.normal((64, columns), key=mx.random.key(1)).astype(dtype) * columns**-0.5
    weight = mx.quantize(numbers, group_size=group, bits=BITS)
    x = mx.random.normal((3, columns), key=mx.random.key(2)).astype(dtype)
    opened = mx.dequantize(*weight, group_size=group, bits=BITS).T
    right = mx.allclose(kernel_matmul(x, *weight, group), x @ opened, 0.02, 0.1)
    if is_fusable(x):
        gain, beside = 1 + numbers[0], x[:, :64]
        fused = FusedOps(gain=gain, eps=1e-5, beside=beside)
        normed = mx.fast.rms_norm(x, gain, 1e-5) @ opened + beside
        right = right & mx.allclose(kernel_matmul(x, *weight, group, fused), normed, 0.02, 0.2)
    return bool(right.item())
