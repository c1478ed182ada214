"""Attention of all lines (query tokens) of a step over a block pool, in one kernel call."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO, INT8, Numbers, keys_and_values
from mlxpool.worker.kernels import block_write, kernel_cache
from mlxpool.worker.kernels.block_write import RopeTables, is_quantised
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
)
from mlxpool.worker.kernels.matmul_tiled import group_mma, group_mma_values
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.kernels.work_list import (
    HOPPER_ROWS,
    PART_UNITS,
    QUANTISED_SIZES,
    TILE_ROWS,
    UNIT_ROWS,
    WIDE,
    Spans,
    TileShape,
    decode_stages,
    keys_of,
    shared_bytes,
    visible_ranges,
    warps_of,
    work_items,
)

INPUTS = (
    "q", "k", "v", "keys", "values", "begins", "ends", "tables", "items", "cosines", "sines",
    "sinks", "arrived", "partial",
)  # fmt: skip
QUANTISED_INPUTS = (*INPUTS[:5], "key_scales", "value_scales", *INPUTS[5:])
HEAD_SIZES = range(16, 257, 16)
MAX_GROUP = 16  # query heads of a key head
HOPPER = "sm_90a"
HOPPER_SIZES = (64, 128)  # sizes of heads with special tiles for chunks on Hopper
MULTIPROCESSORS = 132  # multiprocessors of a large GPU


class RaggedPlan(Struct, frozen=True):
    """The keys that each line (query token) of a step sees, as int32 arrays.

    Line t sees cache indices [begins[t], ends[t]). `tables` [C] are the concatenated block tables
    of all sequences. `items` [W, 8] is the work list that work_list.work_items makes for
    `tile_shape`. `arrived` is the memory from `counters`, `partial` the memory from `part_sums`;
    the layers of a step run one after the other, so all layers use the same arrays.
    """

    begins: mx.array
    ends: mx.array
    tables: mx.array
    items: mx.array
    arrived: mx.array
    partial: mx.array


class FreshLines(Struct, frozen=True):
    """New keys and values [T, KV, D] (possibly views), which `attend` writes into the pools.

    `attend` rotates keys and queries by `turns`.
    """

    k: mx.array
    v: mx.array
    turns: RopeTables | None


def supports(
    heads: int,
    pairs: int,
    key_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    *,
    quantised: bool = False,
) -> bool:
    """Returns whether `attend` supports these heads; `quantised`: integer keys and values."""
    fits = key_dim == value_dim and key_dim in (QUANTISED_SIZES if quantised else HEAD_SIZES)
    return fits and heads % pairs == 0 and heads // pairs <= MAX_GROUP and dtype in HALF_DTYPES


def tile_shape(
    heads: int, pairs: int, size: int, *, chunks: bool = False, quantised: bool = False
) -> TileShape:
    """Returns the tile shape of layers with these heads. The work list is made for this shape.

    `chunks`: the pass has chunks of prompts, possibly beside decoding tokens. If possible, chunks
    use Hopper's tiles, which are up to 1.6 times as fast. But 8-bit keys and values never use
    Hopper's tiles.
    """
    hopper = chunks and not quantised and hopper_tiles(size)
    return _tile_shape(heads // pairs, pairs, size, hopper)


def _tile_shape(group: int, pairs: int, size: int, hopper: bool) -> TileShape:
    rows = HOPPER_ROWS if hopper else tile_rows(size)
    return TileShape(group, pairs, rows, MULTIPROCESSORS * _blocks(size, rows, hopper))


def tile_rows(size: int) -> int:
    """Returns the query rows of a chunk's tile. Hopper's tiles have HOPPER_ROWS."""
    return TILE_ROWS


def _blocks(size: int, rows: int, hopper: bool) -> int:
    """Returns how many thread blocks fit into a multiprocessor's registers and shared memory."""
    if hopper or size > WIDE or rows > TILE_ROWS:
        return 2
    return 3 if size > WIDE // 2 else 4


@cache
def hopper_tiles(size: int) -> bool:
    """Returns whether chunks may use Hopper's tiles; tries these tiles once."""
    if size not in HOPPER_SIZES or kernel_cache.architecture() != HOPPER:
        return False
    return kernel_works(
        "attention of chunks on Hopper", lambda: _is_right(4, 2, size, mx.bfloat16, True)
    )


