"""What `jobs --files` and `release --file` do: the files that the pool keeps for batches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from mlxpool.cli.columns import Column
from mlxpool.cli.formatting import duration, size
from mlxpool.cli.json_text import json_text
from mlxpool.cli.request_flags import client_of
from mlxpool.cli.style import print_table
from mlxpool.common.escapes import escape_line

FILES = (
    Column("KEY", 0, "text"),
    Column("NAME", 2, "text"),
    Column("PURPOSE", 3, "text"),
    Column("BYTES", 0),
    Column("COMPLETE", 1),
    Column("AGE", 1),
    Column("DELETED IN", 4),
)


def list_files(options: argparse.Namespace) -> int:
    """Print a row for each file, the newest first."""
    with client_of(options) as client:
        found = client.files(limit=options.limit)
    if options.json:
        print(json_text({"files": found}))
        return 0
    now = time.time()
    print_table(FILES, [_cells(row, now) for row in found])
    return 0


def _cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    forget = row["forget"]
    return (
        row["key"],
        row["name"] or "-",
        row["purpose"] or "-",
        size(row["size"]),
        "yes" if row["complete"] else "no",
        duration(max(0.0, now - row["created"])),
        "-" if forget is None else duration(max(0.0, forget - now)),
    )


def delete_file(options: argparse.Namespace) -> int:
    """Delete a file, and print what it was."""
    with client_of(options) as client:
        row = client.delete_file(options.key)
    if options.json:
        print(json_text(row))
    else:
        print(escape_line(f"{row['key']}: deleted, {row['size']} bytes"))
    return 0
