"""The work of `submit`, `fetch`, `jobs`, `retry`, `release` and `cancel` on batches and files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlxpool.cli.columns import Column
from mlxpool.cli.formatting import duration, json_text, size
from mlxpool.cli.printed_stream import answer_as_json
from mlxpool.cli.request_flags import client_of, options_of
from mlxpool.cli.style import StatusLine, bar, print_table
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_line

MIN_SECONDS = 1.0  # a batch must run this many seconds before its rate is shown


def progress_text(row: Mapping[str, Any], ended_before: int, seconds: float) -> str:
    """Returns a text with a batch's progress; `ended_before` lines had ended at the first snapshot.

    The text ends with a part in parentheses, which narrow terminals leave out.
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
    """Returns one line of text about the state of a batch."""
    parts = [f"{row[state]:,} {state}" for state in _STATES if row[state]]
    return f"{row['key']}: {row['state']}, {', '.join(parts) or 'no lines'}"


_STATES = ("waiting", "running", "done", "dead", "expired", "cancelled", "failed")


def sent_text(sent: int, whole: int | None) -> str:
    """Returns a text with the fraction of a file that was sent."""
    return f"sending {size(sent)}" if not whole else f"sending {bar(sent / whole)} of {size(whole)}"


def follow(rows: Iterable[Mapping[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
    """Shows the progress of a batch from its maps, until it ends.

    A terminal shows it as a progress bar.
    """
    from mlxpool.client.batches.outcome import count_ended

    line, first, begun = StatusLine(), 0, None
    try:
        for row in rows:
            if begun is None:
                first, begun = count_ended(row), clock()
            line.show(progress_text(row, first, clock() - begun))
    finally:
        line.clear()


if TYPE_CHECKING:
    from mlxpool.client import Batch, LineResult


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --output."""
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="with --batch: wait for the end, and write a JSON object for each line to this file"
        " (-: to standard output)",
    )


def submit(options: argparse.Namespace) -> int:
    """Submits a file and prints the key of its batch; with --wait or --output, awaits its end."""
    settings = {name: value for name, value in options_of(options).items() if value is not None}
    deadline_ms = settings.pop("deadline_ms", None)
    if options.priority is not None:
        settings["priority"] = options.priority
    stdin = options.batch == "-"
    line = StatusLine()
    whole = None if stdin else Path(options.batch).stat().st_size
    try:
        with client_of(options) as client:
            batch = client.submit_batch(
                sys.stdin.buffer if stdin else options.batch,
                options.model,
                key=options.job_key,
                keep=options.keep,
                deadline=None if deadline_ms is None else deadline_ms / 1000,
                notify=options.notify,
                check=not options.allow_bad_lines,
                on_sent=lambda sent: line.show(sent_text(sent, whole)),
                **settings,
            )
            line.clear()
            if not options.json and options.output != "-":
                print(escape_line(batch.key), flush=True)
            if options.wait or options.output:
                return _see_to_its_end(options, batch)
    finally:
        line.clear()
    if options.json:
        print(json_text(as_json(batch.row)))
    return 0


def fetch(options: argparse.Namespace) -> int:
    """Writes the results of a batch once it has ended; exit code 1 if a line has no result."""
    if options.start or options.gen is not None:
        raise BadRequest("--from and --gen are for a single job, not for a batch")
    with client_of(options) as client:
        options.output = options.output or "-"
        return _see_to_its_end(options, client.batch(options.key))


def _see_to_its_end(options: argparse.Namespace, batch: Batch) -> int:
    follow(batch.progress())
    row = batch.row
    if options.output:
        with _opened(options.output) as file:
            for result in batch.results(wait=False):
                file.write(json_text(result_as_json(result)) + "\n")
    if options.json and options.output != "-":
        print(json_text(as_json(row)))
    else:
        print(escape_line(summary(row)), file=sys.stderr)
    return 0 if row["done"] == row["lines"] else 1


@contextlib.contextmanager
def _opened(name: str) -> Iterator[TextIO]:
    """Opens a file for writing, under a temporary name until it is complete.

    "-" is standard output.
    """
    if name == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    part = Path(f"{name}.part")
    with part.open("w", encoding="utf-8") as file:
        yield file
    os.replace(part, name)


def result_as_json(result: LineResult) -> dict[str, Any]:
    """Returns one line of the file of results."""
    row: dict[str, Any] = {"line": result.line, "id": result.id, "state": result.state}
    if result.job is not None:
        row["job"] = result.job.hex()
    if result.error is not None:
        row["error"] = {"code": result.error.code, "message": result.error.message}
    whole = result.result
    if whole is not None and whole.answer is not None:
        row |= {"usage": whole.usage, **answer_as_json(whole)}
    elif whole is not None:
        row |= {"text": whole.text, "reason": whole.reason, "usage": whole.usage}
        row |= {"seed": whole.seed, "ids": whole.ids}
    return row


BATCHES = (
    Column("KEY", 0, "text"),
    Column("STATE", 0),
    Column("LINES", 1),
    Column("WAITING", 4),
    Column("RUNNING", 3),
    Column("DONE", 1),
    Column("FAILED", 1),
    Column("AGE", 2),
    Column("NOTICE", 6),
    Column("TROUBLE", 5, "text"),
)


def list_batches(options: argparse.Namespace) -> int:
    """Prints a table row for each batch, the newest first."""
    with client_of(options) as client:
        rows = client.batches(limit=options.limit)
    if options.json:
        print(json_text({"batches": list(map(as_json, rows))}))
    else:
        print_batches(rows)
    return 0


def print_batches(rows: Iterable[Mapping[str, Any]]) -> None:
    now = time.time()
    print_table(BATCHES, [cells(row, now) for row in rows])


def cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """Returns the table cells of a batch, for the columns BATCHES."""
    from mlxpool.client.batches.outcome import count_bad

    return (
        row["key"],
        row["state"],
        str(row["lines"]),
        str(row["waiting"]),
        str(row["running"]),
        str(row["done"]),
        str(count_bad(row)),
        duration(max(0.0, now - row["created"])),
        row["notice"].replace("_", " ") or "-",
        row["trouble"] or "-",
    )


def change(options: argparse.Namespace, key: str, what: str) -> int:
    """Cancels, retries or releases a batch, and prints its new state."""
    with client_of(options) as client:
        batch = client.batch(key)
        row = {"cancel": batch.cancel, "retry": batch.retry, "release": batch.release}[what]()
    print(json_text(as_json(row)) if options.json else escape_line(summary(row)))
    if what == "release":
        tell_of_notice(row)
    return 0


def tell_of_notice(row: Mapping[str, Any]) -> None:
    """Prints a line if the notice (POST) about a released job or batch is not delivered yet."""
    if row["notice"] == "waiting":
        text = f"mlxpool: {row['key']}: the notice of its end was not delivered yet;"
        print(escape_line(f"{text} the pool still sends it, with its state"), file=sys.stderr)


def as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the map of a batch for output as JSON."""
    return {**row, "batch": row["batch"].hex()}


# ---- files -----------------------------------------------------------------------------------

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
    """Prints a table row for each file, the newest first."""
    with client_of(options) as client:
        rows = client.files(limit=options.limit)
    if options.json:
        print(json_text({"files": rows}))
        return 0
    now = time.time()
    print_table(FILES, [_file_cells(row, now) for row in rows])
    return 0


def _file_cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
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
    """Deletes a file, and prints its key and size."""
    with client_of(options) as client:
        row = client.delete_file(options.key)
    if options.json:
        print(json_text(row))
    else:
        print(escape_line(f"{row['key']}: deleted, {row['size']} bytes"))
    return 0
