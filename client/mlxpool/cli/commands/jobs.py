"""`mlxpool submit`, `fetch`, `jobs`, `retry` and `release`: requests that run without their client.

The module batch_actions implements these commands for batches and files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlxpool.cli.batch_actions as batches
from mlxpool.cli import job_operations
from mlxpool.cli.columns import Column
from mlxpool.cli.formatting import count, duration, json_text, size
from mlxpool.cli.printed_stream import (
    answer_as_json,
    print_deltas,
    prompt_of,
    result_as_json,
)
from mlxpool.cli.request_flags import (
    add_connect_timeout,
    add_options,
    client_of,
    decode_utf8,
    options_of,
    shown_form,
    take_prompt,
)
from mlxpool.cli.style import print_table
from mlxpool.cli.target import KEY_VARIABLE, add_flags
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.bounds import seconds as seconds_of
from mlxpool.common.errors import BadRequest
from mlxpool.common.escapes import escape_line
from mlxpool.common.protocol.from_client import MAX_PRIORITY
from mlxpool.common.protocol.kept.job_messages import IDLE, JOB_STATES

if TYPE_CHECKING:
    from mlxpool.client import Delta

FOLLOW_INTERVAL = 0.5  # seconds
KEY = "the key that `mlxpool submit` printed"
OF_JOBS = ("state", "after", "follow")  # flags for lists of jobs, not of batches or files
LISTING = ("state", "after", "batch", "batches", "files", "follow", *job_operations.FLAGS)
DESCRIPTIONS = {
    "retry": "Lets a dead or expired job wait again; it goes on after its present tokens.",
    "release": "Deletes the result of a job that has ended. Requests with its key get `gone` for"
    " job_key_life (24 h), then the key is free.",
}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds the commands of jobs."""
    submitting = argparse.ArgumentParser(add_help=False, parents=[common])
    add_flags(submitting, with_key=False)
    _add_submit(
        commands.add_parser(
            "submit",
            parents=[submitting],
            help="complete a text as a job, without waiting for it",
            description="Submits a completion as a job, prints its key when it is on the disk, and"
            " ends; with --batch a file of many completions. The file of your own"
            f" key is ${KEY_VARIABLE}.",
        )
    )
    common = argparse.ArgumentParser(add_help=False, parents=[common])
    add_flags(common)
    sub = commands.add_parser(
        "fetch",
        parents=[common],
        help="print a job's text, and wait for its end",
        description="Prints a job's text from its beginning, and waits for the rest if the job is"
        " not done. Any number of programs may read a job; their end does not cancel it.",
    )
    sub.add_argument("key", metavar="KEY", help=KEY)
    sub.add_argument(
        "--from",
        dest="start",
        metavar="N",
        type=int,
        default=0,
        help="index of the first token; the text may begin earlier, at the beginning of a step",
    )
    sub.add_argument(
        "--gen",
        type=int,
        metavar="N",
        help="generation of the job, see `jobs --json`: fail if the job has begun anew since",
    )
    sub.add_argument(
        "--raw",
        action="store_true",
        help="print control characters as they are, even on a terminal",
    )
    _add_batch(sub, "KEY names a batch: wait for its end, and print its results as JSON lines")
    batches.add_output(sub)
    sub.set_defaults(run=fetch)
    sub = commands.add_parser(
        "jobs",
        parents=[common],
        help="list your jobs, or show one job",
        description="Lists your jobs, the newest first; with KEY shows one job with its failures.",
    )
    sub.add_argument("job_key", metavar="KEY", nargs="?", help=f"key of a job: {KEY}")
    sub.add_argument(
        "--state",
        choices=JOB_STATES,
        metavar="STATE",
        help=f"list only jobs that are {', '.join(JOB_STATES[:-1])} or {JOB_STATES[-1]}",
    )
    sub.add_argument(
        "--after",
        metavar="END_SEQ",
        type=int,
        help="list jobs whose end has a higher number than this, in order; 0: all ended jobs",
    )
    sub.add_argument(
        "--limit", metavar="N", type=count, default=100, help="greatest number of rows (100)"
    )
    of = sub.add_mutually_exclusive_group()
    of.add_argument("--batch", metavar="KEY", help="show a batch, and the jobs of its lines")
    of.add_argument("--batches", action="store_true", help="list your batches")
    of.add_argument("--files", action="store_true", help="list the files kept for batches")
    sub.add_argument(
        "--follow",
        action="store_true",
        help="print each job when it ends, until Ctrl-C; begin after --after, else with jobs that"
        " end from now on",
    )
    job_operations.add_flags(sub)
    sub.set_defaults(run=jobs)
    for name, text, action in (
        ("retry", "retry a dead or expired job, or such lines of a batch", retry),
        ("release", "delete the result of an ended job or batch, or a file", release),
    ):
        sub = commands.add_parser(name, parents=[common], help=text, description=DESCRIPTIONS[name])
        sub.add_argument("key", metavar="KEY", help=KEY)
        _add_batch(sub, "KEY names a batch")
        if action is release:
            sub.add_argument("--file", action="store_true", help="KEY names a file: delete it")
        sub.set_defaults(run=action)
    for name in ("fetch", "jobs", "retry", "release"):
        add_connect_timeout(commands.choices[name])


