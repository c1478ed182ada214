"""Tests ragged attention and the write of keys and values before it.

All cases run on a GPU, some also by simt.py without one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention import int8_numbers  # noqa: E402
from mlxpool.worker.attention.rotary import RotaryEmbedding  # noqa: E402
from mlxpool.worker.caches.stored import AUTO, INT8  # noqa: E402
from mlxpool.worker.kernels import block_write, kernel_cache, ragged_attention, work_list  # noqa: E402
from mlxpool.worker.kernels.ragged_attention import RaggedPlan  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.kernels.work_list import Spans, TileShape, visible_ranges  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS as BLOCK  # noqa: E402
from support import simt  # noqa: E402
from support.float64 import attention, numbers  # noqa: E402

ON_GPU = mx.cuda.is_available()
NONE = float("nan")


runs = pytest.mark.usefixtures("machine")


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer and its options, as a test case.

    `group`: query heads of a key-value head. `pairs`: the number of key-value heads.
    """

    size: int
    group: int
    dtype: str = "bfloat16"
    pairs: int = 2
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0

    chunks: bool = False
    kv: str = AUTO

    def tiles(self) -> TileShape:
        heads, quantised = self.group * self.pairs, self.kv == INT8
        return ragged_attention.tile_shape(
            heads, self.pairs, self.size, chunks=self.chunks, quantised=quantised
        )

    def scores(self) -> ScoreParams:
        sinks = mx.random.normal((self.pairs * self.group,)) if self.sinks else None
        return ScoreParams(self.size**-0.5, sinks, self.softcap)


