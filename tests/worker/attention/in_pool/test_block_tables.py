"""The block tables on the device equal the rows' tables while rows come, grow, rewind and leave."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from mlxpool.worker.attention.in_pool.block_tables import BlockTables  # noqa: E402
from mlxpool.worker.prefix.shared_blocks import BlockPool, BlockRow, BlockStore  # noqa: E402
from mlxpool.worker.transfers.uploads import Uploads  # noqa: E402
from support import simt  # noqa: E402

SIZE, ENTRIES, ROWS = 4, 8, 3


@pytest.mark.parametrize("seed", range(5))
def test_the_device_has_the_tables_of_the_rows_of_a_pass(seed: int, on_cuda: bool) -> None:
    """Simulates forward passes, before which rows enter, grow, share blocks, rewind or leave."""
    draw = random.Random(seed)
    store = BlockStore(BlockPool(200), SIZE, 1, lambda source, target: None)
    uploads = Uploads()
    with nullcontext() if on_cuda else simt.simulated():
        _passes(draw, store, uploads)


def _passes(draw: random.Random, store: BlockStore, uploads: Uploads) -> None:
    tables = BlockTables(ROWS, ENTRIES, uploads)
    rows: list[BlockRow] = []
    for _ in range(60):
        uploads.begin()
        if len(rows) < ROWS and draw.random() < 0.5:
            rows.append(store.new_row())
        for row in rows:
            if draw.random() < 0.2:
                store.rewind(row, draw.randrange(row.offset + 1))
            if row.offset and draw.random() < 0.2:
                store.keep(row, 0, row.offset)  # so that the row has to copy its last block
            row_end = min(row.offset + draw.randrange(1, 6), SIZE * ENTRIES)
            store.reserve(row, row_end)
            row.offset = row_end
        inside = draw.sample(rows, draw.randrange(1, len(rows) + 1)) if rows else []
        if inside:
            lines = tables.lines_of(inside)
            written = tables.update(inside, lines)
            if written is not None:
                mx.eval(written)
            device = np.array(tables.array).reshape(ROWS, ENTRIES)
            for line, row in zip(lines, inside, strict=True):
                assert device[line, : len(row.table)].tolist() == row.table
                assert tables.numbers[line, : len(row.table)].tolist() == row.table
            assert tables.update(inside, lines) is None  # nothing has changed since the last update
        if rows and draw.random() < 0.3:
            store.release(rows.pop(draw.randrange(len(rows))))
