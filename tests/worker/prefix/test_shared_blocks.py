"""Blocks shared by rows and the tree: reference counts, and copies of at most one block.

Needs no MLX.
"""

from __future__ import annotations

import pytest

from mlxpool.common.errors import OutOfMemory
from mlxpool.worker.prefix.shared_blocks import BlockPool, BlockRow, BlockRun
from mlxpool.worker.prefix.tree_cache import TreeCache
from support.prefix_stores import CELL, PagedMemory, cells_of

SIZE = 4
BLOCK = CELL * SIZE


def test_a_pool_counts_references() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert (first, second, pool.free) == (0, 1, 0)
    pool.add_reference(first)
    pool.drop_reference(first)
    assert (pool.free, pool.references(first)) == (0, 1)
    pool.drop_reference(first)
    assert pool.free == 1
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.drop_reference(first)


def test_a_pool_without_free_blocks_raises() -> None:
    pool = BlockPool(3)
    for _ in range(3):
        pool.allocate()
    with pytest.raises(OutOfMemory, match="all 3 blocks"):
        pool.allocate()


def begun(
    memory: PagedMemory, cache: TreeCache[BlockRow, BlockRun, None], prompt: list[int]
) -> int:
    """Serves a request; returns the number of blocks copied for it."""
    before = memory.copies
    row, cached = cache.begin(prompt)
    assert memory.read(row) == cells_of(prompt)[:cached]
    memory.feed(row, prompt[cached:])
    assert memory.read(row) == cells_of(prompt)
    cache.close(row, prompt)
    assert row.table == []
    return memory.copies - before


@pytest.mark.parametrize("shared", [*range(1, 13)])
def test_begin_copies_a_partly_filled_block_only(shared: int) -> None:
    memory = PagedMemory(50, SIZE)
    cache = TreeCache(memory.store, 10**9)
    assert begun(memory, cache, [*range(12)]) == 0
    assert begun(memory, cache, [*range(shared), 90, 91]) == (shared % SIZE != 0)
    row, cached = cache.begin([*range(12), 1])  # both branches are complete
    assert (cached, memory.read(row)) == (12, cells_of(range(12)))


def test_close_copies_nothing_and_frees_unreferenced_blocks() -> None:
    memory = PagedMemory(50, SIZE)
    cache = TreeCache(memory.store, 10**9)
    row, _ = cache.begin([*range(10)])
    memory.feed(row, [*range(10)])
    cache.close(row, [*range(6)])
    assert (memory.copies, memory.pool.free, cache.nbytes) == (0, 48, 2 * BLOCK)
    assert cache.clear() == 2 * BLOCK
    assert memory.pool.free == 50


def test_a_row_copies_a_kept_block_before_it_writes() -> None:
    memory = PagedMemory(50, SIZE)
    cache = TreeCache(memory.store, 10**9)
    prompt = [*range(10)]
    row, _ = cache.begin(prompt)
    memory.feed(row, prompt)
    cache.keep(row, prompt)
    shared = list(row.table)
    memory.feed(row, [77])
    assert (row.table[:2], row.table[2] != shared[2], memory.copies) == (shared[:2], True, 1)
    cache.close(row, [*prompt, 77])
    row, _ = cache.begin([*prompt, 78])
    assert memory.read(row) == cells_of(prompt)


def test_rows_of_one_path_share_its_blocks() -> None:
    memory = PagedMemory(50, SIZE)
    cache = TreeCache(memory.store, 10**9)
    begun(memory, cache, [*range(16)])
    rows = [cache.begin([*range(16), 100 + n])[0] for n in range(5)]
    assert memory.pool.free == 50 - 4
    for n, row in enumerate(rows):
        memory.feed(row, [100 + n])
    assert (memory.pool.free, memory.copies) == (50 - 4 - 5, 0)


def test_a_row_without_a_free_block_keeps_its_length() -> None:
    memory = PagedMemory(2, SIZE)
    cache = TreeCache(memory.store, 10**9)
    row, _ = cache.begin([*range(9)])
    memory.feed(row, [*range(8)])
    with pytest.raises(OutOfMemory):
        memory.feed(row, [8])
    assert memory.read(row) == cells_of(range(8))
    cache.close(row, [*range(8)])
    assert cache.shrink(1) == 2 * BLOCK and memory.pool.free == 2


def test_the_budget_counts_blocks() -> None:
    memory = PagedMemory(50, SIZE)
    cache = TreeCache(memory.store, 2 * BLOCK + BLOCK // 2)
    begun(memory, cache, [*range(20)])
    assert cache.nbytes == 2 * BLOCK
    row, cached = cache.begin([*range(20)])
    assert (cached, memory.read(row)) == (8, cells_of(range(8)))


def test_rewind_frees_whole_blocks() -> None:
    memory = PagedMemory(50, SIZE)
    row = memory.store.new_row()
    memory.feed(row, [*range(10)])
    assert memory.store.rewind(row, 8) and (len(row.table), memory.pool.free) == (2, 48)
    assert memory.store.rewind(row, 7) and len(row.table) == 2
    assert memory.store.rewind(row, 0) and (row.table, memory.pool.free) == ([], 50)