def counters(pairs: int) -> mx.array:
    """Returns counters of the finished parts of tiles; every kernel call resets them to 0."""
    return mx.zeros((pairs * PART_UNITS,), dtype=mx.int32)


def part_sums(pairs: int, size: int) -> mx.array:
    """Returns memory for the sums of parts of tiles, for heads of `size` numbers."""
    return mx.zeros((pairs * PART_UNITS * UNIT_ROWS * (size + 2),))


def attend(
    q: mx.array,
    pools: tuple[mx.array, ...],
    plan: RaggedPlan,
    scores: ScoreParams,
    window: int = 0,
    fresh: FreshLines | None = None,
    *,
    chunks: bool = False,
) -> mx.array:
    """Returns the attention [T, H, D] of rotated q [T, H, D] over pools [blocks, KV, block, D].

    q may be a view. A line (query token) reads the last `window` keys that it sees; 0: all keys.
    Lines that see no keys, and padding lines of the work list, get zeros; lines without an item get
    arbitrary numbers. With `fresh`, each line is the last token of its own sequence, and q is not
    rotated yet. `chunks`: the value with which `tile_shape` was called for the work list. Four
    pools have 8-bit keys and values with scales, see rotate_and_write.
    """
    hopper = chunks and not is_quantised(pools) and hopper_tiles(q.shape[2])
    return _attend(q, pools, plan, scores, window, hopper, fresh)


def attend_fresh(
    lines: mx.array,
    heads: int,
    pools: tuple[mx.array, ...],
    plan: RaggedPlan,
    scores: ScoreParams,
    window: int,
    turns: RopeTables,
) -> mx.array:
    """Computes `attend` for fresh `lines` [T, (H + 2 * KV) * D]: queries, keys, values.

    Returns [T, H * D].
    """
    _, pairs, _, size = pools[0].shape
    dtype = _dtype(lines, pools)
    kernel = _kernel_of(heads // pairs, pools, dtype, window, scores, False, turns, packed=True)
    before, lines = lines.dtype, lines.astype(dtype)
    outputs: list[mx.array] = kernel(
        inputs=[
            lines, lines, lines, *pools, plan.begins, plan.ends, plan.tables, plan.items,
            turns.cosines, turns.sines, scores.sinks, plan.arrived, plan.partial,
        ],
        grid=(pairs * warps_of(False) * WARP_SIZE, plan.items.shape[0], 1),
        threadgroup=(warps_of(False) * WARP_SIZE, 1, 1),
        output_shapes=[(lines.shape[0], heads * size)],
        output_dtypes=[dtype],
    )  # fmt: skip
    return outputs[0].astype(before)


def _dtype(q: mx.array, pools: tuple[mx.array, ...]) -> mx.Dtype:
    """Returns the dtype in which the kernel multiplies.

    It is the dtype of the pools; for pools with integers it is the dtype of q.
    """
    return q.dtype if is_quantised(pools) else pools[0].dtype


def _kernel_of(
    group: int,
    pools: tuple[mx.array, ...],
    dtype: mx.Dtype,
    window: int,
    scores: ScoreParams,
    hopper: bool,
    turns: RopeTables | None,
    *,
    fresh: bool = True,
    packed: bool = False,
) -> Any:
    """Returns the kernel of `group` query heads for each key head of these pools."""
    _, pairs, block, size = pools[0].shape
    return _kernel(
        group,
        pairs,
        size,
        block,
        dtype,
        window,
        scores.scale,
        scores.softcap,
        scores.sinks is not None,
        hopper,
        fresh,
        packed,
        0 if turns is None else 2 * turns.cosines.shape[-1],
        turns is not None and turns.traditional,
        is_quantised(pools),
    )


def _attend(
    q: mx.array,
    pools: tuple[mx.array, ...],
    plan: RaggedPlan,
    scores: ScoreParams,
    window: int,
    hopper: bool,
    fresh: FreshLines | None = None,
) -> mx.array:
    before, (lines, heads, size) = q.dtype, q.shape
    dtype, pairs = _dtype(q, pools), pools[0].shape[1]
    turns = None if fresh is None else fresh.turns
    group = heads // pairs
    kernel = _kernel_of(group, pools, dtype, window, scores, hopper, turns, fresh=fresh is not None)
    threads = warps_of(hopper) * WARP_SIZE
    q, unused = q.astype(dtype), plan.arrived
    k, v = (q, q) if fresh is None else (fresh.k.astype(dtype), fresh.v.astype(dtype))
    cosines, sines = (unused, unused) if turns is None else (turns.cosines, turns.sines)
    inputs = [
        q, k, v, *pools, plan.begins, plan.ends, plan.tables, plan.items, cosines, sines,
        scores.sinks, plan.arrived, plan.partial,
    ]  # fmt: skip
    outputs: list[mx.array] = kernel(
        inputs=inputs,
        grid=(pairs * threads, plan.items.shape[0], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, heads, size)],
        output_dtypes=[dtype],
    )
    return outputs[0].astype(before)


