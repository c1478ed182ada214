"""Tests the work lists of ragged attention, which divide rows among thread blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.kernels.work_list import (
    EXTRA_ITEMS,
    FIRST_LINE,
    HIGH,
    KEPT_SHARES,
    LINES,
    LOW,
    MIN_DECODE_KEYS,
    PART,
    PART_UNITS,
    PARTS,
    STEPS_OF_PARTS,
    TABLE,
    TILE_ROWS,
    UNIT,
    UNIT_ROWS,
    WHOLE_KEYS,
    Division,
    Numbers,
    Share,
    Spans,
    TileShape,
    WorkLists,
    capacity_of,
    visible_ranges,
    work_items,
)


def spans_of(rows: list[tuple[int, int, int]]) -> Spans:
    """Returns the spans of rows.

    A row is (new tokens, visible keys before them, invisible keys).
    """
    lines, before, begins = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    ends = (before + begins + lines).astype(np.int32)
    blocks = -(-ends // 256)
    first, tables = np.cumsum(lines) - lines, np.cumsum(blocks) - blocks
    return Spans(first.astype(np.int32), lines, tables.astype(np.int32), ends, begins)


LINE_COUNTS = st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 300))
KEYS = st.one_of(st.integers(0, 300), st.integers(0, 100_000))
ROWS = st.lists(st.tuples(LINE_COUNTS, KEYS, KEYS), min_size=1, max_size=150)
SHAPES = st.builds(
    TileShape, st.integers(1, 16), st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([64, 128])
)


@given(ROWS, SHAPES, st.integers(0, 200), st.booleans())
def test_every_line_has_one_tile_with_all_parts(
    rows: list[tuple[int, int, int]], shape: TileShape, padding: int, bounded: bool
) -> None:
    spans = spans_of(rows)
    lines = int(spans.lines.sum()) + padding
    capacity = capacity_of(shape, lines, len(rows) if bounded else 0)
    items = work_items(spans, shape, lines, capacity)
    assert items.shape == (capacity, 8) and items.dtype == np.int32
    used = items[items[:, LINES] > 0]
    assert (items[: len(used)] == used).all()  # unused items are at the end
    begins, ends = visible_ranges(spans, lines)
    covered = np.zeros(lines, dtype=int)
    row_of = np.repeat(np.arange(len(rows)), spans.lines)
    partial: list[tuple[int, int]] = []
    for item in used[used[:, PART] == 0]:
        first, count = item[FIRST_LINE], item[LINES]
        covered[first : first + count] += 1
        if item[PARTS] == 0:
            assert first >= len(row_of) and count <= TILE_ROWS
            continue
        row = set(row_of[first : first + count])
        assert len(row) == 1 and item[TABLE] == spans.tables[row.pop()]
        assert item[LOW] == begins[first] and item[HIGH] == ends[first + count - 1]
        assert count * shape.group <= shape.rows
        parts = used[used[:, FIRST_LINE] == first]
        assert (parts[:, PART] == np.arange(item[PARTS])).all()  # each part once, in order
        assert (np.delete(parts, PART, axis=1) == np.delete(item, PART)).all()
        if item[PARTS] > 1:
            decodes = count <= shape.decode_lines
            units = (shape.decode_rows if decodes else shape.rows) // UNIT_ROWS
            partial.append((item[UNIT], item[UNIT] + units * item[PARTS]))
            assert item[HIGH] - item[LOW] > MIN_DECODE_KEYS * (item[PARTS] - 1)
    assert (covered == 1).all()
    partial.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(partial))
    assert all(0 <= start < end <= PART_UNITS for start, end in partial)


def test_a_list_of_few_spans_is_short() -> None:
    """The list of a long pass with few spans is short: each item starts a thread block."""
    shape = TileShape(4, 8, 128)
    assert capacity_of(shape, 1024) == 1024 + EXTRA_ITEMS
    assert capacity_of(shape, 1024, 128) == 128 + 32 + 1 + EXTRA_ITEMS
    assert capacity_of(shape, 128, 128) == 128 + EXTRA_ITEMS


def each(items: Numbers) -> Numbers:
    used = items[items[:, PARTS] > 0]
    keys: Numbers = -(-(used[:, HIGH] - used[:, LOW]) // used[:, PARTS])
    return keys


def test_few_rows_are_divided_and_many_are_not() -> None:
    shape = TileShape(4, 8)
    single = work_items(spans_of([(1, 15_999, 0)]), shape, 1)
    assert 40 <= single[0, PARTS] <= 44 and (single[:, LINES] > 0).sum() == single[0, PARTS]
    many = work_items(spans_of([(1, 1_999, 0)] * 128), shape, 128)
    assert set(many[:128, PARTS]) == {1} and not many[128:].any()
    assert work_items(spans_of([(1, 99, 0)]), shape, 1)[0, PARTS] == 1
    chunk = work_items(spans_of([(512, 0, 0)]), shape, 512)
    assert (chunk[:, LINES] == 16).sum() == 32 and set(chunk[:32, PARTS]) == {1}
    few = work_items(spans_of([(100, 16_000, 0)]), shape, 128)
    assert set(few[:, PARTS]) == {0, 6} and (few[:, PARTS] == 6).sum() == 42


def waves(rows: list[tuple[int, int, int]], shape: TileShape) -> float:
    """Returns the number of waves: work items divided by the thread blocks that run at once."""
    items = work_items(spans_of(rows), shape, sum(lines for lines, _, _ in rows))
    return int((items[:, PARTS] > 0).sum()) * shape.kv_heads / shape.blocks


def test_parts_fill_whole_waves() -> None:
    """The last wave of thread blocks is nearly full, so that little of the GPU is idle."""
    shape = TileShape(4, 8, 128, 264)
    for count in (1, 2, 3, 5, 8, 10, 16, 32, 64, 128):
        wave_count = waves([(1, 15_999, 0)] * count, shape)
        assert wave_count / np.ceil(wave_count) > 0.85, (count, wave_count)
    assert 0.85 < waves([(512, 4_096, 0)], shape) <= 1
    assert 0.85 < waves([(100, 16_000, 0)], shape) <= 1


def test_steps_with_chunks_keep_the_share_of_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with chunks take the best division into parts from an earlier, similar step.

    For a step unlike all stored steps the best division is searched for.
    """
    searches: list[Division] = []
    best = Division.best_share

    def counted(step: Division) -> Share:
        searches.append(step)
        return best(step)

    monkeypatch.setattr(Division, "best_share", counted)
    lists = WorkLists(TileShape(4, 8))
    for more in range(STEPS_OF_PARTS):
        lists.items(spans_of([(512, more, 0), (1, 900 + more, 0)]), 576)
    assert len(searches) == 1
    mixed = spans_of([(2, 10, 0), (1, 60_000, 0)])
    long = lists.items(mixed, 8)
    assert long[0, PARTS] > 20
    prompt = [spans_of([(512, start, 0)]) for start in range(0, 2048, 512)]
    for _ in range(3):
        count = len(searches)
        for chunk in (*prompt, mixed):
            items = lists.items(chunk, 512)
    assert len(searches) == count > 2, "steps that were searched before have the share found then"
    assert (items == work_items(mixed, TileShape(4, 8), 512)).all()
    for keys in range(1000, 1000 + 2 * KEPT_SHARES):
        lists.items(spans_of([(2, 10, 0), (1, 60 * keys, 0)]), 8)
    assert len(lists._shares) <= KEPT_SHARES


