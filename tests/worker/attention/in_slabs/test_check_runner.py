"""One row in slabs that checks drafts in compiled passes gives the logits of the row alone."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.check_runner import (  # noqa: E402
    COMPILED_AFTER,
    MAX_LINES,
    SlabCheckRunner,
    check_sizes,
)
from mlxpool.worker.attention.in_slabs.slabs import SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from support.slab_rows import LAYERS, SHAPES, Attention, alone, filled, inputs  # noqa: E402


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
    assert len(runner.passes._passes) == 2
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
