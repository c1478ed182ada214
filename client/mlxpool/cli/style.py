"""Colours and tables on a terminal, by rich. A file or a pipe gets plain text of any width."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from mlxpool.cli.columns import GAP, Column, Table, fitted, joined
from mlxpool.common.escapes import escape_line

UNBOUNDED = 10_000  # columns of what is no terminal, so that nothing is left out
STATES = {  # of workers, models and requests
    "ready": "green",
    "streaming": "green",
    "assigned": "cyan",
    "loading": "cyan",
    "starting": "cyan",
    "wanted": "cyan",
    "suspect": "yellow",
    "drained": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "yielding": "yellow",
    "broken": "red",
    "condemned": "red",
    "failed": "red",
    "lost": "red",
    "cold": "dim",
    "none": "dim",
}
DUMB = frozenset({"dumb", "unknown"})  # values of $TERM: a terminal without control sequences
HEAD, ERROR, NOTE = "bold", "bold red", "dim"

Cells = Sequence[str]
# Takes a text and a style of rich, such as `bold red`; returns the text as a terminal takes it.
Paint = Callable[[str, str], str]


def plain(text: str, style: str) -> str:
    """The text as it is."""
    return text


def takes_controls(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor and clear what it shows."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def paint_of(stream: TextIO) -> Paint:
    """What colours text on a stream: by rich on a terminal, with $NO_COLOR without its colours."""
    if not stream.isatty():
        return plain
    # Here and not above: without a terminal no command needs rich.
    from rich.console import COLOR_SYSTEMS, Console

    console = Console(file=stream)
    if console.color_system is None:  # a terminal that can none, such as TERM=dumb
        return plain
    system = COLOR_SYSTEMS[console.color_system]

    def paint(text: str, style: str) -> str:
        if not (style and text):
            return text
        parsed = console.get_style(style)
        if console.no_color:
            parsed = parsed.without_color
        return parsed.render(text, color_system=system)

    return paint


def width_of(stream: TextIO) -> int:
    """The columns of a terminal; UNBOUNDED of what is none."""
    return shutil.get_terminal_size().columns if stream.isatty() else UNBOUNDED


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, paint: Paint
) -> list[str]:
    """The lines of a table that fits a width: the head is bold, states have their colours."""
    table = fitted(columns, rows, width)
    head = (" " * GAP).join(table.head()).rstrip()
    return [paint(head, HEAD), *(_row(table, row, paint) for row in table.rows)]


def _row(table: Table, row: Sequence[str], paint: Paint) -> str:
    cells = table.padded(row)
    for place, column in enumerate(table.columns):
        if column.name == "STATE":
            text = row[place]
            cells[place] = paint(text, STATES.get(text, "")) + cells[place][len(text) :]
    return (" " * GAP).join(cells).rstrip()


def left_out(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, paint: Paint
) -> list[str]:
    """Lines that name the columns for which the terminal is too narrow; none if it is not."""
    first, *others = fitted(columns, rows, width).left_out or [""]
    notes = joined([f"no room in {width} columns for {first}", *others], width)
    return [paint(note, NOTE) for note in notes] if first else []


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Cells],
    *,
    above: Sequence[str] = (),
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print a table that fits standard output, between lines above and below it."""
    width, paint = width_of(sys.stdout), paint_of(sys.stdout)
    lines = [
        *map(escape_line, above),
        *table_lines(columns, rows, width, paint),
        *(paint(escape_line(line), ERROR) for line in errors),
        *map(escape_line, notes),
        *left_out(columns, rows, width, paint),
    ]
    print("\n".join(lines))
