"""Rows of 8-bit keys and values: attention reads the same numbers, however they were written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.dot_product import causal_attention  # noqa: E402
from mlxpool.worker.attention.in_pool import kernel_trials  # noqa: E402
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedStore  # noqa: E402
from mlxpool.worker.attention.in_slabs.slab_batch import SlabRowBatch  # noqa: E402
from mlxpool.worker.attention.in_slabs.slabs import SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_copies import RowStore  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape, cache_kinds  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.caches.stored import INT8  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.prefix.tree_cache import TreeCache  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402

CAPACITY, SIZE, WINDOW = 1200, 8, 60
PLAIN = KeyValueSpec(2, SIZE, SIZE)
FULL = RowShape((PLAIN,) * 2, mx.float32, CAPACITY, chunk=300, kv=INT8)
WINDOWED = RowShape(
    (KeyValueSpec(2, SIZE, SIZE, window=WINDOW), PLAIN), mx.float32, CAPACITY, 300, kv=INT8
)
DRAW = np.random.default_rng(5)
# Keys and values [layers, 2, KV, tokens, D] of the only text of these tests; some are large.
TEXT = DRAW.normal(size=(2, 2, 2, CAPACITY, SIZE)).astype(np.float32)
TEXT *= np.exp(2 * DRAW.normal(size=(2, 2, 2, CAPACITY, 1))).astype(np.float32)

ROWS: dict[str, Callable[[], Any]] = {
    "rows": lambda: RowCache(FULL),
    "slabs": lambda: SlabRow(Slabs(FULL, 3)),
    "pool": lambda: PagedStore(KVPool(FULL, 6, in_place=False)).new_row(),
}


def keys_and_values(layer: int, start: int, end: int) -> tuple[Any, Any]:
    """Returns the keys and values [1, KV, n, D] of tokens of the text."""
    keys, values = (mx.array(TEXT[layer, side, :, start:end])[None] for side in range(2))
    return keys, values


def append(row: Any, count: int) -> list[tuple[Any, ...]]:
    """Writes the next tokens of the text; returns each layer's arrays as attention reads them."""
    start, end = row.offset, row.offset + count
    arrays = [
        FULL.read(row.write(layer, *keys_and_values(layer, start, end))) for layer in range(2)
    ]
    row.advance(count)
    mx.eval(arrays, row.arrays())
    return arrays


def expected(layer: int, start: int, end: int) -> tuple[Any, ...]:
    """Returns the numbers that attention must read for tokens of the text."""
    return FULL.read(FULL.stored(keys_and_values(layer, start, end)))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "trim"]), st.integers(1, 400)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=15, deadline=None)
@given(operations=OPERATIONS)
def test_every_pass_reads_the_same_bits_of_a_token(
    name: str, operations: list[tuple[str, int]]
) -> None:
    """A pass reads the keys and values of its own tokens as all later passes read them."""
    row = ROWS[name]()
    for what, tokens in operations:
        if what == "trim":
            row.trim(tokens)
        elif row.offset + tokens <= CAPACITY:
            for layer, read in enumerate(append(row, tokens)):
                for array, other in zip(read, expected(layer, 0, row.offset), strict=True):
                    assert array.dtype == mx.float32 and mx.array_equal(array, other).item()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 250), min_size=1, max_size=8))
def test_windows_read_the_same_bits(counts: list[int]) -> None:
    row = RowCache(WINDOWED)
    for count in counts:
        if row.offset + count > CAPACITY:
            break
        windowed, full = append(row, count)
        start = max(0, row.offset - count - WINDOW + 1)
        for layer, read, first in ((0, windowed, start), (1, full, 0)):
            for array, other in zip(read, expected(layer, first, row.offset), strict=True):
                assert mx.array_equal(array, other).item()
    assert row.nbytes <= WINDOWED.fixed_bytes + WINDOWED.token_bytes * (row.offset + 256)


@pytest.mark.parametrize("shape", [FULL, WINDOWED], ids=["full", "windows"])
def test_prefixes_are_kept_and_copied_as_they_are_stored(shape: RowShape) -> None:
    """A row from the tree has the same bits, after pieces of the tree were cut and joined."""
    store = RowStore(partial(RowCache, shape), cache_kinds(shape))
    cache = TreeCache(store, 10**9)
    text = [*range(500)]
    row, _ = cache.begin(text)
    append(row, 200)
    append(row, 300)
    cache.close(row, text)
    assert cache.nbytes <= 500 * FULL.token_bytes
    side, cached = cache.begin([*text[:490], 7, 8])
    if shape is FULL:
        assert cached == 490
        cache.close(side, text[:490])
    again, cached = cache.begin([*text, 1])
    assert cached == 500
    for layer, read in enumerate(append(again, 40)):
        for array in read:
            end = again.offset
            other = expected(layer, end - array.shape[2], end)
            assert any(mx.array_equal(array, each).item() for each in other)


@pytest.mark.parametrize("layout", ["rows", "slabs"])
def test_a_batch_attends_to_what_is_stored(layout: str) -> None:
    """A pass has rows that decode one token each, and a row that reads a chunk.

    Each row attends as it does alone.
    """
    slabs = Slabs(FULL, 2)
    lengths = [0, 5, 300, 600, 255]
    rows = [RowCache(FULL) if layout == "rows" else SlabRow(slabs) for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        if length:
            append(row, length)
    counts = [1, 1, 1, 1, 30]
    spans = [RowSpan(row, count) for row, count in zip(rows, counts, strict=True)]
    batch = (RowBatch if layout == "rows" else SlabRowBatch)(spans, None)
    q = mx.array(DRAW.normal(size=(sum(counts), 4, SIZE)).astype(np.float32))
    places = [
        at
        for length, count in zip(lengths, counts, strict=True)
        for at in range(length, length + count)
    ]
    k, v = (mx.array(TEXT[0, side][:, places].swapaxes(0, 1)) for side in range(2))
    output = batch.attend(0, q, k, v, ScoreParams(0.3))
    first = 0
    for length, count in zip(lengths, counts, strict=True):
        keys, values = expected(0, 0, length + count)
        here = slice(first, first + count)
        wanted = causal_attention(q[here], keys, values, ScoreParams(0.3))
        assert mx.allclose(output[here], wanted, rtol=1e-4, atol=1e-5).item()
        first += count


def test_blocks_of_a_pool_are_copied_with_their_scales() -> None:
    pool = KVPool(FULL, 3, in_place=False)
    row = PagedStore(pool).new_row()
    append(row, 100)
    pool.copy(row.table[0], 2)
    for arrays in pool.arrays:
        assert [array.shape for array in arrays] == [
            (3, 2, KV_BLOCK_TOKENS, size) for size in (SIZE, SIZE, 1, 1)
        ]
        for array in arrays:
            assert mx.array_equal(array[2], array[row.table[0]]).item() and mx.any(array[2]).item()
    assert pool.nbytes == 3 * KV_BLOCK_TOKENS * FULL.token_bytes


@pytest.mark.usefixtures("machine")
def test_kernels_write_integers_and_scales_into_blocks() -> None:
    """The kernel that only quantises and writes gives the same numbers as MLX's operations.

    Passes with images use it, because the other kernels also rotate the keys.
    """
    assert kernel_trials.kernels_write(FULL)
    row = PagedStore(KVPool(FULL, 3, in_place=True)).new_row()
    for count in (250, 20, 1):
        for layer, read in enumerate(append(row, count)):
            for array, other in zip(read, expected(layer, 0, row.offset), strict=True):
                assert mx.array_equal(array, other).item()
