"""Passes over the same decoding rows get the same input numbers as passes that are built anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_pool import block_tables, ragged_runner  # noqa: E402
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedStore  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.in_pool.plan_shape import PlanShape  # noqa: E402
from mlxpool.worker.attention.in_pool.ragged_batch import AttentionProbe, ends_part  # noqa: E402
from mlxpool.worker.attention.in_pool.ragged_runner import RaggedRunner  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.kernels import kernel_cache  # noqa: E402
from mlxpool.worker.kernels.work_list import TileShape  # noqa: E402
from mlxpool.worker.prefix.shared_blocks import BlockRun  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402
from mlxpool.worker.transfers.uploads import Uploads  # noqa: E402

ROWS, BLOCKS, CAPACITY = 5, 60, 6 * KV_BLOCK_TOKENS
TILES = TileShape(group=2, kv_heads=2)
CHUNK_TILES = TileShape(group=2, kv_heads=2, rows=128)
SHAPE = RowShape((KeyValueSpec(2, 8, 8),), mx.float32, CAPACITY, keeps_all=True)


class RecordingRunner(RaggedRunner):
    """A runner that computes nothing: each pass appends its input numbers to `recorded`.

    `parts`: the arrays that each pass returns besides its outputs. `begin` submits them to the
    device, one after the other.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[list[int]] = []
        self.parts: list[Any] = []  # parts of each pass

    def _compiled(self, shape: PlanShape) -> Any:
        def note(plan: Any, drawn: Any) -> tuple[list[Any], list[Any]]:
            self.recorded.append(np.array(plan).tolist())
            return [mx.zeros((shape.lines, 4))], self.parts

        return note