def _add_batch(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--batch", action="store_true", help=text)


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a name that `mlxpool models` shows; with --batch for lines that name no model",
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="the text to complete (default, or -: standard input)",
    )
    parser.add_argument(
        "--key",
        dest="job_key",
        help="key of the job; the same request with the same key is the same job",
    )
    parser.add_argument(
        "--keep",
        type=_seconds,
        metavar="TIME",
        help="time for which the result is kept after the end, such as 1h (default: job_keep, 24h)",
    )
    parser.add_argument(
        "--delay", type=_seconds, metavar="TIME", help="time before the job may begin"
    )
    parser.add_argument(
        "--notify", metavar="URL", help="URL for a notice when the job, or the batch, has ended"
    )
    parser.add_argument(
        "--priority",
        type=_priority,
        metavar="P",
        help="priority, 0 to 2, 2 goes first; idle: run if no other request waits (default 0)",
    )
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="submit every line of a file of JSON lines (-: standard input) as a job; the options"
        " apply to lines that do not set them",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="with --batch: show the batch's progress until the batch has ended",
    )
    batches.add_output(parser)
    parser.add_argument(
        "--allow-bad-lines",
        action="store_true",
        help="with --batch: list lines that cannot be jobs as failed, instead of sending nothing",
    )
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="an image file to put before the prompt, or at its [img-n]; may be repeated",
    )
    add_options(parser)
    add_connect_timeout(parser)
    parser.set_defaults(run=submit, take_rest=take_prompt)


def _seconds(text: str) -> float:
    """Returns the seconds of a time, with or without a unit. Raises ArgumentTypeError."""
    try:
        value = seconds_of(text, "TIME")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r}")
    return value


def _priority(text: str) -> int:
    if text == "idle":
        return IDLE
    if text.isdecimal() and int(text) <= MAX_PRIORITY:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be 0 to {MAX_PRIORITY} or idle, got {text!r}")


def submit(options: argparse.Namespace) -> int:
    """Submits a job or a batch; prints its key once it is on the disk."""
    _check_submit(options)
    if options.batch is not None:
        return batches.submit(options)
    settings = options_of(options)
    prompt = options.prompt
    if prompt in (None, "-"):
        prompt = decode_utf8(sys.stdin.buffer.read())
    if options.priority is not None:
        settings["priority"] = options.priority
    with client_of(options) as client:
        job = client.submit(
            options.model,
            **prompt_of(prompt, options.image, chat=options.chat),
            key=options.job_key,
            keep=options.keep,
            not_before=None if options.delay is None else time.time() + options.delay,
            notify=options.notify,
            **settings,
        )
    if options.json:
        print(
            json_text(
                {
                    "key": job.key,
                    "job": job.id.hex(),
                    "gen": job.gen,
                    "seed": job.seed,
                    "state": job.state,
                }
            )
        )
    else:
        print(escape_line(job.key))
        for warning in job.warnings:
            print(escape_line(f"mlxpool: {warning}"), file=sys.stderr)
    return 0


def _check_submit(options: argparse.Namespace) -> None:
    """Raises BadRequest if the given flags exclude each other."""
    if options.batch is None:
        if options.model is None:
            raise BadRequest("give MODEL and PROMPT, or --batch FILE")
        for flag in ("wait", "output", "allow_bad_lines"):
            if getattr(options, flag):
                raise BadRequest(f"--{flag.replace('_', '-')} goes with --batch FILE")
        return
    if options.prompt is not None:
        raise BadRequest("with --batch the prompts are in the file: give no PROMPT")
    for flag in ("image", "chat", "delay"):
        if getattr(options, flag):
            raise BadRequest(f"--{flag} is for a single job, not for a batch")


