"""One row in slabs that checks drafts in compiled passes gives the logits of the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.check_runner import (  # noqa: E402
    COMPILED_AFTER,
    MAX_LINES,
    SlabCheckRunner,
    check_sizes,
)
from mlxpool.worker.attention.in_slabs.slabs import SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402

PAIRS, GROUPS, SIZE, LAYERS = 2, 2, 4, 2
SHAPES = {
    kv: RowShape((KeyValueSpec(PAIRS, SIZE, SIZE),) * LAYERS, mx.float32, 3000, kv=kv)
    for kv in ("auto", "int8")
}
DRAW = np.random.default_rng(0)


class Attention:
    """A model of attention only, with a softcap: states [T, heads * D], and twice these."""

    table = mx.array(DRAW.standard_normal((50, PAIRS * GROUPS * SIZE), dtype=np.float32))

    def hidden_states(self, tokens: Any, step: Any) -> Any:
        x = self.table[tokens].reshape(-1, PAIRS * GROUPS, SIZE)
        for layer in range(LAYERS):
            parts = x[:, :PAIRS], x[:, -PAIRS:]
            x = x + step.attend(layer, x, *parts, ScoreParams(0.5, softcap=20.0))
        return x.reshape(x.shape[0], -1)

    def logits_of(self, hidden: Any) -> Any:
        return 2 * hidden

    def __call__(self, tokens: Any, step: Any) -> Any:
        return self.logits_of(self.hidden_states(tokens, step))


def filled(rows: list[Any], shape: RowShape, tokens: int) -> None:
    """Writes the same tokens into rows of several kinds."""
    for layer in range(LAYERS):
        parts = DRAW.standard_normal((2, 1, PAIRS, tokens, SIZE), dtype=np.float32)
        for row in rows:
            row.write(layer, *map(mx.array, parts))
    for row in rows:
        row.advance(tokens)
        mx.eval(row.arrays())


def alone(model: Attention, row: RowCache, ids: Any) -> Any:
    """The states of all inputs of a row, whose keys and values are arrays of its own."""
    step = RowBatch([RowSpan(row, len(ids), lines=len(ids))], [0])
    out = model.hidden_states(ids, step)
    step.done()
    return out


def inputs(count: int) -> Any:
    return mx.array(DRAW.integers(0, 50, count).astype(np.int32))


@pytest.mark.parametrize("kv", SHAPES)
@pytest.mark.parametrize("before", [0, 2])
def test_checks_give_what_the_row_alone_gives(kv: str, before: int) -> None:
    """Of every number of inputs, across borders of blocks, behind blocks of other rows."""
    shape, model = SHAPES[kv], Attention()
    slabs = Slabs(shape, 8)
    other = SlabRow(slabs)
    if before:
        filled([other], shape, before * 256)
    pair = SlabRow(slabs), RowCache(shape)
    filled([*pair], shape, 240)
    runner = SlabCheckRunner(model, shape, states=True)
    for count in (2, 3, 4, 9, 12, 16, 5, 250, 2, 300, 8):
        if count > MAX_LINES:
            filled([*pair], shape, count)
            continue
        ids = inputs(count)
        found = runner(pair[0], ids)
        wanted = alone(model, pair[1], ids)
        assert found.drawn is not None and found.drawn.shape == wanted.shape
        assert mx.allclose(found.drawn, wanted, rtol=1e-4, atol=1e-5).item()
        assert mx.array_equal(found.logits, 2 * found.drawn).item()
        kept = pair[1].offset - count // 2  # some of the drafts were wrong
        for row in pair:
            row.trim(kept)
    for layer in range(LAYERS):
        held = (row.part(layer, 0, kept) for row in pair)
        for one, same in zip(*map(shape.read, held), strict=True):
            assert mx.allclose(one, same, rtol=1e-4, atol=1e-5).item()


def test_a_kind_is_compiled_when_it_has_come_often() -> None:
    """The first passes of it are left to others; few kinds are kept."""
    shape = SHAPES["auto"]
    row, runner = SlabRow(Slabs(shape)), SlabCheckRunner(Attention(), shape, max_passes=2)
    for count in (2, 3, 6):
        for number in range(COMPILED_AFTER + 2):
            due = number >= COMPILED_AFTER
            assert runner.compiles(row, count) == (number == COMPILED_AFTER)
            assert runner.serves(row, count) == due
            if due:
                mx.eval(runner(row, inputs(count)).logits)
    assert len(runner._pass._passes) == 2
    assert not runner.serves(row, 2) and runner.serves(row, 4)  # the oldest was dropped


def test_a_row_whose_blocks_are_apart_is_not_served() -> None:
    shape = SHAPES["auto"]
    slabs, runner = Slabs(shape, 4), SlabCheckRunner(Attention(), shape)
    row, other = SlabRow(slabs), SlabRow(slabs)
    row.reserve(200)
    other.reserve(200)
    row.offset = 200
    for _ in range(COMPILED_AFTER + 1):
        assert not runner.serves(row, 100)  # too many
        served = runner.serves(row, 2)
    assert served
    row.offset = 255
    for _ in range(COMPILED_AFTER + 1):
        assert not runner.serves(row, 3)


def test_sizes_of_checks() -> None:
    assert [*check_sizes(1)] == [2]
    assert [*check_sizes(3)] == [2, 4]
    assert [*check_sizes(4)] == [2, 4, 8]
    assert [*check_sizes(256)] == [2, 4, 8, MAX_LINES]
