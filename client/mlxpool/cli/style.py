"""Colours, tables and status lines on a terminal. Files and pipes get plain text of any width."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from mlxpool.cli.columns import GAP, Column, Table, fitted, joined
from mlxpool.common.escapes import escape_line

UNBOUNDED = 10_000  # width of a file or a pipe, in characters: no column is hidden
STATES = {  # colours of the states of workers, models and requests
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
DUMB = frozenset({"dumb", "unknown"})  # values of $TERM for terminals without control sequences
FONTS = frozenset({"bold", "dim"})
CODES = {  # codes of ECMA-48
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36",
}  # fmt: skip
HEAD, ERROR, NOTE = "bold", "bold red", "dim"

Cells = Sequence[str]
# A function from a text and names of CODES, such as `bold red`, to the text with control sequences.
Paint = Callable[[str, str], str]
BAR = 24  # characters of a progress bar


def plain(text: str, style: str) -> str:
    """Returns the text unchanged."""
    return text


def takes_controls(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that can move its cursor and clear its text."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def paint_of(stream: TextIO) -> Paint:
    """Returns the function that adds ANSI codes for a terminal.

    If $NO_COLOR is set, the function adds no colours.
    """
    if not takes_controls(stream):
        return plain
    shown = {name: code for name, code in CODES.items() if name in FONTS or not no_color()}

    def paint(text: str, style: str) -> str:
        codes = ";".join(shown[word] for word in style.split() if word in shown)
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text

    return paint


def no_color() -> bool:
    """Returns whether the user has turned off colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def width_of(stream: TextIO) -> int:
    """Returns the width of a terminal in columns; UNBOUNDED for a stream that is no terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else UNBOUNDED


def table_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, paint: Paint
) -> list[str]:
    """Returns the lines of a table that fits a width; the header is bold, states have colours."""
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
    """Returns lines that name the columns that a narrow terminal hides; [] if all are shown."""
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
    width: int | None = None,
) -> None:
    """Prints a table with lines above and below.

    `width` None means the width of the output.
    """
    paint = paint_of(sys.stdout)
    width = width_of(sys.stdout) if width is None else width
    lines = [
        *map(escape_line, above),
        *table_lines(columns, rows, width, paint),
        *(paint(escape_line(line), ERROR) for line in errors),
        *map(escape_line, notes),
        *left_out(columns, rows, width, paint),
    ]
    print("\n".join(lines))


def bar(share: float) -> str:
    """Returns a progress bar with the percentage, rounded down."""
    share = min(1.0, max(0.0, share))
    filled = int(share * BAR)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {int(100 * share)} %"


def in_one_line(text: str, width: int) -> str:
    """Returns a text cut to a line of `width` characters.

    If the text is too long, everything from its first parenthesis on is dropped first.
    """
    if len(text) >= width:
        text = text.partition(" (")[0]
    return text if len(text) < width else f"{text[: width - 2]}…"


class StatusLine:
    """One line of standard error that is overwritten; nothing is written without a terminal."""

    def __init__(self) -> None:
        self.live = takes_controls(sys.stderr)
        self._shown = False

    def show(self, text: str) -> None:
        if self.live:
            self._shown = True  # before the write: after a Ctrl-C during it `clear` must clear
            sys.stderr.write(f"\r\x1b[K{in_one_line(escape_line(text), width_of(sys.stderr))}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
