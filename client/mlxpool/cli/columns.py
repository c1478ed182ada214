"""Tables that fit a terminal: which columns are shown, and which texts are shortened. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlxpool.common.escapes import escape_line

GAP = 2  # spaces between two columns
MIN_ID = 8  # digits of an id that is shortened
MIN_TEXT = 8  # characters of a text that is shortened
GOOD_TEXT = 20  # the same, as long as there are columns of DETAIL to leave out instead
DETAIL = 5  # the least rank of a column that is left out before texts get shorter than that


class Column(Struct, frozen=True):
    """A column of a table. Columns leave a narrow terminal in the order of `rank`, highest first.

    What a column is for says how it gives way: `text` can be shortened in its middle, `id` to a
    prefix that no other id has; figures and their units never are.
    """

    name: str
    rank: int = 0
    shortens: str = ""  # "text", "id", or "" for what is shown as it is or not at all
    right: bool = False  # figures that change are easier to compare when they end together
    wide: bool = False  # only with --wide


class Table(Struct, frozen=True):
    """What of a table is shown: the columns, their cells and widths, and the names left out."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    widths: Sequence[int]
    left_out: Sequence[str]

    def padded(self, cells: Sequence[str]) -> list[str]:
        """The cells of one row at the widths of the columns."""
        return [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(cells, self.widths, self.columns, strict=True)
        ]

    def head(self) -> list[str]:
        return self.padded([column.name for column in self.columns])

    def lines(self) -> list[str]:
        """The table as text, with its head."""
        padded = [self.head(), *(self.padded(row) for row in self.rows)]
        return [(" " * GAP).join(cells).rstrip() for cells in padded]


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Table:
    """The table that fits `width` characters.

    Columns are left out until what is left fits when its texts and ids are shortened. If not even
    the first columns fit, a line is longer than the terminal.
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
    """The smallest width of a column; `detailed`: there are columns of DETAIL."""
    if column.shortens == "text":
        return min(whole, max(GOOD_TEXT if detailed else MIN_TEXT, len(column.name)))
    if column.shortens == "id":
        return min(whole, max(prefix_length(cells), len(column.name)))
    return whole


def _shared(
    columns: Sequence[Column], natural: Sequence[int], least: Sequence[int], width: int
) -> list[int]:
    """Widths between `least` and `natural`. An id is whole or as short as can be; then what is left
    goes to the narrowest texts first.
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
    """A text without its middle, for names often differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def prefix_length(ids: Sequence[str]) -> int:
    """The length of prefixes that tell these ids apart, at least MIN_ID."""
    longest = max(map(len, ids), default=0)
    length = min(MIN_ID, longest)
    while length < longest and len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return length


def joined(parts: Sequence[str], width: int) -> list[str]:
    """Lines of parts with commas between them; a part is broken only if it is wider than a line."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        piece = part + ("," if number < len(parts) - 1 else "")
        if lines and len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines
