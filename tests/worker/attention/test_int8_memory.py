"""Dequantised keys and values take the same memory for many rows as for one row."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.slab_batch import SlabRowBatch  # noqa: E402
from mlxpool.worker.attention.in_slabs.slabs import SLAB_BLOCKS, SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import READS_AT_A_TIME, RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.caches.stored import INT8  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402

pytestmark = pytest.mark.skipif(device.on_gpu(), reason="MLX's operations on a CPU are tested here")

PAIRS, SIZE, LAYERS, CAPACITY, ROWS = 2, 64, 3, 1024, 48
SHAPE = RowShape((KeyValueSpec(PAIRS, SIZE, SIZE),) * LAYERS, mx.float32, CAPACITY, 300, kv=INT8)
TOKEN_BYTES = 2 * PAIRS * SIZE * 4  # bytes of a token that attention reads in a layer
BESIDE = 3 * 2**20  # bytes of scores and sums


def rows_of(layout: str, tokens: int) -> list[Any]:
    """Returns ROWS rows of a layout, each with `tokens` tokens."""
    slabs = Slabs(SHAPE)
    new = mx.random.normal((1, PAIRS, tokens, SIZE))
    rows: list[Any] = []
    for _ in range(ROWS):
        row = RowCache(SHAPE) if layout == "rows" else SlabRow(slabs)
        for layer in range(LAYERS):
            row.write(layer, new, new)
        row.advance(tokens)
        mx.eval(row.arrays())
        rows.append(row)
    return rows


def peak_of(layout: str, rows: list[Any], spans: list[RowSpan]) -> int:
    """Returns the peak bytes of attention in all layers, without the memory of the rows."""
    count = sum(span.count for span in spans)
    x = mx.random.normal((count, 2 * PAIRS, SIZE))
    mx.eval(x)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    batch = (RowBatch if layout == "rows" else SlabRowBatch)(spans, None)
    for layer in range(LAYERS):
        x = batch.attend(layer, x, x[:, :PAIRS], x[:, PAIRS:], ScoreParams(0.1))
    batch.done()
    mx.eval(x, *(row.arrays() for row in rows))
    return int(mx.get_peak_memory() - before)


# For each span of a pass: its tokens, and its tokens that give logits.
PASSES = {"tokens": [(1, 1)] * ROWS, "drafts": [(4, 4)] * ROWS, "chunks": [(9, 1)] * ROWS}


@pytest.mark.parametrize("layout", ["rows", "slabs"])
@pytest.mark.parametrize("name", PASSES)
def test_memory_of_readings_is_that_of_a_few(layout: str, name: str) -> None:
    rows = rows_of(layout, 1000)
    spans = [
        RowSpan(row, count, lines) for row, (count, lines) in zip(rows, PASSES[name], strict=True)
    ]
    at_once = SLAB_BLOCKS * KV_BLOCK_TOKENS if layout == "slabs" else CAPACITY
    bound = SHAPE.dequantised_bytes(at_once)
    assert bound == READS_AT_A_TIME * at_once * TOKEN_BYTES
    assert 2 * bound < ROWS * 1000 * TOKEN_BYTES
    assert peak_of(layout, rows, spans) <= bound + BESIDE
