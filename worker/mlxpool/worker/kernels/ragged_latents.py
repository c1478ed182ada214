"""Attention over latent vectors (MLA) in a pool of blocks, in the tensor cores of Hopper.

Decoding tokens and chunks of prompts are tiles of one work list, as in ragged_attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.kernels import ragged_attention
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
)
from mlxpool.worker.kernels.matmul_tiled import group_mma, group_mma_columns, group_mma_values
from mlxpool.worker.kernels.ragged_attention import MULTIPROCESSORS, RaggedPlan
from mlxpool.worker.kernels.work_list import (
    PART_UNITS,
    UNIT_ROWS,
    Spans,
    TileShape,
    visible_ranges,
    work_items,
)

INPUTS = ("q", "pool", "ends", "tables", "items", "arrived", "partial")
RANKS = (128, 256, 512)  # numbers of a latent's value, divided between two groups of warps
FILES = ("latent_tile.cuh", "latent_chunk_tile.cuh")
PANEL = 64  # numbers of a latent that are multiplied at a time, and latents of a tile
MAX_ROWS = 64  # rows of a tile; the sums of more rows do not fit into registers
MAX_LINE = 640  # numbers of a latent; two tiles of longer latents do not fit
MAX_SHARED_BYTES = 227 * 1024 - 16  # a thread block's shared memory, without its own variables
THREADS = 256
MAX_FEW_ROWS = 32  # in tiles with more rows, rows are not columns of the tensor cores' matrices
VALUE_NUMBERS = 256  # numbers of a latent in one instruction; 64 is 3 to 6 % slower
ALIGNMENT = 1024  # alignment of swizzled matrices, in bytes
LEAST_KEYS = 160  # the least latents of a part: adding up a part takes as long as reading them
SUM_KEYS = 32  # latents that a thread block could read while adding up one part


def supports(heads: int, line: int, rank: int, block: int, dtype: mx.Dtype) -> bool:
    """Returns whether `attend` supports `heads` heads and latents of these sizes.

    The first call for a dtype tries the kernel.
    """
    fits = rank in RANKS and rank <= line <= MAX_LINE and line % PANEL == 0 == block % PANEL
    return fits and heads > 0 and dtype in HALF_DTYPES and _works(dtype)


def tile_shape(heads: int, line: int, rank: int) -> TileShape:
    """Returns the tile shape of layers with these heads. The work list is made for this shape."""
    most = max_rows(line, rank)
    groups = next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= most)
    each = heads // groups
    rows = -(-(most // each * each) // UNIT_ROWS) * UNIT_ROWS
    return TileShape(each, groups, rows, MULTIPROCESSORS, LEAST_KEYS, SUM_KEYS)


def max_rows(line: int, rank: int) -> int:
    """Returns the most rows of a tile that fit into the shared memory of a thread block."""
    rows = range(MAX_ROWS, 0, -UNIT_ROWS)
    return next(n for n in rows if shared_bytes(n, line, rank) <= MAX_SHARED_BYTES)


def shared_bytes(rows: int, line: int, rank: int) -> int:
    """Returns the bytes of shared memory of a thread block.

    It holds two tiles of latents, the queries and the probabilities; later, sums overwrite the
    latents and the queries.
    """
    tiles = 2 * PANEL * line * 2 + rows * line * 2 + rows * PANEL * 2
    beside = rows * 7 * 4  # scores of four warps, totals and ends of each row
    sums = rows * (rank + 4) * 4
    return max(tiles, sums + rows * PANEL * 2) + beside + ALIGNMENT


def value_numbers(line: int, rank: int) -> int:
    """Returns the value columns that one instruction multiplies in tiles with many query rows.

    Returns 0 if such tiles cannot be used: they do not fit into shared memory, or a latent is not
    longer than its value. The probabilities of a tile overwrite the numbers of its latents that
    are not values.
    """
    fits = line > rank and _chunk_bytes(line) <= MAX_SHARED_BYTES
    return min(VALUE_NUMBERS, rank // 2) if fits else 0


def _chunk_bytes(line: int) -> int:
    """Returns the bytes of shared memory of a tile of many rows. The sums overwrite the latents."""
    return 2 * PANEL * line * 2 + MAX_ROWS * line * 2 + MAX_ROWS * 4 * 4 + ALIGNMENT


def attend(q: mx.array, pool: mx.array, plan: RaggedPlan, scale: float, rank: int) -> mx.array:
    """Returns the attention [T, H, rank] of q [T, H, line] over pool [blocks, 1, block, line].

    A whole latent is the key, its first `rank` numbers are the value. Every line (query token) sees
    its sequence from the first latent on. Lines that see no latents, and padding lines of the work
    list, get zeros; lines without an item get arbitrary numbers.
    """
    before, (lines, heads, size) = q.dtype, q.shape
    shape = tile_shape(heads, size, rank)
    outputs: list[mx.array] = _kernel(heads, size, rank, pool.shape[2], pool.dtype, scale)(
        inputs=[
            mx.contiguous(q.astype(pool.dtype)), pool, plan.ends, plan.tables, plan.items,
            plan.arrived, plan.partial,
        ],
        grid=(shape.kv_heads * THREADS, plan.items.shape[0], 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, heads, rank)],
        output_dtypes=[pool.dtype],
    )  # fmt: skip
    return outputs[0].astype(before)


@cache
def _kernel(heads: int, line: int, rank: int, block: int, dtype: mx.Dtype, scale: float) -> Any:
    shape = tile_shape(heads, line, rank)
    rows, wide = max(shape.rows, shape.decode_rows), value_numbers(line, rank)
    many = wide > 0 and rows > MAX_FEW_ROWS
    constants: dict[str, Constant] = {
        "HEADS": heads,
        "EACH": shape.group,
        "LINE": line,
        "RANK": rank,
        "BLOCK": block,
        "DECODE_ROWS": shape.decode_rows,
        "ROWS": shape.rows,
        "UNIT_ROWS": UNIT_ROWS,
        "UNITS": PART_UNITS,
        "MAX_FEW": MAX_FEW_ROWS,
        "VALUE_NUMBERS": wide,
        "SCALE": float(scale),
        "N": dtype,
    }
    few = {n // 8 for n in (shape.decode_rows, shape.rows) if not many or n <= MAX_FEW_ROWS}
    products = "".join(group_mma_columns(n, dtype) for n in sorted(few))
    products += "".join(
        group_mma(n, dtype) for n in sorted(few | ({PANEL // 8} if many else set()))
    )
    if many:
        products += group_mma_values(wide // 8, dtype)
    return build_kernel(
        "ragged_latents",
        INPUTS,
        ["out"],
        constants,
        shared=max(shared_bytes(rows, line, rank), _chunk_bytes(line) if many else 0),
        header=products + "".join(map(include_line, FILES)),
        bounds=(THREADS, 1),
    )


@cache
def _works(dtype: mx.Dtype) -> bool:
    return kernel_works("ragged attention over latents", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns whether the kernel's results equal NumPy's.

    The trial has a token with many keys, and a chunk of a prompt. Unlike MLX's operations, NumPy
    needs no compilation.
    """
    heads, line, rank, block, before, chunk = 20, 576, 512, 256, 300, 5
    tokens, lines, rng = before + chunk, chunk + 1, np.random.default_rng(1)
    q, latents = (
        mx.array(rng.normal(size=size).astype(np.float32)).astype(dtype)
        for size in ((lines, heads, line), (2 * block, line))
    )
    columns = ([0, 1], [1, chunk], [0, 0], [before, tokens], [0, 0])
    spans = Spans(*(np.array(column, dtype=np.int32) for column in columns))
    shape = tile_shape(heads, line, rank)
    begins, ends = visible_ranges(spans, lines)
    plan = RaggedPlan(
        mx.array(begins),
        mx.array(ends),
        mx.array([0, 1], dtype=mx.int32),
        mx.array(work_items(spans, shape, lines)),
        ragged_attention.counters(shape.kv_heads),
        ragged_attention.part_sums(shape.kv_heads, rank),
    )
    result = attend(q, latents.reshape(2, 1, block, line), plan, 0.05, rank)
    queries, keys, mine = (np.array(array.astype(mx.float32)) for array in (q, latents, result))
    scores = np.where(np.arange(2 * block) < ends[:, None, None], queries @ keys.T * 0.05, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = shares / shares.sum(-1, keepdims=True) @ keys[:, :rank]
    return np.allclose(mine, expected, 0.05, 0.03)