@cache
def works(group: int, pairs: int, size: int, dtype: mx.Dtype, *, quantised: bool = False) -> bool:
    """Returns whether attention works here, with stored and with fresh keys; logs a failure.

    The first call for these arguments tries the kernels.
    """
    return kernel_works(
        "ragged attention of 8-bit keys and values" if quantised else "ragged attention",
        lambda: (
            _is_right(group, pairs, size, dtype, False, quantised)
            and _fresh_is_right(group, pairs, size, dtype, quantised)
        ),
    )


def _empty_pools(
    blocks: int, pairs: int, block: int, size: int, dtype: mx.Dtype, quantised: bool
) -> tuple[mx.array, ...]:
    """Returns pools of zeros for a layer."""
    stored = keys_and_values(pairs, size, size, INT8 if quantised else AUTO)
    dtypes = {Numbers.INT8: mx.int8, Numbers.SCALE: mx.bfloat16}
    return tuple(
        mx.zeros((blocks, pairs, block, part.size), dtypes.get(part.numbers, dtype))
        for part in stored
    )


def _is_right(
    group: int, pairs: int, size: int, dtype: mx.Dtype, hopper: bool, quantised: bool = False
) -> bool:
    """Returns whether the attention kernel gives the results of MLX's operations.

    The trial has a token with many keys, which are divided into parts, and a chunk of a prompt.
    """
    block, longest, lines, heads = 256, 200, TILE_ROWS // 2, group * pairs
    shape = _tile_shape(group, pairs, size, hopper)
    random = (
        mx.random.normal((longest + lines, n, size), key=mx.random.key(salt))
        for salt, n in enumerate((heads, pairs, pairs))
    )
    q, k, v = (numbers.astype(dtype) for numbers in random)
    pools = _empty_pools(2, pairs, block, size, dtype, quantised)
    mx.eval(q, k, v, pools)
    slots = mx.array([*range(longest), *range(block, block + lines)], dtype=mx.int32)
    rotated = block_write.rotate_and_write(q, k, v, pools, slots, None)[longest - 1 :]
    columns = ([0, 1], [1, lines], [0, 1], [longest, lines], [0, 0])
    spans = Spans(*(np.array(column, dtype=np.int32) for column in columns))
    begins, ends = (mx.array(bounds) for bounds in visible_ranges(spans, lines + 1))
    items = mx.array(work_items(spans, shape, lines + 1))
    tables = mx.array([0, 1], dtype=mx.int32)
    memory = counters(pairs), part_sums(pairs, size)
    plan = RaggedPlan(begins, ends, tables, items, *memory)
    out = _attend(rotated, pools, plan, ScoreParams(0.1), 0, hopper)
    for here, queries, masked in (
        (slice(0, longest), slice(longest - 1, longest), False),
        (slice(longest, None), slice(longest, None), True),
    ):
        key, value = (mx.repeat(stored[here], group, axis=1) for stored in (k, v))
        products = mx.einsum("qhd,khd->hqk", q[queries].astype(mx.float32), key.astype(mx.float32))
        if masked:
            products = products + mx.triu(mx.full((lines, lines), -mx.inf), 1)
        shares = mx.softmax(products * 0.1, axis=-1)
        expected = mx.einsum("hqk,khd->qhd", shares, value.astype(mx.float32))
        mine = out[1:] if masked else out[:1]
        if not mx.allclose(mine.astype(mx.float32), expected, 0.05, 0.05).item():
            return False
    return True