def fetch(options: argparse.Namespace) -> int:
    """Prints the text of a job; exit code 1 if the job was cancelled or has failed."""
    if options.batch:
        return batches.fetch(options)
    if options.output:
        raise BadRequest("--output goes with --batch")
    form = shown_form(options)

    def add(delta: Delta) -> None:
        print(form(delta.text), end="", flush=True)

    with (
        client_of(options) as client,
        client.fetch(options.key, options.start, options.gen) as stream,
    ):
        print_deltas(stream, add, as_json=options.json)
        result = stream.result
    text = "" if result.answer is None else json_text(answer_as_json(result))
    print(json_text(result_as_json(result)) if options.json else text, flush=True)
    if result.reason != "cancelled":
        return 0
    print(escape_line(f"mlxpool: the job {options.key!r} was cancelled"), file=sys.stderr)
    return 1


JOBS = (
    Column("KEY", 0, "text"),
    Column("MODEL", 2, "text"),
    Column("STATE", 0),
    Column("TOKENS", 1),
    Column("ATTEMPTS", 5),
    Column("AGE", 3),
    Column("BYTES", 6),
    Column("CAUSE", 4, "text"),
)


OF_BATCHES = (Column("LINE", 0), Column("ID", 2, "text"), *JOBS[1:])


def jobs(options: argparse.Namespace) -> int:
    """Prints a table row for each job, the newest first.

    Flags select a table of batches instead, or a report for operators.
    """
    if options.job_key is not None:
        return show(options)
    for flag in job_operations.given(options, OF_JOBS) if options.batches or options.files else ():
        listed = "batches" if options.batches else "files"
        raise BadRequest(f"--{flag} is about jobs: give it without --{listed}")
    of_operators = job_operations.run_asked(options)
    if of_operators is not None:
        return of_operators
    if options.follow:
        return follow(options)
    if options.batches:
        return batches.list_batches(options)
    if options.files:
        return batches.list_files(options)
    with client_of(options) as client:
        batch = None if options.batch is None else client.batch(options.batch)
        rows = client.jobs(
            after=options.after,
            state=options.state or "",
            limit=options.limit,
            batch=options.batch or "",
        )
    if options.json:
        whole = {} if batch is None else {"batch": batches.as_json(batch.row)}
        print(json_text({**whole, "jobs": list(map(_as_json, rows))}))
        return 0
    if batch is not None:
        batches.print_batches([batch.row])
        print()
    now = time.time()
    columns = JOBS if batch is None else OF_BATCHES
    print_table(columns, [_row(row, now, lines=batch is not None) for row in rows])
    return 0


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the map of a job for output as JSON: ids in hexadecimal digits."""
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}


def _row(job: Mapping[str, Any], now: float, *, lines: bool) -> tuple[str, ...]:
    named = (str(job["line"]), job["id"] or "-") if lines else (job["key"],)
    return (
        *named,
        job["model"],
        job["state"],
        str(job["ids"]),
        str(job["attempts"]),
        duration(max(0.0, now - job["submitted"])),
        size(job["bytes"]),
        job["cause"] or "-",
    )


def show(options: argparse.Namespace) -> int:
    """Prints one job of the user, with its failures."""
    for flag in job_operations.given(options, LISTING):
        raise BadRequest(
            f"--{flag.replace('_', '-')} lists jobs: give it without KEY, or KEY without it"
        )
    with client_of(options) as client:
        job = client.job(options.job_key)
    if options.json:
        print(json_text(_as_json(job)))
    else:
        job_operations.print_job(job)
    return 0


def follow(options: argparse.Namespace) -> int:
    """Prints each job when it ends, until Ctrl-C."""
    with client_of(options) as client:
        after = options.after
        if after is None:
            ended = client.jobs(after=0)
            after = ended[-1]["end_seq"] if ended else 0
        for row in client.follow_jobs(after, interval=FOLLOW_INTERVAL):
            if options.json:
                print(json_text(job_operations.shown_row(row)), flush=True)
            else:
                cause = f": {row['cause']}" if row["cause"] else ""
                line = f"{row['end_seq']} {row['key']} {row['state']} {row['ids']} tokens{cause}"
                print(escape_line(line), flush=True)
    return 0


def retry(options: argparse.Namespace) -> int:
    if options.batch:
        return batches.change(options, options.key, "retry")
    with client_of(options) as client:
        return _show(options, client.retry(options.key))


def release(options: argparse.Namespace) -> int:
    if options.file:
        if options.batch:
            raise BadRequest("give one of --file and --batch, not both")
        return batches.delete_file(options)
    if options.batch:
        return batches.change(options, options.key, "release")
    with client_of(options) as client:
        row = client.release(options.key)
    batches.tell_of_notice(row)
    return _show(options, row)


def _show(options: argparse.Namespace, job: Mapping[str, Any]) -> int:
    if options.json:
        print(json_text(_as_json(job)))
    else:
        print(escape_line(f"{job['key']}: {job['state']}"))
    return 0