class Passes:
    """A RaggedRunner that computes nothing and records the input numbers of its passes."""

    def __init__(self) -> None:
        pool = KVPool(SHAPE, BLOCKS, in_place=False)
        self.store = PagedStore(pool)
        probe = AttentionProbe(mx.float32)
        probe.shapes, probe.chunk_shapes = {TILES}, {CHUNK_TILES}
        self.uploads = Uploads()
        model: Any = None
        self.runner = RecordingRunner(model, self.store, pool, ROWS, probe, self.uploads)
        self.numbers = self.runner.recorded
        self.rows: list[Any] = []  # rows of the store
        self.kept: list[BlockRun] = []

    def enter(self, tokens: int) -> None:
        row: Any = self.store.new_row()
        self.rows.append(row)
        self.uploads.begin()
        self.runner.step([RowSpan(row, tokens)], [7] * tokens, None, [0])

    def decode(self, spans: list[RowSpan]) -> None:
        self.uploads.begin()
        ids = list(range(-1, -1 - len(spans), -1))
        self.runner.step(spans, ids, None, list(range(len(spans))))

    def change(self, event: str, number: int, amount: int) -> None:
        """Changes row `number` between two passes, as `event` demands."""
        if event == "leave":
            self.rows.pop(number).release()
            return
        row = self.rows[number]
        if event == "rewind":  # as `withdraw` does; the spans stay the same
            row.trim(max(1, row.offset - amount))
        elif event == "keep":  # so that the row has to copy its last block
            self.kept.append(self.store.keep(row, 0, row.offset))
        elif self.kept:
            self.store.free(self.kept.pop(0))


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the writes to tables on the device."""

    def written(*_: Any) -> Any:
        return mx.zeros((1,), dtype=mx.int32)

    monkeypatch.setattr(block_tables, "write_in_place", written)
    monkeypatch.setattr(block_tables, "_update_kernel", lambda: None)


def test_chunks_have_tiles_of_their_own_beside_rows_and_alone() -> None:
    """Chunks have their own tile shape.

    Passes that check drafts use the tile shape of rows, so that fewer passes are compiled.
    """
    passes = Passes()
    new: Any = passes.store.new_row
    row, chunk = RowSpan(new(), 1), RowSpan(new(), 20)
    for spans, wanted in (
        ([row, chunk], [0]),
        ([row, chunk], [0, 1]),
        ([chunk], []),
        ([chunk], [0]),
    ):
        shape = passes.runner.shape_of(spans, wanted)
        assert shape.chunks and shape.tiles == (CHUNK_TILES,)
    check = RowSpan(new(), 4, 4)
    for spans, wanted in (([row], [0]), ([check], [0]), ([row, check, chunk], [0, 1])):
        shape = passes.runner.shape_of(spans, wanted)
        assert not shape.chunks and shape.tiles == (TILES,)


def test_a_shape_whose_pass_failed_is_new_again() -> None:
    """A shape whose pass failed is treated as not yet compiled.

    A shape of a pass that was evaluated before the failure is still treated as compiled.
    """
    runner, new = Passes().runner, Passes().store.new_row
    row: Any = new()
    known, other = [RowSpan(row, 1)], [RowSpan(row, 20)]
    assert [runner.is_new(known, [0]), runner.is_new(known, [0])] == [True, False]
    runner.kinds.evaluated()
    assert [runner.is_new(other, [0]), runner.is_new(other, [0])] == [True, False]
    runner.kinds.failed()
    assert [runner.is_new(known, [0]), runner.is_new(other, [0])] == [False, True]


def test_parts_of_a_pass_grow_by_two_layers() -> None:
    assert [layer for layer in range(80) if ends_part(layer)] == [1, 4, 9, 16, 25, 36, 49, 64]


@pytest.mark.usefixtures("no_device")
def test_a_pass_is_begun_in_parts_while_no_row_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that only reads prompts is submitted in parts.

    It is submitted whole if it takes tokens of a pass in flight, if memory is measured, or if
    kernels are only listed.
    """
    begun: list[Any] = []
    monkeypatch.setattr(ragged_runner, "begin", begun.append)
    passes = Passes()
    passes.runner.parts = [mx.zeros((1,)), mx.ones((1,))]
    row: Any = passes.store.new_row()
    layout = PagedLayout.__new__(PagedLayout)
    layout.ragged = passes.runner

    def step(drawn: Any) -> None:
        passes.uploads.begin()
        passes.runner.step([RowSpan(row, 20)], [7] * 20, drawn, [])

    step(None)
    assert begun == [passes.runner.parts]
    step(mx.zeros((ROWS,), dtype=mx.int32))
    with layout.whole_passes():
        step(None)
    with kernel_cache.collecting():
        step(None)
    assert begun == [passes.runner.parts]
    step(None)
    assert begun == [passes.runner.parts] * 2


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("seed", range(6))
def test_passes_over_the_same_rows(seed: int) -> None:
    """While the same rows decode, a runner gets the same object `spans` again.

    Its input numbers equal those of a runner that always gets a new object.
    """
    again, anew = both = Passes(), Passes()
    spans: list[RowSpan] = []
    repeated = 0
    draw = random.Random(seed)
    for _ in range(150):
        event = draw.choice(["decode"] * 12 + ["enter", "leave", "rewind", "keep", "free"])
        if event == "enter" and len(again.rows) < ROWS:
            tokens = draw.randrange(1, 4) * KV_BLOCK_TOKENS - draw.randrange(12)
            for side in both:
                side.enter(tokens)
        elif event not in ("enter", "decode") and len(again.rows) > 1:
            number, amount = draw.randrange(len(again.rows)), draw.randrange(1, 20)
            for side in both:
                side.change(event, number, amount)
        elif again.rows and max(row.offset for row in again.rows) < CAPACITY:
            if [span.row for span in spans] == again.rows:
                repeated += again.runner.decodes(spans)
            else:
                spans = [RowSpan(row, 1) for row in again.rows]
            again.decode(spans)
            anew.decode([RowSpan(row, 1) for row in anew.rows])
        assert again.numbers == anew.numbers
        assert [row.table for row in again.rows] == [row.table for row in anew.rows]
        for side in both:
            side.numbers.clear()
    assert repeated > 40
    tables = again.runner._tables.numbers, anew.runner._tables.numbers
    assert (tables[0] == tables[1]).all()