class Batch:
    """Spans of rows with scattered blocks in a pool; memory that no row uses is NaN.

    A span is (number of new tokens, first visible key of its row, end of the row's keys). Rows with
    equal `owners` share all blocks but the last.
    """

    def __init__(self, heads: Heads, spans: list[tuple[int, int, int]], padding: int) -> None:
        self.heads, self.padding = heads, padding
        kind = getattr(mx, heads.dtype)
        rng = np.random.default_rng(len(spans) + heads.size)
        counts = [-(-end // BLOCK) for _, _, end in spans]
        free = list(rng.permutation(sum(counts) + 1))
        tables: list[list[int]] = []
        for row, count in enumerate(counts):
            shared: list[int] = []
            if (
                row % 2 and spans[row][1] == spans[row - 1][1] == 0
            ):  # shares the full blocks of the row before
                whole = min(spans[row][2] - spans[row][0], spans[row - 1][2] - spans[row - 1][0])
                shared = tables[-1][: max(whole, 0) // BLOCK]
            tables.append([*shared, *(int(free.pop()) for _ in range(count - len(shared)))])
        lines = np.array([line_count for line_count, _, _ in spans], dtype=np.int32)
        offsets = np.cumsum([0, *counts])[:-1].astype(np.int32)
        self.spans = Spans(
            (np.cumsum(lines) - lines).astype(np.int32),
            lines,
            offsets,
            np.array([end for _, _, end in spans], dtype=np.int32),
            np.array([begin for _, begin, _ in spans], dtype=np.int32),
        )
        self.lines = int(lines.sum()) + padding
        blocks = sum(counts) + 1
        pools = np.full((2, blocks, heads.pairs, BLOCK, heads.size), NONE, dtype=np.float32)
        self.slots = np.full((self.lines,), -1, dtype=np.int32)
        for first, n, begin, end, table in zip(
            self.spans.first_lines, lines, self.spans.begins, self.spans.ends, tables, strict=True
        ):
            at = np.arange(begin, end)
            where, places = np.array(table)[at // BLOCK], at % BLOCK
            fresh = rng.normal(size=(2, at.size, heads.pairs, heads.size))
            known = pools[:, where, :, places].swapaxes(0, 1)
            pools[:, where, :, places] = np.where(np.isnan(known), fresh, known).swapaxes(0, 1)
            self.slots[first : first + n] = where[at.size - n :] * BLOCK + places[at.size - n :]
        self.tables = tables
        self.pools = int8_numbers.stored(
            tuple(mx.array(pool).astype(kind) for pool in pools), kind, heads.kv
        )
        shape = (self.lines, heads.pairs * (heads.group + 2), heads.size)
        self.qkv = mx.array(rng.normal(size=shape).astype(np.float32)).astype(kind)
        mx.eval(self.pools, self.qkv)

    @property
    def q(self) -> Any:
        """The queries, a view of the joined queries, keys and values, as in a model."""
        return self.qkv[:, : self.heads.pairs * self.heads.group]

    def plan(self) -> RaggedPlan:
        begins, ends = visible_ranges(self.spans, self.lines)
        items = work_list.work_items(self.spans, self.heads.tiles(), self.lines)
        table = np.array([block for blocks in self.tables for block in blocks], dtype=np.int32)
        return RaggedPlan(
            mx.array(begins),
            mx.array(ends),
            mx.array(table),
            mx.array(items),
            ragged_attention.counters(self.heads.pairs),
            ragged_attention.part_sums(self.heads.pairs, self.heads.size),
        )

    def expected(self, scores: ScoreParams) -> Any:
        """Returns attention [T, H, D] in float64."""
        out = np.zeros((self.lines, self.heads.pairs * self.heads.group, self.heads.size))
        begins, ends = visible_ranges(self.spans, self.lines)
        read = int8_numbers.read(self.pools, mx.float32, self.heads.kv)
        keys, values = (numbers(pool) for pool in read)
        asked = numbers(self.q)
        for row, (first, n) in enumerate(
            zip(self.spans.first_lines, self.spans.lines, strict=True)
        ):
            at = np.arange(self.spans.begins[row], self.spans.ends[row])
            blocks = np.array(self.tables[row])[at // BLOCK]
            here = slice(first, first + n)
            low = begins[here]
            if self.heads.window:
                low = np.maximum(low, ends[here] - self.heads.window)
            seen = (at >= low[:, None]) & (at < ends[here, None])
            key, value = (pool[blocks, :, at % BLOCK] for pool in (keys, values))
            out[here] = attention(
                asked[here], key, value, seen, scores.scale, scores.sinks, scores.softcap
            )
        return out


def check(batch: Batch) -> Any:
    """Compares attention of a batch with float64; returns it."""
    scores, plan = batch.heads.scores(), batch.plan()
    heads = batch.heads
    output = ragged_attention.attend(
        batch.q, batch.pools, plan, scores, heads.window, chunks=heads.chunks
    )
    mx.eval(output)
    assert not mx.any(plan.arrived).item()  # the counters are reset for the next layer
    errors = np.abs(numbers(output) - batch.expected(scores)).max((1, 2))
    assert errors.max() < 0.03, (int(errors.argmax()), errors)
    return output


HEADS = [
    Heads(16, 1),
    Heads(48, 2, "float16", sinks=True),
    Heads(64, 3, window=100),
    Heads(64, 8, sinks=True, window=128),
    Heads(80, 4, softcap=3.0),
    Heads(128, 4),
    Heads(128, 9, "float16", pairs=1),
    Heads(192, 2, window=300, softcap=5.0),
    Heads(256, 8, "float16", pairs=1),
    Heads(256, 16, pairs=1, window=40),
]
INTEGERS = [
    Heads(32, 1, kv=INT8),
    Heads(64, 3, window=100, kv=INT8),
    Heads(64, 8, "float16", sinks=True, window=128, kv=INT8),
    Heads(96, 4, softcap=3.0, kv=INT8),
    Heads(128, 4, kv=INT8),
    Heads(128, 9, "float16", pairs=1, kv=INT8),
    Heads(192, 2, window=300, softcap=5.0, kv=INT8),
    Heads(256, 16, pairs=1, window=40, kv=INT8),
]
MORE = [
    Heads(size, group, dtype, pairs, window, window > 0, 4.0 if size % 96 == 0 else 0.0)
    for size, (group, pairs), window, dtype in itertools.product(
        range(16, 257, 16),
        ((1, 3), (2, 4), (3, 1), (4, 8), (5, 2), (8, 2), (16, 2)),
        (0, 100),
        ("float16", "bfloat16"),
    )
]
MORE += [replace(case, kv=INT8) for case in MORE if case.size in work_list.QUANTISED_SIZES]


def spans_of(seed: int, rows: int, longest: int) -> list[tuple[int, int, int]]:
    """Returns random spans, one for each row.

    A span is (number of new tokens, first visible key of its row, end of the row's keys).
    """
    rng = np.random.default_rng(seed)
    spans = []
    for _ in range(rows):
        lines = [1, 1, 1, int(rng.integers(2, 17)), int(rng.integers(17, 201))][rng.integers(5)]
        end = lines + [0, int(rng.integers(64)), int(rng.integers(longest))][rng.integers(3)]
        begin = [0, 0, int(rng.integers(end - lines + 1))][rng.integers(3)]
        spans.append((lines, begin, end))
    return spans


@runs
@pytest.mark.parametrize("heads", [*HEADS, *INTEGERS, *(MORE if ON_GPU else ())], ids=str)
def test_ragged_attention_equals_float64(heads: Heads) -> None:
    """Tests random spans of rows that share blocks, padding, and NaN in memory that no row uses."""
    for seed in range(4 if ON_GPU else 1):
        salt = heads.size * heads.group + seed
        spans = [*spans_of(salt, 20 if ON_GPU else 4, 3000 if ON_GPU else 500), (1, 0, 256)]
        mx.random.seed(salt)
        output = check(Batch(heads, spans, padding=3 + 70 * seed))
        assert not mx.any(output[-3 - 70 * seed :]).item()  # the output of padding is 0


@runs
@pytest.mark.parametrize("heads", [HEADS[2], HEADS[5], INTEGERS[4]], ids=str)
def test_tiles_of_128_rows_are_right(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_attention, "tile_rows", lambda size: 128)
    monkeypatch.setattr(ragged_attention, "hopper_tiles", lambda size: False)
    simt.forget_kernels()
    mx.random.seed(1)
    check(Batch(heads, [(1, 0, 40), (130, 10, 500), (30, 0, 1100), (20, 0, 20)], padding=130))
    simt.forget_kernels()


HOPPER_HEADS = [
    Heads(64, 3, window=100, chunks=True),
    Heads(64, 16, "float16", pairs=1, softcap=4.0, chunks=True),
    Heads(128, 4, sinks=True, chunks=True),
    Heads(128, 9, "float16", pairs=1, window=130, chunks=True),
]


@runs
@pytest.mark.parametrize("heads", HOPPER_HEADS, ids=str)
def test_tiles_of_hopper_are_right(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU and not ragged_attention.hopper_tiles(heads.size):
        pytest.skip("this GPU has no products of four warps")
    monkeypatch.setattr(ragged_attention, "hopper_tiles", lambda size: True)
    mx.random.seed(1)
    rows = [(1, 0, 40), (130, 10, 500), (30, 0, 1100), (20, 0, 20), (1, 3, 400)]
    output = check(Batch(heads, rows, padding=130))
    assert not mx.any(output[-130:]).item()


@runs
@pytest.mark.parametrize("size", ragged_attention.HOPPER_SIZES)
def test_tiles_of_hopper_are_tried_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "architecture", lambda: "sm_90a")
    ragged_attention.hopper_tiles.cache_clear()
    assert ragged_attention.hopper_tiles(size) and not ragged_attention.hopper_tiles(80)
    assert ragged_attention.tile_shape(8, 2, size, chunks=True).rows == 128
    assert ragged_attention.tile_shape(8, 2, size).rows < 128
    ragged_attention.hopper_tiles.cache_clear()


@runs
@pytest.mark.parametrize("heads", [HEADS[3], HEADS[5], HEADS[9], INTEGERS[2], INTEGERS[4]], ids=str)
def test_parts_of_rows_are_added_up(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is the same if a row's keys are divided into parts, some of them empty."""
    batch = Batch(heads, [(1, 0, 1400), (1, 30, 600), (20, 0, 1100), (1, 0, 10)], padding=0)
    items = work_list.work_items(batch.spans, heads.tiles(), batch.lines)
    assert len(set(items[:, work_list.PARTS])) >= 4
    mx.random.seed(1)
    output = check(batch)
    monkeypatch.setattr(work_list, "MIN_DECODE_KEYS", 10_000)
    monkeypatch.setattr(work_list, "MIN_CHUNK_KEYS", 10_000)
    items = work_list.work_items(batch.spans, heads.tiles(), batch.lines)
    assert set(items[:, work_list.PARTS]) == {0, 1}
    mx.random.seed(1)
    assert mx.allclose(output, check(batch), 0.02, 0.01).item()


FRESH = [
    (Heads(64, 4), False, Rope(64, 10_000.0)),
    (Heads(64, 16, "float16", pairs=1, window=100), False, Rope(64, 10_000.0, traditional=True)),
    (Heads(48, 2, "float16", sinks=True), False, None),
    (Heads(128, 4, sinks=True, window=300), True, Rope(128, 10_000.0)),
    (Heads(64, 3, softcap=4.0), True, Rope(32, 10_000.0)),
    (Heads(64, 4, kv=INT8), False, Rope(64, 10_000.0)),
    (Heads(128, 16, "float16", 1, 100, kv=INT8), False, Rope(64, 10_000.0, traditional=True)),
    (Heads(96, 3, sinks=True, kv=INT8), True, None),
]


def known(pool: Any) -> Any:
    """Returns a copy of a pool with zeros in place of NaN."""
    if pool.dtype == mx.int8:
        return mx.contiguous(pool + mx.zeros_like(pool))
    return mx.contiguous(mx.where(mx.isnan(pool), 0, pool))


@runs
@pytest.mark.parametrize(("heads", "hopper", "rope"), FRESH, ids=str)
def test_fresh_lines_are_rotated_and_written(
    heads: Heads, hopper: bool, rope: Rope | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fused kernel gives the same attention, and writes the same pools, as two kernels.

    The kernel also accepts queries, keys and values that are joined in one array.
    """
    if not ON_GPU:
        monkeypatch.setattr(ragged_attention, "hopper_tiles", lambda size: hopper)
    batch = Batch(
        heads, [(1, 0, 1400), (1, 30, 600), (1, 0, 257), (1, 0, 1), (1, 2, 90)], padding=3
    )
    plan, first = batch.plan(), heads.pairs * heads.group
    k, v = batch.qkv[:, first : first + heads.pairs], batch.qkv[:, first + heads.pairs :]
    turns = RotaryEmbedding(plan.ends - 1).turns(rope) if rope else None
    results = []
    for way in ("apart", "fresh", "whole") if turns else ("apart", "fresh"):
        mx.random.seed(1)
        pools = tuple(known(pool) for pool in batch.pools)
        mx.eval(pools)
        scores, q = heads.scores(), batch.q
        if way == "whole" and turns is not None:
            lines = mx.contiguous(batch.qkv).reshape(batch.qkv.shape[0], -1)
            rest = pools, plan, scores, heads.window
            out = ragged_attention.attend_fresh(lines, first, *rest, turns).reshape(q.shape)
        else:
            fresh = ragged_attention.FreshLines(k, v, turns) if way == "fresh" else None
            if fresh is None:
                slots = mx.array(batch.slots)
                q = block_write.rotate_and_write(q, k, v, pools, slots, turns)
            out = ragged_attention.attend(q, pools, plan, scores, heads.window, fresh)
        mx.eval(out)
        assert not mx.any(plan.arrived).item() and not mx.any(out[5:]).item()
        results.append((out, *pools))
    for arrays in zip(*results, strict=True):
        for other in arrays[1:]:
            if other.dtype == mx.int8:  # roundings may differ
                apart = arrays[0].astype(mx.int32) - other.astype(mx.int32)
                assert mx.max(mx.abs(apart)).item() <= 1
            else:
                assert mx.allclose(arrays[0], other, 0.01, 0.01).item()
    assert not mx.array_equal(results[1][1], known(batch.pools[0])).item()


@runs
def test_lines_that_see_nothing_are_zeros() -> None:
    batch = Batch(Heads(64, 4), [(1, 0, 40), (20, 0, 40)], padding=1)
    plan = batch.plan()
    begins = mx.array([40] * 22, dtype=mx.int32)
    items = np.array(plan.items)
    items[items[:, work_list.LINES] == 1, work_list.LOW] = 40
    plan = RaggedPlan(begins, plan.ends, plan.tables, mx.array(items), plan.arrived, plan.partial)
    output = ragged_attention.attend(batch.q, batch.pools, plan, ScoreParams(0.1))
    assert not mx.any(output).item()


ROPES = {
    "none": None,
    "whole": Rope(64, 10_000.0),
    "part": Rope(16, 1.0, freqs=tuple(1.5**i for i in range(8)), gain=1.25),
    "traditional": Rope(64, 500_000.0, scale=0.5, traditional=True),
    "traditional, pairs": Rope(12, 500.0, traditional=True),
    "four at a time": Rope(24, 500.0),
    "one at a time": Rope(6, 500.0, traditional=True),
}


@runs
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_lines_are_rotated_and_written(rope: str, contiguous: bool) -> None:
    """Only the slots of the new tokens are written; the queries of padding become zeros."""
    turn, kind = ROPES[rope], mx.float16 if contiguous else mx.bfloat16
    rng = np.random.default_rng(len(rope))
    qkv = mx.array(rng.normal(size=(5, 10, 64)).astype(np.float32)).astype(kind)
    qkv[3] = NONE
    if contiguous:
        q, k, v = (mx.contiguous(part) for part in mx.split(qkv, [6, 8], axis=1))
    else:  # views whose numbers are not contiguous
        qkv = mx.contiguous(qkv.swapaxes(1, 2)).swapaxes(1, 2)
        q, k, v = mx.split(qkv, [6, 8], axis=1)
    before = [mx.array(rng.normal(size=(3, 2, BLOCK, 64))).astype(kind) for _ in "kv"]
    pools = tuple(mx.array(np.array(array.astype(mx.float32))).astype(kind) for array in before)
    slots = [5, 2 * BLOCK + 255, BLOCK, -1, 6]
    positions = mx.array([7, 1000, 0, 0, 8], dtype=mx.int32)
    rotation = RotaryEmbedding(positions)
    mx.eval(pools, before, qkv)
    queries = block_write.rotate_and_write(
        q, k, v, pools, mx.array(slots, dtype=mx.int32), rotation.turns(turn) if turn else None
    )
    mx.eval(queries)
    asked, keys = (rotation.by_table(heads, turn) if turn else heads for heads in (q, k))
    assert not mx.any(queries[3]).item()
    for line, slot in enumerate(slots):
        if slot < 0:
            continue
        assert mx.allclose(queries[line], asked[line], 0.01, 0.02).item()
        for old, new in zip(before, (keys, v), strict=True):
            old[slot // BLOCK, :, slot % BLOCK] = new[line]
    for pool, expected in zip(pools, before, strict=True):
        assert mx.allclose(pool, expected, 0.01, 0.02).item()


@runs
@pytest.mark.parametrize("rope", ["none", "whole", "part", "traditional, pairs"])
def test_lines_are_rotated_and_stored_as_integers(rope: str) -> None:
    """The integers equal those of MLX's operations, and nothing else is written."""
    turn, kind = ROPES[rope], mx.bfloat16
    rng = np.random.default_rng(len(rope))
    qkv = mx.array(rng.normal(size=(5, 10, 64)).astype(np.float32)).astype(kind)
    qkv[3] = NONE
    qkv[4, 6:, 5] = NONE  # one number of a stored head
    qkv[0, 8] = 0
    q, k, v = mx.split(qkv, [6, 8], axis=1)
    before = [
        (100 * mx.random.normal((3, 2, BLOCK, size), key=mx.random.key(size + n))).astype(dtype)
        for n, (size, dtype) in enumerate(((64, mx.int8),) * 2 + ((1, mx.bfloat16),) * 2)
    ]
    pools = tuple(mx.contiguous(array + mx.zeros_like(array)) for array in before)
    slots = [5, 2 * BLOCK + 255, BLOCK, -1, 6]
    rotation = RotaryEmbedding(mx.array([7, 1000, 0, 0, 8], dtype=mx.int32))
    mx.eval(pools, before, qkv)
    turns = rotation.turns(turn) if turn else None
    queries = block_write.rotate_and_write(q, k, v, pools, mx.array(slots, dtype=mx.int32), turns)
    mx.eval(queries)
    asked, keys = (rotation.by_table(heads, turn) if turn else heads for heads in (q, k))
    assert not mx.any(queries[3]).item()
    stored = int8_numbers.stored((keys, v), kind, INT8)
    for line, slot in enumerate(slots):
        if slot < 0:
            continue
        assert mx.allclose(queries[line], asked[line], 0.01, 0.02).item()
        for old, new in zip(before, stored, strict=True):
            old[slot // BLOCK, :, slot % BLOCK] = new[line]
    for number, (pool, expected) in enumerate(zip(pools, before, strict=True)):
        is_key, is_scale = number % 2 == 0, number > 1
        if is_scale:
            assert mx.allclose(pool, expected, 0.01, 0.001, equal_nan=True).item()
            assert mx.isnan(pool[0, :, 6]).all().item()
        apart = mx.abs(pool.astype(mx.int32) - expected.astype(mx.int32))
        if not is_scale:
            apart[0, :, 6] = 0  # integers whose scale is NaN
            assert mx.max(apart).item() <= is_key  # the last digit of a rotation may differ


@runs
def test_the_kernels_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ragged_attention.works(2, 2, 64, mx.bfloat16)
    assert ragged_attention.works(2, 2, 64, mx.bfloat16, quantised=True)
    ragged_attention.works.cache_clear()
    monkeypatch.setattr(
        block_write, "rotate_and_write", lambda q, k, v, pools, slots, turns: mx.zeros_like(q)
    )
    assert not ragged_attention.works(2, 2, 64, mx.bfloat16)
    assert not ragged_attention.works(2, 2, 64, mx.bfloat16, quantised=True)
    ragged_attention.works.cache_clear()


def test_shapes_that_ragged_attention_supports() -> None:
    assert ragged_attention.supports(32, 8, 128, 128, mx.bfloat16)
    assert not ragged_attention.supports(32, 8, 128, 64, mx.bfloat16)
    assert not ragged_attention.supports(32, 8, 128, 128, mx.float32)
    assert not ragged_attention.supports(34, 2, 128, 128, mx.float16)
    assert not ragged_attention.supports(32, 8, 72, 72, mx.bfloat16)
    assert ragged_attention.supports(32, 8, 80, 80, mx.bfloat16)
    assert not ragged_attention.supports(32, 8, 80, 80, mx.bfloat16, quantised=True)
    assert ragged_attention.supports(32, 8, 96, 96, mx.float16, quantised=True)
    for size, group in itertools.product(ragged_attention.HEAD_SIZES, (1, 16)):
        tiles = ragged_attention.tile_shape(8 * group, 8, size)
        for hopper in (False, *([True] if size in ragged_attention.HOPPER_SIZES else [])):
            shared = work_list.shared_bytes(tiles, size, hopper)
            less = work_list.shared_bytes(tiles, size, hopper, quantised=True)
            assert less <= shared <= 110_000  # two thread blocks fit on a Hopper multiprocessor
