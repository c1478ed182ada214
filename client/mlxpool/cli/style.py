"""Colours, tables and status lines on a terminal. Files and pipes get plain text of any width."""

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
FONTS = frozenset({"bold", "dim"})
CODES = {  # of ECMA-48
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36",
}  # fmt: skip
HEAD, ERROR, NOTE = "bold", "bold red", "dim"

Cells = Sequence[str]
# Takes a text and names of CODES, such as `bold red`; returns the text as a terminal takes it.
Paint = Callable[[str, str], str]
BAR = 24  # characters of a progress bar


def plain(text: str, style: str) -> str:
    """The text as it is."""
    return text


def takes_controls(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor and clear what it shows."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB


def paint_of(stream: TextIO) -> Paint:
    """What colours text on a stream: a terminal gets ANSI codes, with $NO_COLOR none of colours."""
    if not takes_controls(stream):
        return plain
    shown = {name: code for name, code in CODES.items() if name in FONTS or not no_color()}

    def paint(text: str, style: str) -> str:
        codes = ";".join(shown[word] for word in style.split() if word in shown)
        return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text

    return paint


def no_color() -> bool:
    """Whether the user wants no colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


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
    width: int | None = None,
) -> None:
    """Print a table between lines above and below it. `width` None: that of standard output."""
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
    """A progress bar, and the share in percent, rounded down."""
    share = min(1.0, max(0.0, share))
    filled = int(share * BAR)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {int(100 * share)} %"


def in_one_line(text: str, width: int) -> str:
    """The text, or as much as a line of `width` characters has room for; reasons go first."""
    if len(text) >= width:
        text = text.partition(" (")[0]
    return text if len(text) < width else f"{text[: width - 2]}…"


class StatusLine:
    """One line of standard error that is written over, if its terminal can; else nothing."""

    def __init__(self) -> None:
        self.live = takes_controls(sys.stderr)
        self._shown = False

    def show(self, text: str) -> None:
        if self.live:
            self._shown = True  # before the write, so that `clear` works after a Ctrl-C in it
            sys.stderr.write(f"\r\x1b[K{in_one_line(escape_line(text), width_of(sys.stderr))}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
