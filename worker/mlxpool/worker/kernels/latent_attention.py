"""Decode attention over a pool of lines that all heads read, in tensor cores (MLA)."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, Constant, kernel
from mlxpool.worker.kernels.paged_attention import Places, parts_of

INPUTS = ("q", "fresh", "pool", "table", "positions", "arrived")
RANKS = (128, 256, 512)  # numbers of a line that are its value: each thread reads 2, 4 or 8 of them
MOST_HEADS = 32  # of a thread block
COLUMNS = 64  # of lines, that are multiplied at a time
THREADS = 256
GAP = 16  # numbers behind a line in shared memory
SPACE = 200 * 1024  # bytes that a thread block may share
MOST_STAGES = 4
MOST_LINE = 640  # numbers; of longer lines there is no room for two stages


def serves(line: int, rank: int, dtype: mx.Dtype) -> bool:
    """Whether `attend` takes lines of these sizes."""
    return rank in RANKS and rank <= line <= MOST_LINE and line % COLUMNS == 0 and dtype in HALVES


def attend(
    q: mx.array, line: mx.array, pool: mx.array, places: Places, scale: float, rank: int
) -> mx.array:
    """One token for each row: q [R, H, line], line [R, line] -> [R, H, rank].

    The line is written into the pool [blocks, 1, block, line]. Scores are of whole lines, and their
    first `rank` numbers are what is weighed.
    """
    rows, heads, size = q.shape
    groups = groups_of(heads)
    each = -(-heads // groups)
    parts = parts_of(rows * groups, places.longest)
    dtype = pool.dtype
    found: list[mx.array] = _kernel(
        heads, each, size, rank, pool.shape[2], dtype, scale, parts > 1
    )(
        inputs=[
            mx.contiguous(q.astype(dtype)),
            mx.contiguous(line.astype(dtype)),
            pool,
            places.table,
            places.positions,
            places.arrived,
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
    """Into how many thread blocks the heads of a row are cut."""
    return -(-heads // MOST_HEADS)


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
    stage = tile * (line + GAP) * 2
    beside = 16 * sets * ((line + GAP) * 2 + (tile + 4) * 4)
    stages = min(MOST_STAGES, (SPACE - beside) // stage)
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
    return kernel(
        "latent_attention",
        INPUTS,
        ["out", "partial"],
        constants,
        shared=shared,
        end="part_sums.cuh",
    )