def test_a_long_row_beside_short_ones_is_divided() -> None:
    spans = spans_of([(1, 300, 0)] * 63 + [(1, 30_000, 0)])
    items = work_items(spans, TileShape(4, 8), 64)
    assert items[0, PARTS] > 20 and each(items).max() <= 1.15 * (30_000 + 63 * 300) * 8 / 352


def test_chunks_begin_first_and_the_longest_of_each_kind() -> None:
    spans = spans_of([(1, 50, 0), (40, 3_000, 0), (1, 20_000, 0), (1, 700, 300), (8, 0, 0)])
    shape = TileShape(2, 4)
    items = work_items(spans, shape, 60)
    decodes = items[items[:, PARTS] > 0][:, LINES] <= shape.decode_lines
    chunks = int((~decodes).sum())
    assert 0 < chunks < decodes.size and not decodes[:chunks].any()
    for kind in (each(items)[:chunks], each(items)[chunks:]):
        assert (np.diff(kind) <= 0).all()


def test_the_fullest_step_has_an_item_for_each_line() -> None:
    spans = spans_of([(1, 100_000, 0)] * 128)
    items = work_items(spans, TileShape(16, 64), 128)
    assert (items[:, LINES] == 1).sum() <= 128 + EXTRA_ITEMS


def test_rows_that_go_on_decoding_keep_their_parts() -> None:
    """While the same rows decode, a work list is kept for STEPS_OF_PARTS steps.

    Only the ends of the rows' keys change in it. A new or ended row makes a new list.
    """
    shape = TileShape(4, 2, blocks=16)
    lists = WorkLists(shape)
    for rows in (3, 3, 5):
        for step in range(2 * STEPS_OF_PARTS):
            ends = np.arange(rows, dtype=np.int32) * 700 + 40 + step
            spans = single_lines(ends)
            items = lists.items(spans, 6)
            used = items[items[:, PARTS] > 0]
            assert set(used[:, FIRST_LINE]) == set(range(rows))
            assert (used[:, HIGH] == ends[used[:, FIRST_LINE]]).all()
            assert (used[:, TABLE] == spans.tables[used[:, FIRST_LINE]]).all()
            if step % STEPS_OF_PARTS == 0:
                assert (items == work_items(spans, shape, 6)).all()


