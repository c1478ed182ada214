"""Matrix products of few tokens with a large weight, limited by the weight's memory reads.

MLX's products are as fast on the GPU, but each costs the host some 20 us, and some products prevent
the reuse of a CUDA graph (docs/notes/engine-steps-on-a-gpu.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import matmul_tiled
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
    warps_of,
)

MAX_WARP_TOKENS = 16  # the most tokens; a warp multiplies all tokens with its columns
COLUMNS = 32  # columns of a weight that a warp reads at a time
MAX_FUSED_TOKENS = 8  # tokens with fused operations; for more, threads have too few registers
ROWS = 16  # rows of a weight in a thread block; of a gated weight 16 gates and 16 ups
BYTES_IN_FLIGHT = 64 * 1024  # bytes in flight for a thread block
MAX_STAGES = 8
MAX_WARPS = 16


@cache
def supports(tokens: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Returns whether `kernel_matmul` supports `tokens` tokens and a weight [rows, columns]."""
    if tokens > MAX_WARP_TOKENS:
        return matmul_tiled.supports(tokens, columns, rows, dtype)
    if (
        tokens > MAX_WARP_TOKENS // 2
        and columns * rows * dtype.size > matmul_tiled.MAX_WEIGHT_BYTES
    ):
        return False
    if tokens <= 0 or dtype not in HALF_DTYPES or rows % (2 * ROWS) or columns % COLUMNS:
        return False
    return _kernel_works(dtype)


def is_fusable(x: mx.array) -> bool:
    """Returns whether a product of x [T, in] can have fused operations.

    It cannot in float16: a fused norm multiplies by the gain before it divides by the RMS, and the
    product may overflow.
    """
    return x.ndim == 2 and x.shape[0] <= MAX_FUSED_TOKENS and x.dtype == mx.bfloat16


def can_fuse(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> bool:
    """Returns whether `kernel_matmul` supports x [T, in] and weight [out, in] with FusedOps."""
    return is_fusable(x) and supports_arrays(x, weight, bias)


def can_fuse_norm(x: mx.array, gain: mx.array) -> bool:
    """Returns whether a product can compute the RMS norm of its input x [T, in] with `gain`."""
    columns = x.shape[-1]
    return (
        is_fusable(x) and gain.dtype == x.dtype and supports(x.shape[0], columns, 2 * ROWS, x.dtype)
    )


def matmul(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """Returns x @ weight.T + bias [T, out] of x [T, in], weight [out, in] and bias [out].

    Our kernel computes the product if it supports these arrays; otherwise MLX does.
    """
    if supports_arrays(x, weight, bias):
        return kernel_matmul(x, weight, FusedOps(bias=bias))
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def supports_arrays(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> bool:
    """Returns whether our kernel supports these arrays."""
    fits = x.ndim == 2 and x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return fits and supports(x.shape[0], x.shape[1], weight.shape[0], x.dtype)


class FusedOps(Struct, frozen=True):
    """Operations fused into a product of few tokens, each rounded like a separate operation."""

    gated: bool = False  # the first half of the weight are gates -> silu(gate) * up
    gain: mx.array | None = None  # gain [in] of an RMS norm of x before the product
    eps: float = 0.0  # epsilon of this norm
    beside: mx.array | None = None  # [T, out] is added to the product
    bias: mx.array | None = None  # [rows of the weight] is added to the unrounded sums

    @property
    def inputs(self) -> list[mx.array | None]:
        """The kernel's inputs for fused operations, see FUSED_INPUTS."""
        return [self.gain, self.beside, self.bias]

    @property
    def constants(self) -> dict[str, Constant]:
        """The kernel's constants for warp_sums.cuh."""
        return {
            "GATED": self.gated,
            "NORMED": self.gain is not None,
            "EPS": float(self.eps),
            "ADDED": self.beside is not None,
            "BIASED": self.bias is not None,
        }


FUSED_INPUTS = ["gain", "beside", "bias"]  # inputs of a kernel that ends with warp_sums.cuh
NO_FUSED_OPS = FusedOps()


def kernel_matmul(x: mx.array, weight: mx.array, fused: FusedOps = NO_FUSED_OPS) -> mx.array:
    """Returns x @ weight.T [T, out] of x [T, in] and weight [out, in], with fused operations."""
    tokens, columns = x.shape
    if tokens > MAX_WARP_TOKENS:
        assert fused.gain is None and fused.beside is None
        return matmul_tiled.kernel_matmul(x, weight, fused.bias, gated=fused.gated)
    out = weight.shape[0] // (1 + fused.gated)
    warps = warps_of(columns // COLUMNS, MAX_WARPS)
    threads = warps * WARP_SIZE
    outputs: list[mx.array] = _kernel(-(-tokens // 8), warps, x.dtype, *fused.constants.items())(
        inputs=[x, weight, *fused.inputs],
        grid=(out // ROWS * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, out)],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


def gated_matmul(x: mx.array, weight: mx.array) -> mx.array:
    """Returns silu(gate) * up [T, out] of x [T, in] and weight [2 * out, in], gates first."""
    return kernel_matmul(x, weight, FusedOps(gated=True))


@cache
def _kernel(sets: int, warps: int, dtype: mx.Dtype, *fused: tuple[str, Constant]) -> Any:
    """Builds the kernel for up to 8 * `sets` tokens."""
    tiles = 2 if dict(fused)["GATED"] else 1
    stage = warps * WARP_SIZE * tiles * 2 * 16
    stages = max(2, min(MAX_STAGES, BYTES_IN_FLIGHT // stage))
    return build_kernel(
        "matmul_small",
        ["x", "weight", *FUSED_INPUTS],
        ["out"],
        {"SETS": sets, "WARPS": warps, "STAGES": stages, "N": dtype, **dict(fused)},
        contiguous=True,
        shared=max(stages * stage, sums_of(sets, warps, tiles)),
        ends=("warp_sums.cuh",),
    )


def sums_of(sets: int, warps: int, tiles: int) -> int:
    """Returns the bytes of shared memory for the sums of warp_sums.cuh."""
    return 4 * warps * (tiles * ROWS * (8 * sets + 1) + 8 * sets)


@cache
def _kernel_works(dtype: mx.Dtype) -> bool:
    return kernel_works("products of few tokens", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    weight = mx.random.normal((64, 256), key=mx.random.key(1)).astype(dtype)
    x = mx.random.normal((3, 256), key=mx.random.key(2)).astype(dtype)
    right = mx.allclose(kernel_matmul(x, weight), x @ weight.T, 0.02, 0.2)
    if is_fusable(x):
        gain = weight[:1].reshape(-1)  # MLX would compile a kernel for weight[0]
        normed = mx.fast.rms_norm(x, gain, 1e-5) @ weight.T + x[:, :64] + gain[:64]
        fused = FusedOps(gain=gain, eps=1e-5, beside=x[:, :64], bias=gain[:64])
        right = right & mx.allclose(kernel_matmul(x, weight, fused), normed, 0.02, 0.5)
    return bool(right.item())
