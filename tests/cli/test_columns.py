"""The columns that a terminal of some width gets, and shortened texts and ids."""

from __future__ import annotations

import pytest

from mlxpool.cli.columns import Column, fitted, joined, prefix_length, shorten
from mlxpool.cli.style import plain, table_lines

COLUMNS = (
    Column("NAME", 0, "text"),
    Column("STATE", 1),
    Column("SIZE", 2),
    Column("DETAIL", 9),
)
ROWS = [
    ("a-model-with-a-name-of-33-letters", "ready", "41.1 MB", "something more"),
    ("demo", "loading", "7 B", "-"),
]


def names(width: int) -> list[str]:
    return [column.name for column in fitted(COLUMNS, ROWS, width).columns]


def test_a_wide_terminal_gets_all() -> None:
    table = fitted(COLUMNS, ROWS, 200)
    assert [tuple(row) for row in table.rows] == ROWS and not table.left_out
    assert table.lines()[2] == f"{'demo':<33}  loading  7 B      -"


def test_columns_leave_in_the_order_of_their_rank() -> None:
    assert names(80) == ["NAME", "STATE", "SIZE", "DETAIL"]
    assert names(40) == ["NAME", "STATE", "SIZE"]
    assert names(20) == ["NAME", "STATE"]
    assert names(10) == ["NAME"]
    assert fitted(COLUMNS, ROWS, 20).left_out == ["SIZE", "DETAIL"]


@pytest.mark.parametrize("width", range(8, 90))
def test_every_table_fits_and_figures_are_whole(width: int) -> None:
    table = fitted(COLUMNS, ROWS, width)
    assert max(map(len, table.lines())) <= width
    for row in table.rows:
        for column, cell in zip(table.columns, row, strict=True):
            if not column.shortens:
                assert cell in [cell for row in ROWS for cell in row]


def test_names_are_shortened_a_little_before_details_leave_and_much_after() -> None:
    assert fitted(COLUMNS, ROWS, 54).rows[0][0] == "a-model-wi…3-letters"
    assert names(54) == ["NAME", "STATE", "SIZE", "DETAIL"]
    assert names(53) == ["NAME", "STATE", "SIZE"]
    assert fitted(COLUMNS, ROWS, 26).rows[0][0] == "a-mo…ers"


def test_a_table_without_rows() -> None:
    assert fitted(COLUMNS, [], 80).lines() == ["NAME  STATE  SIZE  DETAIL"]


def test_figures_may_end_together() -> None:
    columns = (Column("A"), Column("MEM", right=True))
    assert fitted(columns, [("x", "1 B"), ("y", "10.0 kB")], 80).lines() == [
        "A      MEM", "x      1 B", "y  10.0 kB",
    ]  # fmt: skip


def test_ids_are_whole_or_prefixes_that_tell_them_apart() -> None:
    ids = ["0123456789abcdef", "0123456788abcdef", "ffffffffffffffff"]
    columns = (Column("ID", 0, "id"), Column("N"))
    rows = [(ident, "1") for ident in ids]
    assert [row[0] for row in fitted(columns, rows, 19).rows] == ids
    assert [row[0] for row in fitted(columns, rows, 18).rows] == [ident[:10] for ident in ids]


@pytest.mark.parametrize(
    ("ids", "length"), [([], 0), (["a" * 32], 8), (["a" * 9 + "b", "a" * 9 + "c"], 10), (["ab"], 2)]
)
def test_the_length_of_prefixes(ids: list[str], length: int) -> None:
    assert prefix_length(ids) == length


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abc", 3, "abc"), ("abcdefgh", 8, "abcdefgh"), ("abcdefghi", 8, "abcd…ghi"), ("ab", 1, "…")],
)
def test_shorten(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short


def test_parts_of_a_line_stay_whole() -> None:
    parts = ["broker 5 ready", "up 3.0 s", "/a/long/path/that/is/wider"]
    assert joined(parts, 200) == ["broker 5 ready, up 3.0 s, /a/long/path/that/is/wider"]
    assert joined(parts, 25) == ["broker 5 ready, up 3.0 s,", "/a/long/path/that/is/wider"]
    assert joined(parts, 3) == ["broker 5 ready,", "up 3.0 s,", "/a/long/path/that/is/wider"]


def test_states_are_painted_and_keep_their_width() -> None:
    lines = table_lines(COLUMNS, ROWS, 200, lambda text, style: f"<{style}>{text}</>")
    assert lines[0].startswith("<bold>NAME")
    assert "<green>ready</>    41.1 MB" in lines[1] and "<cyan>loading</>  7 B" in lines[2]
    assert table_lines(COLUMNS, ROWS, 200, plain) == fitted(COLUMNS, ROWS, 200).lines()