def _fresh_is_right(
    group: int, pairs: int, size: int, dtype: mx.Dtype, quantised: bool = False
) -> bool:
    """Returns whether `attend_fresh` gives the results of rotate_and_write and then `attend`.

    The results include the keys and values in the pools.
    """
    block, longest, heads = 256, 200, group * pairs
    random = (
        mx.random.normal((longest, n, size), key=mx.random.key(salt))
        for salt, n in enumerate((heads, pairs, pairs))
    )
    q, k, v = (numbers.astype(dtype) for numbers in random)
    angles = mx.random.uniform(0, 6, (longest, 1, size // 2), key=mx.random.key(3))
    turns = RopeTables(mx.cos(angles), mx.sin(angles), False)
    slots = mx.arange(longest, dtype=mx.int32)
    columns = ([0], [1], [0], [longest], [0])
    spans = Spans(*(np.array(column, dtype=np.int32) for column in columns))
    begins, ends = (mx.array(bounds) for bounds in visible_ranges(spans, 1))
    items = mx.array(work_items(spans, _tile_shape(group, pairs, size, False), 1))
    memory = counters(pairs), part_sums(pairs, size)
    plan = RaggedPlan(begins, ends, mx.zeros((1,), dtype=mx.int32), items, *memory)
    results = []
    for more in (0, 1):
        pools = _empty_pools(1, pairs, block, size, dtype, quantised)
        mx.eval(q, k, v, pools)
        before = longest - more
        earlier = RopeTables(turns.cosines[:before], turns.sines[:before], False)
        rotated = block_write.rotate_and_write(
            q[:before], k[:before], v[:before], pools, slots[:before], earlier
        )
        mx.eval(rotated)
        if more:
            last = RopeTables(turns.cosines[-1:], turns.sines[-1:], False)
            lines = mx.concatenate([part[-1:].reshape(1, -1) for part in (q, k, v)], axis=1)
            out = attend_fresh(lines, heads, pools, plan, ScoreParams(0.1), 0, last)
            results.append(out.reshape(1, heads, size))
        else:
            results.append(_attend(rotated[-1:], pools, plan, ScoreParams(0.1), 0, False))
        mx.eval(results)
        results.extend(pools)
    each = len(results) // 2
    pairs_of = zip(results[:each], results[each:], strict=True)
    return all(mx.allclose(first, second, 0.05, 0.05).item() for first, second in pairs_of)


@cache
def _kernel(
    group: int,
    pairs: int,
    size: int,
    block: int,
    dtype: mx.Dtype,
    window: int,
    scale: float,
    softcap: float,
    sinks: bool,
    hopper: bool,
    fresh: bool,
    packed: bool,
    turned: int,
    traditional: bool,
    quantised: bool,
) -> Any:
    tiles = _tile_shape(group, pairs, size, hopper)
    shared = shared_bytes(tiles, size, hopper, quantised)
    constants: dict[str, Constant] = {
        "GROUP": group,
        "HEADS": pairs,
        "SIZE": size,
        "BLOCK": block,
        "WINDOW": window,
        "SCALE": float(scale),
        "CAP": float(softcap),
        "SINKS": sinks,
        "FRESH": fresh,
        "PACKED": packed,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "DECODE_ROWS": tiles.decode_rows,
        "DECODE_UNITS": tiles.decode_rows // UNIT_ROWS,
        "DECODE_STAGES": decode_stages(shared, size, hopper, quantised),
        "WARPS": warps_of(hopper),
        "MATRICES": tiles.rows // (16 * warps_of(False)),
        "TILE_UNITS": tiles.rows // UNIT_ROWS,
        "UNIT_ROWS": UNIT_ROWS,
        "UNITS": PART_UNITS,
        "KEYS": keys_of(size),
        "N": dtype,
    }
    kind = "stored_integers.cuh" if quantised else "stored_numbers.cuh"
    chunks = "chunk_tiles_hopper.cuh" if hopper else "chunk_tiles.cuh"
    parts = (kind, "decode_tiles.cuh", "decode_sums.cuh", *(() if fresh else (chunks,)))
    header = include_line("integers.cuh") if quantised else ""
    if hopper and not fresh:
        header += group_mma(8, dtype) + group_mma_values(size // 8, dtype)
    return build_kernel(
        "ragged_attention",
        QUANTISED_INPUTS if quantised else INPUTS,
        ["out"],
        constants,
        shared=shared,
        header=header,
        bounds=(warps_of(hopper) * WARP_SIZE, _blocks(size, tiles.rows, hopper)),
        ends=(*parts, "part_sums.cuh"),
    )
