"""Products of a few rows with a large weight; they take as long as reading the weight.

MLX's own are as fast on the GPU, but cost its host side some 20 us each, and some of them keep it
from using a graph again (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels import matmul_tiled
from mlxpool.worker.kernels.kernel_builder import HALVES, LANES, Constant, kernel, warps_of, works

FEW = 16  # lines up to which a warp multiplies all of them with what it reads itself
COLUMNS = 32  # of a weight, that a warp takes at a time
AROUND = 8  # lines up to which it does more besides: with more, threads have too few registers
ROWS = 16  # of a weight, that a thread block takes; of gated ones as many of both
FLIGHT = 64 * 1024  # bytes that a thread block has asked for at a time
MOST_STAGES = 8
MOST_WARPS = 16


@cache
def serves(lines: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Whether `product` takes so many lines and a weight [rows, columns] here; it is tried once."""
    if lines > FEW:
        return matmul_tiled.serves(lines, columns, rows, dtype)
    if lines > FEW // 2 and columns * rows * dtype.size > matmul_tiled.LARGE:
        return False
    if lines <= 0 or dtype not in HALVES or rows % (2 * ROWS) or columns % COLUMNS:
        return False
    return _works(dtype)


def few(x: mx.array) -> bool:
    """Whether a product of x [T, in] may norm its lines, or add to them.

    float16 has no room for a number that is weighed before it is divided by its line's length.
    """
    return x.ndim == 2 and x.shape[0] <= AROUND and x.dtype == mx.bfloat16


def fuses(x: mx.array, weight: mx.array) -> bool:
    """Whether `product` takes x [T, in] and weight [out, in] and does what is Around it, too."""
    return few(x) and reads(x, weight)


def norms(x: mx.array, gain: mx.array) -> bool:
    """Whether the norm of x [T, in], weighed with `gain` [in], is for a product to compute."""
    columns = x.shape[-1]
    return few(x) and gain.dtype == x.dtype and serves(x.shape[0], columns, 2 * ROWS, x.dtype)


def times(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out], by our kernel or MLX's."""
    return product(x, weight) if reads(x, weight) else x @ weight.T


def reads(x: mx.array, weight: mx.array) -> bool:
    """Whether our kernel multiplies them."""
    fits = x.ndim == 2 and x.dtype == weight.dtype
    return fits and serves(x.shape[0], x.shape[1], weight.shape[0], x.dtype)


@dataclass(frozen=True, slots=True)
class Around:
    """What a product of few lines does besides; each is rounded as a step of its own."""

    gated: bool = False  # the first half of the weight are gates -> silu(gate) * other
    gain: mx.array | None = None  # [in]: of x its root-mean-square norm, weighed so, is multiplied
    eps: float = 0.0  # of that norm
    beside: mx.array | None = None  # [T, out]: is added

    def inputs(self, x: mx.array) -> list[mx.array]:
        """INPUTS of a kernel; x where it does not look."""
        return [x if one is None else one for one in (self.gain, self.beside)]

    @property
    def constants(self) -> dict[str, Constant]:
        """Those of a kernel, for warp_sums.cuh."""
        return {
            "GATED": self.gated,
            "NORMED": self.gain is not None,
            "EPS": float(self.eps),
            "ADDED": self.beside is not None,
        }


INPUTS = ["gain", "beside"]  # of a kernel that ends with warp_sums.cuh
PLAIN = Around()


def product(x: mx.array, weight: mx.array, around: Around = PLAIN) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out]."""
    lines, columns = x.shape
    if lines > FEW:
        assert around.gain is None and around.beside is None
        return matmul_tiled.product(x, weight, gated=around.gated)
    out = weight.shape[0] // (1 + around.gated)
    warps = warps_of(columns // COLUMNS, MOST_WARPS)
    threads = warps * LANES
    found: list[mx.array] = _kernel(-(-lines // 8), warps, x.dtype, *around.constants.items())(
        inputs=[x, weight, *around.inputs(x)],
        grid=(out // ROWS * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, out)],
        output_dtypes=[x.dtype],
    )
    return found[0]


def gated(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [2 * out, in], gates first -> silu(gate) * other [T, out]."""
    return product(x, weight, Around(gated=True))


@cache
def _kernel(sets: int, warps: int, dtype: mx.Dtype, *around: tuple[str, Constant]) -> Any:
    """For 8 * `sets` lines."""
    tiles = 2 if dict(around)["GATED"] else 1
    stage = warps * LANES * tiles * 2 * 16
    stages = max(2, min(MOST_STAGES, FLIGHT // stage))
    return kernel(
        "matmul_small",
        ["x", "weight", *INPUTS],
        ["out"],
        {"SETS": sets, "WARPS": warps, "STAGES": stages, "N": dtype, **dict(around)},
        whole=True,
        shared=max(stages * stage, sums_of(sets, warps, tiles)),
        end="warp_sums.cuh",
    )


def sums_of(sets: int, warps: int, tiles: int) -> int:
    """Bytes of a thread block for what warp_sums.cuh adds up."""
    return 4 * warps * (tiles * ROWS * (8 * sets + 1) + 8 * sets)


@cache
def _works(dtype: mx.Dtype) -> bool:
    return works("products of few lines", lambda: _right(dtype))


def _right(dtype: mx.Dtype) -> bool:
    weight = mx.random.normal((64, 256), key=mx.random.key(1)).astype(dtype)
    x = mx.random.normal((3, 256), key=mx.random.key(2)).astype(dtype)
    right = mx.allclose(product(x, weight), x @ weight.T, 0.02, 0.2)
    if few(x):
        normed = mx.fast.rms_norm(x, weight[0], 1e-5) @ weight.T + x[:, :64]
        around = Around(gain=weight[0], eps=1e-5, beside=x[:, :64])
        right = right & mx.allclose(product(x, weight, around), normed, 0.02, 0.5)
    return bool(right.item())
