"""The actions of operators on the jobs of all owners: list, show, export, verify, notices."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mlxpool.cli import batch_actions
from mlxpool.cli.admin import ask
from mlxpool.cli.columns import Column
from mlxpool.cli.formatting import duration, json_text, size
from mlxpool.cli.style import print_table
from mlxpool.cli.target import Target
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_line, escape_text
from mlxpool.common.protocol.frames import ID_BYTES
from mlxpool.common.protocol.kept import job_operations as asked
from mlxpool.common.protocol.kept.batch_messages import MAX_BATCHES
from mlxpool.common.protocol.kept.job_messages import MAX_LISTED, READ, ListJobs
from mlxpool.common.protocol.kept.job_operations import as_json

ANSWER_TIMEOUT = 60.0  # seconds to wait for an answer; a disk may be slow
FORMAT = 1  # version of the format of an export's lines
LOCAL = "%Y-%m-%d %H:%M:%S"


# ---- the flags of `mlxpool jobs` -----------------------------------------------------------------

FLAGS = (
    "all_owners", "owner", "model", "of_batch", "show", "notices", "export", "verify",
)  # fmt: skip

OF_USERS = ("after", "batch", "files", "follow")


def given(options: argparse.Namespace, flags: Iterable[str]) -> list[str]:
    """Returns the flags that the user has given: their value is neither None nor False."""
    values = {flag: getattr(options, flag) for flag in flags}
    return [flag for flag, value in values.items() if value is not None and value is not False]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for operators, which concern the jobs of all owners."""
    of_all = parser.add_argument_group("for operators, over the admin socket")
    of_all.add_argument(
        "--all-owners",
        action="store_true",
        help="list the jobs of all owners; with --batches their batches",
    )
    of_all.add_argument(
        "--owner",
        metavar="OWNER",
        help="list only jobs, batches or notices of this owner, such as uid:1000",
    )
    of_all.add_argument("--model", metavar="MODEL", help="list only jobs of this model")
    of_all.add_argument(
        "--of-batch", metavar="ID", help="list only the jobs of the batch with this id"
    )
    of_all.add_argument(
        "--show", metavar="ID", help="show everything about one job, with the stacks of workers"
    )
    of_all.add_argument(
        "--notices", action="store_true", help="list the notices that were not delivered"
    )
    of_all.add_argument(
        "--export",
        metavar="FILE",
        help="write all stored data as JSON lines; -: to standard output",
    )
    of_all.add_argument(
        "--verify", action="store_true", help="compare all stored data with its checksums"
    )


