"""Rows in slabs that check drafts in one compiled pass give the logits of each row alone."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.several_checks import (  # noqa: E402
    PASS_LINES,
    SeveralChecksRunner,
    plan_of,
)
from mlxpool.worker.attention.in_slabs.slabs import SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from support.slab_rows import LAYERS, SHAPES, Attention, alone, filled, inputs  # noqa: E402


@pytest.mark.parametrize("kv", SHAPES)
def test_checks_give_what_each_row_alone_gives(kv: str) -> None:
    """Of any numbers of inputs, across borders of blocks and slabs, in any order of the rows."""
    shape, model, draw = SHAPES[kv], Attention(), random.Random(kv)
    slabs = Slabs(shape, 6)
    pairs = [(SlabRow(slabs), RowCache(shape)) for _ in range(5)]
    for pair, size in zip(pairs, (1, 250, 510, 700, 255), strict=True):
        filled([*pair], shape, size)
    runner = SeveralChecksRunner(model, shape, states=True)
    for turn in range(12):
        live = draw.sample(pairs, draw.randint(2, 5))
        counts = [draw.choice([1, 2, 3, 5, 8]) for _ in live]
        given = [inputs(count) for count in counts]
        places = [*range(len(live))]
        draw.shuffle(places)  # in which the inputs are given
        begins = [0, *accumulate(counts[place] for place in places)]
        firsts = [begins[places.index(number)] for number in range(len(live))]
        plan = plan_of([row for row, _ in live], counts, firsts)
        assert plan is not None
        found = runner(plan, mx.concatenate([given[place] for place in places]))
        wanted = mx.concatenate(
            [alone(model, row, ids) for (_, row), ids in zip(live, given, strict=True)]
        )
        assert found.drawn is not None and found.drawn.shape == wanted.shape
        assert mx.allclose(found.drawn, wanted, rtol=1e-4, atol=1e-5).item(), turn
        assert mx.array_equal(found.logits, 2 * found.drawn).item()
        for pair, count in zip(live, counts, strict=True):
            kept = pair[1].offset - draw.randrange(count)  # some of the drafts were wrong
            for row in pair:
                row.trim(kept)
    for layer in range(LAYERS):
        for pair in pairs:
            held = (row.part(layer, 0, pair[0].offset) for row in pair)
            for one, same in zip(*map(shape.read, held), strict=True):
                assert mx.allclose(one, same, rtol=1e-4, atol=1e-5).item()


def test_passes_come_again_with_other_drafts_and_rows() -> None:
    """They are compiled once for each kind, and few kinds are kept."""
    shape = SHAPES["auto"]
    runner = SeveralChecksRunner(Attention(), shape, max_passes=2)
    slabs = Slabs(shape, 8)
    rows = [SlabRow(slabs) for _ in range(8)]
    for row in rows:
        filled([row], shape, 200)

    def compute(counts: list[int]) -> bool:
        """Returns whether the pass was compiled for it."""
        plan = plan_of(rows[: len(counts)], counts, [0, *accumulate(counts)][:-1])
        assert plan is not None
        compiled = runner.compiles(plan)
        mx.eval(runner(plan, inputs(sum(counts))).logits)
        assert not runner.compiles(plan)
        return compiled

    alike = [4, 4, 1, 1, 1, 1, 1, 1], [3, 3, 1, 1, 1, 1, 3], [1, 1, 1, 1, 1, 1, 3, 4]
    assert [compute(counts) for counts in alike] == [True, False, False]
    assert compute([2] * 8) and compute([6] * 8)
    assert len(runner.passes._passes) == 2
    assert compute([*alike[0]])  # the oldest was dropped


def test_passes_of_many_inputs_and_rows_that_are_far_apart_are_not_compiled() -> None:
    shape = SHAPES["auto"]
    slabs = Slabs(shape, 64)
    rows = [SlabRow(slabs) for _ in range(2)]
    assert plan_of(rows, [PASS_LINES[-1], 1], [0, PASS_LINES[-1]]) is None
    assert plan_of(rows, [PASS_LINES[-1] - 1, 1], [0, PASS_LINES[-1] - 1]) is not None
    for between in [SlabRow(slabs) for _ in range(3)]:
        between.reserve(10 * 256)
    late = SlabRow(slabs)
    assert plan_of([rows[0], late], [2, 2], [0, 2]) is None
