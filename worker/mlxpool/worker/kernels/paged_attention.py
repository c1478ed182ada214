"""Decode attention over a pool of blocks in tensor cores, with all that is around it in a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, LANES, Constant, kernel
from mlxpool.worker.kernels.score_params import ScoreParams

INPUTS = (
    "q", "k", "v", "keys", "values", "table", "positions", "cosines", "sines", "sinks", "arrived",
)  # fmt: skip
SIZES = range(16, 257, 16)  # numbers of a head
GROUPS = 16  # queries of a key head that fit into one matrix
FILL = 264  # thread blocks that keep a large GPU busy
FEW = FILL // 2  # thread blocks, which may have more warps each
LEAST = 128  # tokens of a part; shorter ones cost more than they save
MOST_PARTS = 64
SUMS = 8192  # numbers that the warps of a thread block have room to add up


def serves(heads: int, pairs: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Whether `attend` takes heads of these sizes."""
    fits = key_dim == value_dim and key_dim in SIZES
    return fits and heads % pairs == 0 and heads // pairs <= GROUPS and dtype in HALVES


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's tokens lie: positions [R], blocks of the rows [R, B].

    `arrived` [FILL] are zeros in which the parts of a row are counted; attention of one layer
    follows that of another, so all may use the same. `longest` row in tokens, or a little more:
    it decides into how many parts rows are cut.
    """

    positions: mx.array
    table: mx.array
    arrived: mx.array
    longest: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Cosines and sines of the rows' angles, [R, ..., D / 2] in float32: D numbers are turned."""

    cosines: mx.array
    sines: mx.array
    traditional: bool


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pools: tuple[mx.array, mx.array],
    places: Places,
    scores: ScoreParams,
    turns: Turns | None = None,
    window: int = 0,
    tokens: int = 1,
) -> mx.array:
    """One token for each row: q [R, H, D], k and v [R, KV, D] -> [R, H, D].

    q and k are turned by `turns`; k and v are written into the pools [blocks, KV, block, D]. Arrays
    may be views. A row's token sees `window` tokens, 0: all; `scores.softcap` has to be 0.
    `tokens` above 1, see `tokens_of`: as many lines are tokens of one row, in their order, and read
    it together; then k and v of all lines are in the pools already, and only q is turned.
    """
    lines, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    group, rows, dtype = heads // pairs, lines // tokens, pools[0].dtype
    seen = min(places.longest, window + tokens - 1) if window else places.longest
    parts = parts_of(rows * pairs, seen)
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
            places.table,
            places.positions,
            cosines,
            sines,
            sinks,
            places.arrived,
        ],
        grid=(rows * warps * LANES, pairs, parts),
        threadgroup=(warps * LANES, 1, 1),
        output_shapes=[(lines, heads, size), (partial,)],
        output_dtypes=[dtype, mx.float32],
    )
    return found[0].astype(q.dtype)


def parts_of(blocks: int, longest: int) -> int:
    """Into how many a row is parted: a power of two, so that there are few passes to compile."""
    parts = 1
    while parts < MOST_PARTS and blocks * parts < FILL and longest // (2 * parts) >= LEAST:
        parts *= 2
    return parts


def tokens_of(group: int, lines: int) -> int:
    """Of `lines` tokens of a row those that share a matrix of queries; it divides their number."""
    return math.gcd(1 << (GROUPS // group).bit_length() - 1, lines)


def variant(blocks: int, longest: int) -> tuple[bool, bool]:
    """What tells apart the kernels that `attend` takes for `blocks` of rows and key heads."""
    parts = parts_of(blocks, longest)
    return parts > 1, blocks * parts <= FEW


def warps_of(blocks: int, sums: int) -> int:
    """Of a thread block with so many sums: many where there are few blocks."""
    most = 8 if blocks <= FEW else 4
    return next(warps for warps in (most, 4, 2) if warps * sums <= SUMS)


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
    bounds = (warps * LANES, 3) if warps == 4 and size <= 128 else None
    return kernel(
        "paged_attention", INPUTS, ["out", "partial"], constants, bounds=bounds, end="part_sums.cuh"
    )