def run_asked(options: argparse.Namespace) -> int | None:
    """Runs an operator's action. Returns its exit code; None if the flags are not for operators."""
    target = options.admin_target
    flags = given(options, FLAGS)
    for flag in given(options, OF_USERS) if flags else ():
        shown = flags[0].replace("_", "-")
        raise BadRequest(f"--{flag} is about your own jobs, --{shown} about those of all owners")
    if options.batches and flags:
        return list_batches(options, flags)
    if options.export is not None:
        return export(target, options.export, options.state or "")
    if options.verify:
        return verify(target, as_json=options.json)
    if options.notices:
        return list_notices(target, options.owner or "", as_json=options.json)
    if options.show is not None:
        id = id_of(options.show)
        return look(target, id, as_json=options.json)
    filters: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("owner", "model", "state")
        if getattr(options, name)
    }
    if options.of_batch:
        filters["batch"] = id_of(options.of_batch)
    if options.all_owners or filters.keys() - {"state"}:
        return list_all(target, filters, options.limit, as_json=options.json)
    return None


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the map of a job for JSON: ids as hexadecimal digits."""
    ids = {name: row[name].hex() for name in ("job", "batch") if isinstance(row.get(name), bytes)}
    return {**row, **ids}


# ---- lists ---------------------------------------------------------------------------------------

JOBS = (
    Column("JOB", 6, "id"),
    Column("OWNER", 1, "text"),
    Column("KEY", 0, "text"),
    Column("MODEL", 3, "text"),
    Column("STATE", 0),
    Column("TOKENS", 2),
    Column("ATTEMPTS", 7),
    Column("AGE", 4),
    Column("BYTES", 8),
    Column("CAUSE", 5, "text"),
)


def list_all(target: Target, filters: Mapping[str, Any], limit: int, *, as_json: bool) -> int:
    """Prints a table row for each job of all owners that passes the filters, the newest first."""
    rows: list[dict[str, Any]] = []
    before = 0
    while len(rows) < limit:
        count = min(MAX_LISTED, limit - len(rows))
        body = {**filters, "limit": count, "before": before}
        answer = ask(target, ListJobs.kind, body, timeout=ANSWER_TIMEOUT)
        rows += answer["jobs"]
        before = answer["next"]
        if not before:
            break
    if as_json:
        print(json_text({"jobs": list(map(shown_row, rows))}))
        return 0
    now = time.time()
    print_table(
        JOBS,
        [
            (
                row["job"].hex(),
                _whose(row),
                row["key"],
                row["model"],
                row["state"],
                str(row["ids"]),
                str(row["attempts"]),
                duration(max(0.0, now - row["submitted"])),
                size(row["bytes"]),
                row.get("damaged") or row["cause"] or "-",
            )
            for row in rows
        ],
    )
    return 0


BATCHES = (Column("BATCH", 7, "id"), Column("OWNER", 1, "text"), *batch_actions.BATCHES)


def list_batches(options: argparse.Namespace, given_flags: Iterable[str]) -> int:
    """Prints a table row for each batch of all owners, or of --owner, the newest first."""
    refused = [flag for flag in given_flags if flag not in ("all_owners", "owner")]
    for flag in refused:
        raise BadRequest(f"--{flag.replace('_', '-')} is about jobs: give it without --batches")
    rows: list[dict[str, Any]] = []
    following: Any = None
    while len(rows) < options.limit:
        count = min(MAX_BATCHES, options.limit - len(rows))
        body = {"owner": options.owner or "", "limit": count, "behind": following}
        answer = ask(options.admin_target, asked.BATCHES, body, timeout=ANSWER_TIMEOUT)
        rows += answer["batches"]
        following = answer["next"]
        if following is None:
            break
    if options.json:
        print(json_text({"batches": list(map(shown_row, rows))}))
        return 0
    now = time.time()
    print_table(
        BATCHES, [(row["batch"].hex(), _whose(row), *batch_actions.cells(row, now)) for row in rows]
    )
    return 0


def _whose(row: Mapping[str, Any]) -> str:
    return str(row["owner"]) + (f"/{row['tenant']}" if row["tenant"] else "")


NOTICES = (
    Column("OF", 5),
    Column("KEY", 0, "text"),
    Column("OWNER", 3, "text"),
    Column("URL", 2, "text"),
    Column("TRIES", 1),
    Column("NEXT", 1),
    Column("CAUSE", 4, "text"),
)


def list_notices(target: Target, owner: str, *, as_json: bool) -> int:
    """Prints the notices (POSTs about ended jobs and batches) that are undelivered or given up."""
    rows: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        body = {"after": after, "limit": MAX_LISTED, "owner": owner}
        answer = ask(target, asked.NOTICES, body, timeout=ANSWER_TIMEOUT)
        rows += answer["notices"]
        after = answer["next"] or None
    if as_json:
        print(json_text({"notices": list(map(shown_row, rows))}))
        return 0
    now = time.time()
    print_table(
        NOTICES,
        [
            (
                "batch" if "batch" in row else "job",
                row["key"],
                _whose(row),
                row["url"],
                str(row["tries"]),
                "given up" if row["given_up"] else duration(max(0.0, row["due"] - now)),
                row["cause"] or "-",
            )
            for row in rows
        ],
    )
    return 0


# ---- one job -------------------------------------------------------------------------------------


def id_of(text: str) -> bytes:
    """Returns a job's id from hexadecimal digits. Raises BadRequest for another text."""
    try:
        id = bytes.fromhex(text)
    except ValueError:
        id = b""
    if len(id) != ID_BYTES:
        raise BadRequest(f"the id of a job is {2 * ID_BYTES} hexadecimal digits, got {text!r:.60}")
    return id


def look(target: Target, id: bytes, *, as_json: bool) -> int:
    """Prints all data of a job: its state, its failures, and the end of its text."""
    job = ask(target, READ, {"job": id}, timeout=ANSWER_TIMEOUT)
    if as_json:
        print(json_text(shown_row(job)))
        return 0
    print_job(job)
    return 0


