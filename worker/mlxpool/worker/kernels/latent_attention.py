"""Decode attention over a pool of latent vectors (MLA), in tensor cores."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES, Constant, build_kernel
from mlxpool.worker.kernels.paged_attention import AttentionMetadata, parts_for

INPUTS = ("q", "fresh", "pool", "table", "positions", "arrived")
RANKS = (128, 256, 512)  # numbers of a vector that are its value: a thread reads 2, 4 or 8
MAX_BLOCK_HEADS = 32  # heads of a thread block
COLUMNS = 64  # numbers of vectors that are multiplied at a time
THREADS = 256
LINE_GAP = 16  # unused numbers after a vector in shared memory
MAX_SHARED_BYTES = 200 * 1024  # of shared memory of a thread block
MAX_STAGES = 4
MAX_LINE = 640  # numbers of a vector; two stages of longer ones do not fit


def supports(line: int, rank: int, dtype: mx.Dtype) -> bool:
    """Returns whether `attend` supports vectors of these sizes."""
    return (
        rank in RANKS and rank <= line <= MAX_LINE and line % COLUMNS == 0 and dtype in HALF_DTYPES
    )


def attend(
    q: mx.array,
    line: mx.array,
    pool: mx.array,
    metadata: AttentionMetadata,
    scale: float,
    rank: int,
) -> mx.array:
    """Attends with one token of each row: q [R, H, line], line [R, line] -> [R, H, rank].

    Writes `line`, the latent vector of the token, into the pool [blocks, 1, block, line]. A whole
    vector is the key, its first `rank` numbers are the value.
    """
    rows, heads, size = q.shape
    groups = groups_of(heads)
    each = -(-heads // groups)
    parts = parts_for(rows * groups, metadata.longest)
    dtype = pool.dtype
    found: list[mx.array] = _kernel(
        heads, each, size, rank, pool.shape[2], dtype, scale, parts > 1
    )(
        inputs=[
            mx.contiguous(q.astype(dtype)),
            mx.contiguous(line.astype(dtype)),
            pool,
            metadata.table,
            metadata.positions,
            metadata.arrived,
        ],
        grid=(rows * THREADS, groups, parts),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            (rows, heads, rank),
            (rows * groups * parts * each * (rank + 2) if parts > 1 else 1,),
        ],
        output_dtypes=[dtype, mx.float32],
    )
    return found[0].astype(q.dtype)


def groups_of(heads: int) -> int:
    """Returns the thread blocks that share the heads of a row."""
    return -(-heads // MAX_BLOCK_HEADS)


@cache
def _kernel(
    heads: int,
    each: int,
    line: int,
    rank: int,
    block: int,
    dtype: mx.Dtype,
    scale: float,
    parted: bool,
) -> Any:
    sets = 1 if each <= 16 else 2
    tile = 64 // sets
    stage = tile * (line + LINE_GAP) * 2
    beside = 16 * sets * ((line + LINE_GAP) * 2 + (tile + 4) * 4)
    stages = min(MAX_STAGES, (MAX_SHARED_BYTES - beside) // stage)
    constants: dict[str, Constant] = {
        "HEADS": heads,
        "EACH": each,
        "LINE": line,
        "RANK": rank,
        "BLOCK": block,
        "STAGES": stages,
        "SCALE": float(scale),
        "PARTED": parted,
        "N": dtype,
    }
    shared = stages * stage + beside
    return build_kernel(
        "latent_attention",
        INPUTS,
        ["out", "partial"],
        constants,
        shared=shared,
        ends=("part_sums.cuh",),
    )
