"""Formats tables, sizes, times and JSON for the command line, and reads numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.errors import BadRequest, Internal, PoolError
from mlxpool.common.escapes import escape_line

# Texts of `models`, `check` and `prefix ls` for KV cache layouts and features of models, by their
# names in JSON.
KV_CACHES = {
    "slabs": "paged",
    "rows": "contiguous",
    "pool": "paged",
    "pool, own kernels": "paged, own kernels",
    "mlx-lm's code": "mlx-lm",
    "passes": "none",
}
FEATURES = {"tree": "prefix-cache"}
UNNAMED = (BadRequest.code, Internal.code)  # codes that are not printed: the message is enough
MAX_EXACT = 2**53 - 1  # doubles represent every integer up to this number


def error_text(error: PoolError, message: str = "") -> str:
    """Returns the text of an error: its code, and `message`, by default the error's message."""
    code = "" if error.code in UNNAMED else f"{error.code}: "
    return code + (message or escape_line(error.message))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; a column is as wide as its widest cell."""
    shown = [[escape_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


def size(value: object) -> str:
    """Returns a size in the largest unit in which it is at least 1; "-" if it is not an integer."""
    if not isinstance(value, int):
        return "-"
    count = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Returns seconds as text in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.0f} h"


def milliseconds(seconds: float) -> str:
    """Returns a time below 10 s in milliseconds, a longer time in the form of `duration`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else duration(seconds)


def count(text: str) -> int:
    """Returns the integer in an argument. Raises ArgumentTypeError if it is below 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def jobs_line(jobs: Mapping[str, Any] | None) -> Sequence[str]:
    """Returns the parts of the line about jobs in `ps` and `top`; () if the broker has no jobs."""
    if jobs is None:
        return ()
    if jobs["store"] == "unusable":
        return (f"no jobs are kept: {jobs['why']}",)
    shown = ("waiting", "running", "done", "dead")
    parts = [f"{jobs[state]} {state}" for state in shown]
    batches = jobs.get("batches", 0)
    parts += [f"{batches} {'batch' if batches == 1 else 'batches'}"] if batches else []
    refused = sum(jobs.get("refused", {}).values())  # numbers by code
    parts += [f"{refused} refused"] if refused else []
    store = [] if jobs["store"] == "ok" else [f"store {jobs['store']}"]
    return (f"jobs {parts[0]}", *parts[1:], f"{size(jobs['bytes'])} kept", *store)


def kv_cache(layout: str | None) -> str:
    """Returns the layout of a KV cache for users, from its name in JSON; "-" if it is unknown."""
    name, comma, kv = (layout or "").rpartition(", ")
    if comma and layout not in KV_CACHES:
        return f"{KV_CACHES.get(name, name)}, {kv}"
    return KV_CACHES.get(layout or "", layout or "-")


def feature(name: str) -> str:
    """Returns a feature of a model for users, from its name in JSON."""
    return FEATURES.get(name, name)


def share(value: float | None) -> str:
    """Returns a fraction from 0 to 1 as a percentage; "-" for None."""
    return "-" if value is None else f"{value:.0%}"


def json_text(value: Any) -> str:
    """Returns a value as one line of JSON; an integer beyond ±MAX_EXACT becomes a string."""
    return json.dumps(_exact(value))


def _exact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        return str(value)
    return value