def print_job(job: Mapping[str, Any]) -> None:
    """Prints the state and failures of a job; for operators also stack traces and text.

    `job` is the broker's answer to the message `job`. Only the answer of the admin socket has the
    owner, stack traces and text.
    """
    attempts = f"{job['attempts']} in a row that failed" if job["attempts"] else ""
    if job.get("starts"):
        attempts += (
            f", started {job['starts']} times since its last token, charge {job['charge']:g}"
        )
    waits, gone, url = job["state"] == "waiting", job["state"] == "gone", job.get("notify")
    lines = {
        "job": job["job"].hex(),
        "key": job["key"],
        "owner": job.get("owner", "") + (f"/{job['tenant']}" if job.get("tenant") else ""),
        "model": job["model"],
        "state": job["state"],
        "tokens": f"{job['ids']} of generation {job['gen']}",
        "attempts": attempts.removeprefix(", "),
        "submitted": _moment(job["submitted"]),
        "not before": _moment(job["due"]) if waits and job["due"] > job["submitted"] else "",
        "deadline": _moment(job["deadline"]),
        "ended": _moment(job["ended"]),
        "key free at" if gone else "kept until": _moment(job["forget"]),
        "notice to": f"{url} ({job.get('notice') or 'at its end'})" if url else "",
        "cause": job["cause"],
        "damaged": job.get("damaged", ""),
    }
    for name, value in lines.items():
        if value:
            print(f"{name + ':':<12} {escape_line(str(value))}")
    for number, failure in enumerate(job["failures"], 1):
        print(f"\nfailure {failure.get('number', number)}, {_moment(failure['at'])}:"
              f" {escape_line(failure['cause'])}")  # fmt: skip
        if failure.get("stacks"):
            print(escape_text(failure["stacks"]).rstrip())
    if job.get("text"):
        print(f"\ntext from token {job['text_from']} on:")
        print(escape_text(job["text"]))


def _moment(at: float | None) -> str:
    return "" if at is None else time.strftime(LOCAL, time.localtime(at))


# ---- copies --------------------------------------------------------------------------------------


def export(target: Target, file: str, state: str) -> int:
    """Writes all stored data of jobs into a file of JSON lines; "-" is standard output.

    The file gets its name when it is complete. Its last line has the number of jobs and the number
    of lines before the last line.
    """
    with _output(file) as out:
        counts = {"jobs": 0, "lines": 1}
        out.write(json_text({"mlxpool_jobs": FORMAT, "at": time.time()}) + "\n")
        for item in _items(target, state):
            counts["jobs"] += "job" in item
            counts["lines"] += 1
            out.write(json.dumps(as_json(item), separators=(",", ":")) + "\n")
        out.write(json_text({"end": counts}) + "\n")
    if file != "-":
        print(f"{counts['jobs']} jobs, {counts['lines'] + 1} lines: {escape_line(file)}")
    return 0


def _items(target: Target, state: str) -> Iterator[Mapping[str, Any]]:
    following: Mapping[str, int] | None = {}
    while following is not None:
        body = {**following, "state": state}
        answer = ask(target, asked.EXPORT, body, timeout=ANSWER_TIMEOUT)
        yield from answer["items"]
        following = answer["next"]


@contextmanager
def _output(file: str) -> Iterator[IO[str]]:
    if file == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise BadRequest(f"cannot write {file}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def verify(target: Target, *, as_json: bool, told: Callable[[str], None] = print) -> int:
    """Compares all stored data with its checksums. Returns 1 if some data is damaged, else 0."""
    checked = read = 0
    damaged: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        answer = ask(target, asked.VERIFY, {"after": after}, timeout=ANSWER_TIMEOUT)
        checked, read = checked + answer["checked"], read + answer["bytes"]
        damaged += answer["damaged"]
        after = answer["next"] or None
    if as_json:
        rows = list(map(shown_row, damaged))
        told(json_text({"checked": checked, "bytes": read, "damaged": rows}))
    else:
        for row in damaged:
            told(escape_line(f"{row['owner']}: {row['damaged']}"))
        told(f"{checked} jobs of {size(read)} compared, {len(damaged)} damaged")
    return int(bool(damaged))
