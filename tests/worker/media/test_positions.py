"""Tests multi-axis rotary positions: three for each input of a prompt with images."""

from __future__ import annotations

from mlxpool.worker.media.spans import MediaSpan, positions

WIDE = MediaSpan(2, 6, b"a" * 32, (1, 4, 6), False)  # 2 rows of 3 inputs
SQUARE = MediaSpan(9, 4, b"b" * 32, (1, 4, 4), False)
WHOLE = [
    *[(n, n, n) for n in range(2)],
    *[(2, 2 + row, 2 + column) for row in range(2) for column in range(3)],
    (5, 5, 5),
    *[(6, 6 + row, 6 + column) for row in range(2) for column in range(2)],
    *[(n, n, n) for n in range(8, 12)],
]


def test_images_are_grids_and_what_follows_goes_on_behind_their_longer_side() -> None:
    rows = positions(0, 17, [WIDE, SQUARE], 2)
    assert [tuple(row) for row in rows.tolist()] == WHOLE


def test_any_part_has_the_positions_of_the_whole() -> None:
    for start in range(17):
        for end in range(start + 1, 18):
            rows = positions(start, end, [WIDE, SQUARE], 2).tolist()
            assert [tuple(row) for row in rows] == WHOLE[start:end]


def test_without_images_positions_are_numbers() -> None:
    assert positions(3, 5, (), 2).tolist() == [[3] * 3, [4] * 3]
