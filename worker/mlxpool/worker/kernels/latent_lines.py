"""The steps after the first product in latent attention (MLA): norms, RoPE, cache write."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
)

FloatArray: TypeAlias = npt.NDArray[np.float32]

INPUTS = ("lines", "query_gain", "latent_gain", "pool", "slots", "cosines", "sines")
EACH = 8  # numbers for each thread
MAX_THREADS = 1024


def supports(queries: int, rank: int, turned: int, dtype: mx.Dtype) -> bool:
    """Returns whether `norm_and_write` supports lines (token vectors) of these sizes.

    The first call for a dtype tries the kernel.
    """
    whole = all(n > 0 and n % EACH == 0 for n in (queries, rank, turned))
    fits = whole and _threads(queries, rank, turned) <= MAX_THREADS
    return fits and dtype in HALF_DTYPES and _works(dtype)


def norm_and_write(
    lines: mx.array,
    gains: tuple[mx.array, mx.array],
    eps: float,
    pool: mx.array,
    slots: mx.array,
    turns: RopeTables,
) -> mx.array:
    """Writes the latents of `lines` [T, queries + rank + turned]; returns queries [T, queries].

    `gains`: gains of the norms of queries and of latents. The latent of token t is written into
    slot slots[t] of the pool [blocks, 1, block, rank + turned]: the first `rank` numbers normed,
    all other numbers rotated by `turns`. With slot -1 nothing is written. Readers of the pool must
    depend on the result, see the package.
    """
    count, size = lines.shape
    queries, rank = (gain.shape[0] for gain in gains)
    turned = size - queries - rank
    threads = _threads(queries, rank, turned)
    outputs: list[mx.array] = _kernel(
        queries, rank, turned, threads, float(eps), turns.traditional, pool.dtype
    )(
        inputs=[lines, *gains, pool, slots, turns.cosines, turns.sines],
        grid=(count * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(count, queries)],
        output_dtypes=[pool.dtype],
    )
    return outputs[0]


def _threads(*sizes: int) -> int:
    return sum(-(-size // (EACH * WARP_SIZE)) * WARP_SIZE for size in sizes)


@cache
def _kernel(
    queries: int,
    rank: int,
    turned: int,
    threads: int,
    eps: float,
    traditional: bool,
    dtype: mx.Dtype,
) -> Any:
    constants: dict[str, Constant] = {
        "QUERIES": queries,
        "RANK": rank,
        "TURNED": turned,
        "THREADS": threads,
        "EPS": eps,
        "TRADITIONAL": traditional,
        "N": dtype,
    }
    return build_kernel("latent_lines", INPUTS, ["out"], constants)


@cache
def _works(dtype: mx.Dtype) -> bool:
    return kernel_works("lines of latent attention", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns True if the kernel's results for a line and for a padding line equal NumPy's.

    Unlike MLX's operations, NumPy needs no compilation.
    """
    queries, rank, turned, block, rng = 64, 128, 16, 4, np.random.default_rng(1)
    lines, *gains = (
        mx.array(rng.normal(size=size).astype(np.float32)).astype(dtype)
        for size in ((2, queries + rank + turned), (queries,), (rank,))
    )
    angles = rng.uniform(0, 6, (2, 1, turned // 2)).astype(np.float32)
    turns = RopeTables(mx.array(np.cos(angles)), mx.array(np.sin(angles)), True)
    pool = mx.zeros((1, 1, block, rank + turned), dtype=dtype)
    slots = mx.array([2, -1], dtype=mx.int32)
    mx.eval(lines, gains, pool)
    result = norm_and_write(lines, (gains[0], gains[1]), 1e-5, pool, slots, turns)
    mx.eval(result)
    numbers, query_gain, latent_gain, mine, written = (
        np.array(array.astype(mx.float32)) for array in (lines, *gains, result, pool)
    )

    def normed(x: FloatArray, gain: FloatArray) -> FloatArray:
        out: FloatArray = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
        return out

    key, angle = numbers[0, queries + rank :].reshape(-1, 2), angles[0, 0]
    left = key[:, 0] * np.cos(angle) - key[:, 1] * np.sin(angle)
    right = key[:, 1] * np.cos(angle) + key[:, 0] * np.sin(angle)
    expected = np.zeros((block, rank + turned), dtype=np.float32)
    expected[2, :rank] = normed(numbers[0, queries : queries + rank], latent_gain)
    expected[2, rank:] = np.stack([left, right], axis=-1).flatten()
    return np.allclose(mine, normed(numbers[:, :queries], query_gain), 0.02, 0.02) and np.allclose(
        written.reshape(block, -1), expected, 0.02, 0.02
    )
