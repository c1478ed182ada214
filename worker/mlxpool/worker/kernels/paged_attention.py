"""Decode attention over a block pool in tensor cores, with rotation and the write of the token."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES, WARP_SIZE, Constant, build_kernel
from mlxpool.worker.kernels.score_params import ScoreParams

INPUTS = (
    "q", "k", "v", "keys", "values", "table", "positions", "cosines", "sines", "sinks", "arrived",
)  # fmt: skip
HEAD_SIZES = range(16, 257, 16)
MAX_GROUP = 16  # query heads of a key head that fit into one matrix
FULL_GPU_BLOCKS = 264  # thread blocks that keep a large GPU busy
FEW_THREAD_BLOCKS = FULL_GPU_BLOCKS // 2  # so few thread blocks may have more warps each
MIN_PART_TOKENS = 128  # shorter parts cost more than they save
MAX_PARTS = 64
MAX_SUMS = 8192  # numbers for which the warps of a thread block have shared memory


def supports(heads: int, pairs: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Returns whether `attend` supports heads of these sizes."""
    fits = key_dim == value_dim and key_dim in HEAD_SIZES
    return fits and heads % pairs == 0 and heads // pairs <= MAX_GROUP and dtype in HALF_DTYPES


class AttentionMetadata(Struct, frozen=True):
    """The positions [R] of a step's tokens and their block tables [R, B].

    `arrived` [FULL_GPU_BLOCKS] are zeros that count the finished parts of a row; the layers of a
    step run one after the other, so all use the same array. `longest`: tokens of the longest row,
    or a few more; it decides into how many parts rows are split.
    """

    positions: mx.array
    table: mx.array
    arrived: mx.array
    longest: int


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pools: tuple[mx.array, mx.array],
    metadata: AttentionMetadata,
    scores: ScoreParams,
    turns: RopeTables | None = None,
    window: int = 0,
    tokens: int = 1,
) -> mx.array:
    """Attends with one token of each row: q [R, H, D], k and v [R, KV, D] -> [R, H, D].

    Rotates q and k by `turns` and writes k and v into the pools [blocks, KV, block, D]. Arrays may
    be views. A token sees `window` tokens; 0: all. `scores.softcap` must be 0. With `tokens` above
    1, see `tokens_per_matrix`, so many neighbouring tokens belong to one row and read it together;
    then k and v of all tokens are in the pools already, and only q is rotated.
    """
    lines, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    group, rows, dtype = heads // pairs, lines // tokens, pools[0].dtype
    seen = min(metadata.longest, window + tokens - 1) if window else metadata.longest
    parts = parts_for(rows * pairs, seen)
    # Of chunks there is one kernel without parts and one with them, whatever their lines.
    warps = warps_of(rows * pairs * parts if tokens == 1 else 1, group * tokens * size)
    none = mx.zeros((1,))
    cosines, sines = (none, none) if turns is None else (turns.cosines, turns.sines)
    sinks = none if scores.sinks is None else scores.sinks.astype(mx.float32)
    turned = 0 if turns is None else 2 * cosines.shape[-1]
    traditional = turns is not None and turns.traditional
    sunk = scores.sinks is not None
    made = _kernel(
        group,
        pairs,
        size,
        block,
        warps,
        dtype,
        turned,
        traditional,
        window,
        scores.scale,
        sunk,
        parts > 1,
        tokens,
    )
    partial = rows * pairs * parts * group * tokens * (size + 2) if parts > 1 else 1
    found: list[mx.array] = made(
        inputs=[
            *(one.astype(dtype) for one in (q, k, v)),
            *pools,
            metadata.table,
            metadata.positions,
            cosines,
            sines,
            sinks,
            metadata.arrived,
        ],
        grid=(rows * warps * WARP_SIZE, pairs, parts),
        threadgroup=(warps * WARP_SIZE, 1, 1),
        output_shapes=[(lines, heads, size), (partial,)],
        output_dtypes=[dtype, mx.float32],
    )
    return found[0].astype(q.dtype)


def parts_for(blocks: int, longest: int) -> int:
    """Returns the parts of a row: a power of two, so that few passes are compiled."""
    parts = 1
    while (
        parts < MAX_PARTS
        and blocks * parts < FULL_GPU_BLOCKS
        and longest // (2 * parts) >= MIN_PART_TOKENS
    ):
        parts *= 2
    return parts


def tokens_per_matrix(group: int, lines: int) -> int:
    """Returns how many of `lines` tokens of a row share a query matrix; it divides `lines`."""
    return math.gcd(1 << (MAX_GROUP // group).bit_length() - 1, lines)


def kernel_variant(blocks: int, longest: int) -> tuple[bool, bool]:
    """Returns what distinguishes the kernels of `attend` for `blocks` pairs of row and key head."""
    parts = parts_for(blocks, longest)
    return parts > 1, blocks * parts <= FEW_THREAD_BLOCKS


def warps_of(blocks: int, sums: int) -> int:
    """Returns the warps of a thread block with so many sums: more when there are few blocks."""
    most = 8 if blocks <= FEW_THREAD_BLOCKS else 4
    return next(warps for warps in (most, 4, 2) if warps * sums <= MAX_SUMS)


@cache
def _kernel(
    group: int,
    pairs: int,
    size: int,
    block: int,
    warps: int,
    dtype: mx.Dtype,
    turned: int,
    traditional: bool,
    window: int,
    scale: float,
    sinks: bool,
    parted: bool,
    tokens: int,
) -> Any:
    constants: dict[str, Constant] = {
        "GROUP": group,
        "HEADS": pairs,
        "SIZE": size,
        "BLOCK": block,
        "WARPS": warps,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "WINDOW": window,
        "SCALE": float(scale),
        "SINKS": sinks,
        "PARTED": parted,
        "TOKENS": tokens,
        "N": dtype,
    }
    bounds = (warps * WARP_SIZE, 3) if warps == 4 and size <= 128 else None
    return build_kernel(
        "paged_attention",
        INPUTS,
        ["out", "partial"],
        constants,
        bounds=bounds,
        ends=("part_sums.cuh",),
    )