def test_chunks_have_lists_of_their_own() -> None:
    shape = TileShape(4, 2)
    spans = Spans(
        *(np.array(values, dtype=np.int32) for values in ([0, 1], [1, 40], [0, 9], [7, 40], [0, 0]))
    )
    assert (WorkLists(shape).items(spans, 48) == work_items(spans, shape, 48)).all()


def single_lines(ends: Any) -> Spans:
    """Returns spans of one new token each, whose block tables are consecutive."""
    count = ends.shape[0]
    numbers = np.arange(count, dtype=np.int32)
    return Spans(numbers, np.ones_like(numbers), numbers * 9, ends, np.zeros_like(numbers))


@pytest.mark.parametrize("longest", [40, WHOLE_KEYS, 50_000])
def test_a_list_for_one_pass_has_the_lines_of_another(longest: int) -> None:
    """A list made for a single pass covers the same tokens and keys as the usual list.

    It is divided more simply: short rows are one part each, other rows have nearly the best parts.
    """
    shape = TileShape(4, 2)
    ends = np.array([7, longest, longest, 1, longest - 3], dtype=np.int32)
    spans = single_lines(ends)
    spans.tables[2] = spans.tables[1]  # line 2 follows line 1 in the same row
    single, other = WorkLists(shape).items_once(spans, 150), work_items(spans, shape, 150)
    assert single.shape == other.shape
    for column in (LINES, TABLE, LOW, HIGH):
        mine, theirs = (
            {(item[FIRST_LINE], item[column]) for item in items.tolist()}
            for items in (single, other)
        )
        assert mine == theirs
    used = single[single[:, PARTS] > 0]
    assert (used[:, PARTS].max() > 1) == (longest > WHOLE_KEYS)
    for line in range(5):
        parts = used[used[:, FIRST_LINE] == line]
        assert sorted(parts[:, PART]) == [*range(parts[0, PARTS])]
    if longest > WHOLE_KEYS:
        assert each(used).max() <= 1.3 * each(other[other[:, PARTS] > 0]).max()
