"""Norms, rotation and cache write of what the first product of latent attention (MLA) gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
)

INPUTS = ("lines", "query_gain", "latent_gain", "pool", "slots", "cosines", "sines")
EACH = 8  # numbers of a thread
MAX_THREADS = 1024


def supports(queries: int, rank: int, turned: int, dtype: mx.Dtype) -> bool:
    """Returns whether `norm_and_write` supports lines of these sizes here.

    The first call for a dtype tries it.
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
    """Writes the latents of lines [T, queries + rank + turned]; returns queries [T, queries].

    `gains`: of the norms of queries and of latents. The latent of line t, its first `rank` numbers
    normed and the others rotated by `turns`, goes into slot slots[t] of the pool
    [blocks, 1, block, rank + turned]; with slot -1 nothing is written. Whatever reads the pool must
    depend on the result, see the package.
    """
    count, every = lines.shape
    queries, rank = (gain.shape[0] for gain in gains)
    turned = every - queries - rank
    threads = _threads(queries, rank, turned)
    found: list[mx.array] = _kernel(
        queries, rank, turned, threads, float(eps), turns.traditional, pool.dtype
    )(
        inputs=[lines, *gains, pool, slots, turns.cosines, turns.sines],
        grid=(count * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(count, queries)],
        output_dtypes=[pool.dtype],
    )
    return found[0]


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
    """Compares two lines, of which one is padding, with MLX's operations."""
    queries, rank, turned, block = 64, 128, 16, 4
    lines = mx.random.normal((2, queries + rank + turned), key=mx.random.key(1)).astype(dtype)
    gains = tuple(
        mx.random.normal((size,), key=mx.random.key(size)).astype(dtype) for size in (queries, rank)
    )
    angles = mx.random.uniform(0, 6, (2, 1, turned // 2), key=mx.random.key(2))
    turns = RopeTables(mx.cos(angles), mx.sin(angles), True)
    pool = mx.zeros((1, 1, block, rank + turned), dtype=dtype)
    slots = mx.array([2, -1], dtype=mx.int32)
    mx.eval(lines, gains, turns.cosines, turns.sines, pool)
    asked = norm_and_write(lines, (gains[0], gains[1]), 1e-5, pool, slots, turns)
    mx.eval(asked)
    wanted = mx.fast.rms_norm(lines[:, :queries], gains[0], 1e-5)
    latent = mx.fast.rms_norm(lines[:1, queries : queries + rank], gains[1], 1e-5)
    key = lines[0, queries + rank :].astype(mx.float32).reshape(-1, 2)
    cos, sin = turns.cosines[0, 0], turns.sines[0, 0]
    pairs = [key[:, 0] * cos - key[:, 1] * sin, key[:, 1] * cos + key[:, 0] * sin]
    written = pool.reshape(block, -1)
    right = [
        mx.allclose(asked, wanted, 0.02, 0.02),
        mx.allclose(written[2:3, :rank], latent, 0.02, 0.02),
        mx.allclose(written[2, rank:], mx.stack(pairs, axis=-1).flatten(), 0.02, 0.02),
        mx.all(written[:2] == 0),
    ]
    return all(bool(one.item()) for one in right)
