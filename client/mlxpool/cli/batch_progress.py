"""The progress of a batch: its bar on standard error, and the lines that say how it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlxpool.cli.formatting import duration, size
from mlxpool.cli.status_line import StatusLine, bar

MIN_SECONDS = 1.0  # of a batch before a rate is shown


def progress_text(row: Mapping[str, Any], ended_before: int, seconds: float) -> str:
    """How far a batch is; `ended_before` lines had ended when it was looked at first.

    What not every terminal has room for is in parentheses at the end.
    """
    from mlxpool.client.batches.outcome import count_bad, count_ended

    ended, lines, bad = count_ended(row), row["lines"], count_bad(row)
    text = f"{bar(ended / lines if lines else 1.0)}, {ended:,} of {lines:,} lines"
    if bad:
        text += f", {bad:,} failed"
    if row["trouble"]:
        return f"{text}; waiting: {row['trouble']}"
    rate = (ended - ended_before) / seconds if seconds >= MIN_SECONDS else 0.0
    if rate > 0:
        text += f" ({rate:,.1f} a second, {duration((lines - ended) / rate)} left)"
    return text


def summary(row: Mapping[str, Any]) -> str:
    """One line about a batch that has ended, or as it is."""
    parts = [f"{row[state]:,} {state}" for state in _STATES if row[state]]
    return f"{row['key']}: {row['state']}, {', '.join(parts) or 'no lines'}"


_STATES = ("waiting", "running", "done", "dead", "expired", "cancelled", "failed")


def sent_text(sent: int, whole: int | None) -> str:
    """How much of a file was sent."""
    return f"sending {size(sent)}" if not whole else f"sending {bar(sent / whole)} of {size(whole)}"


def follow(rows: Iterable[Mapping[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
    """Show the rows of a batch until they end, as a bar on a terminal."""
    from mlxpool.client.batches.outcome import count_ended

    line, first, begun = StatusLine(), 0, None
    try:
        for row in rows:
            if begun is None:
                first, begun = count_ended(row), clock()
            line.show(progress_text(row, first, clock() - begun))
    finally:
        line.clear()
