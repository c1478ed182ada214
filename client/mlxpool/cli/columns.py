"""Tables that fit a terminal by leaving out columns and shortening texts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlxpool.common.escapes import escape_line

GAP = 2  # spaces between two columns
MIN_ID = 8  # the fewest digits of a shortened id
MIN_TEXT = 8  # the fewest characters of a shortened text
GOOD_TEXT = 20  # as MIN_TEXT, while columns of rank DETAIL or more are shown
DETAIL = 5  # columns of this rank or more are left out before texts are shorter than GOOD_TEXT


class Column(Struct, frozen=True):
    """A column of a table. A narrow terminal leaves out the columns with the highest `rank` first.

    `shortens` is "text" for cells that may lose their middle, and "id" for ids that may be cut to a
    unique prefix. Numbers and their units are never shortened.
    """

    name: str
    rank: int = 0
    shortens: str = ""  # "text", "id", or "" if cells are not shortened
    right: bool = False  # aligned to the right, so that changing numbers are easier to compare
    wide: bool = False  # True: shown only with --wide


class Table(Struct, frozen=True):
    """The shown part of a table: columns, cells and widths; and the names of the hidden columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    widths: Sequence[int]
    left_out: Sequence[str]

    def padded(self, cells: Sequence[str]) -> list[str]:
        """Returns the cells of one row, padded to the widths of the columns."""
        return [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, self.widths, self.columns, strict=True)
        ]

    def head(self) -> list[str]:
        return self.padded([column.name for column in self.columns])

    def lines(self) -> list[str]:
        """Returns the lines of the table, with its header."""
        padded = [self.head(), *(self.padded(row) for row in self.rows)]
        return [(" " * GAP).join(cells).rstrip() for cells in padded]


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Returns the table that fits `width` characters.

    Columns are left out until the remaining columns fit with shortened texts and ids. If not even
    the columns of rank 0 fit, a line is longer than the terminal.
    """
    cells = [[escape_line(cell) for cell in row] for row in rows]
    places = list(range(len(columns)))
    while True:
        natural = [_width(columns[place], [row[place] for row in cells]) for place in places]
        detailed = any(columns[place].rank >= DETAIL for place in places)
        least = [
            _least(columns[place], [row[place] for row in cells], whole, detailed)
            for place, whole in zip(places, natural, strict=True)
        ]
        if _total(least) <= width or len(places) == 1:
            break
        last = max(places, key=lambda place: (columns[place].rank, place))
        if columns[last].rank == 0:
            break
        places.remove(last)
    kept = [columns[place] for place in places]
    widths = _shared(kept, natural, least, width)
    shown = [_shortened([row[place] for row in cells], columns[place], widths[number])
             for number, place in enumerate(places)]  # fmt: skip
    left_out = [column.name for place, column in enumerate(columns) if place not in places]
    return Table(kept, list(zip(*shown, strict=True)) if cells else [], widths, left_out)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _width(column: Column, cells: Sequence[str]) -> int:
    return max(map(len, [column.name, *cells]))


def _least(column: Column, cells: Sequence[str], whole: int, detailed: bool) -> int:
    """Returns the smallest width to which a column may be shortened.

    `whole`: the width without shortening. `detailed`: a column of rank DETAIL or more is still
    shown. Then a text keeps at least GOOD_TEXT characters, because the table can leave out that
    column instead. Without such a column a text keeps at least MIN_TEXT characters.
    """
    if column.shortens == "text":
        return min(whole, max(GOOD_TEXT if detailed else MIN_TEXT, len(column.name)))
    if column.shortens == "id":
        return min(whole, max(prefix_length(cells), len(column.name)))
    return whole


def _shared(
    columns: Sequence[Column], natural: Sequence[int], least: Sequence[int], width: int
) -> list[int]:
    """Returns the widths of columns, from `least` to `natural`, the width without shortening.

    An id gets one of these two widths. Texts share the remaining width of the terminal, the
    narrowest text first.
    """
    widths = list(least)
    left = width - _total(widths)
    for place, column in enumerate(columns):
        if column.shortens == "id" and natural[place] - least[place] <= left:
            left -= natural[place] - least[place]
            widths[place] = natural[place]
    while left > 0:
        growing = [
            place
            for place, column in enumerate(columns)
            if column.shortens == "text" and widths[place] < natural[place]
        ]
        if not growing:
            break
        widths[min(growing, key=lambda n: widths[n])] += 1
        left -= 1
    return widths


def _shortened(cells: Sequence[str], column: Column, width: int) -> list[str]:
    if column.shortens == "id":
        length = width if width < max(map(len, cells), default=0) else None
        return [cell[:length] for cell in cells]
    if column.shortens == "text":
        return [shorten(cell, width) for cell in cells]
    return list(cells)


def shorten(text: str, width: int) -> str:
    """Returns a text without its middle: names often differ in their first or last characters."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def prefix_length(ids: Sequence[str]) -> int:
    """Returns the shortest length at which the prefixes of these ids differ, at least MIN_ID."""
    longest = max(map(len, ids), default=0)
    length = min(MIN_ID, longest)
    while length < longest and len({id[:length] for id in ids}) < len(set(ids)):
        length += 1
    return length


def joined(parts: Sequence[str], width: int) -> list[str]:
    """Returns lines of comma-separated parts; no part is divided."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        piece = part + ("," if number < len(parts) - 1 else "")
        if lines and len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines
