"""Tables on standard output, between lines above and below them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlxpool.cli.columns import Column
from mlxpool.cli.style import ERROR, left_out, paint_of, table_lines, width_of
from mlxpool.common.escapes import escape_line

Cells = Sequence[str]


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
