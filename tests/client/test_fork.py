"""A client that is used in a forked child raises at once; the parent's client still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.counting_checker import expected_ids
from support.pool import PATIENCE, Pool

# A separate program, because it forks and must end like any program. MADE and DONE are replaced.
# The alarm ends a child that hangs.
PROGRAM = """
import asyncio, json, os, signal, sys, warnings
from mlxpool.client import AsyncClient, Client, PoolError

warnings.simplefilter("ignore")  # newer Pythons warn of a fork of a process with threads
run_dir, kind = sys.argv[1:]
# A normal exit would delete the event loop, and with it what the parent's loop waits for.
leave = os._exit if kind == "asyncio" else sys.exit

def told(act):
    try:
        return {"done": repr(act())}
    except PoolError as error:
        return {"code": error.code, "message": error.message}

def in_child(act):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(200)
        os.write(writing, json.dumps(told(act) | {"pid": os.getpid()}).encode())
        leave(7)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    return json.loads(said or "{}") | {"status": os.waitpid(pid, 0)[1]}

def main():
MADE
    child = in_child(DONE)
AFTER
    print(json.dumps({"parent": os.getpid(), "child": child, "ids": ids}))
    sys.exit(3)

main()
"""
SYNC = "client = Client(run_dir, connect_timeout=200)"
USED = f"{SYNC}; client.models()"
STREAM = (
    f"{SYNC}; stream = client.stream('counting', 'hello', seed=7, max_tokens=3);"
    " first = next(iter(deltas := iter(stream)))"
)
ENDLESS = f"{SYNC}; stream = client.stream('counting', 'hello', max_tokens=10**5)"
CHOICES = ENDLESS.replace("stream(", "stream_choices(").replace("10**5", "10**5, n=2")
AFTER = "ids = list(client.generate('counting', 'hello', seed=7, max_tokens=3).ids); client.close()"
AFTER_STREAM = "ids = list(stream.read().ids); client.close()"
ASYNC = "loop = asyncio.new_event_loop(); client = AsyncClient(run_dir, connect_timeout=200)"
ASYNC_USED = f"{ASYNC}; loop.run_until_complete(client.models())"
ASYNC_AFTER = (
    "ids = list(loop.run_until_complete(client.generate('counting', 'hello', seed=7, max_tokens=3))"
    ".ids); loop.run_until_complete(client.close()); loop.close()"
)
GENERATE = "lambda: client.generate('counting', 'x', max_tokens=1)"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def ran(pool: Pool, made: str, done: str, after: str) -> dict[str, Any]:
    """Returns the JSON output of a program that forks.

    The arguments are Python code. `made` and `after`: the parent's statements before and after the
    fork. `done`: a callable that the child calls.
    """
    text = PROGRAM.replace("MADE", f"    {made}").replace("AFTER", f"    {after}")
    process = subprocess.run(
        [sys.executable, "-c", text.replace("DONE", done), str(pool.run_dir),
         "asyncio" if "loop" in made else "blocking"],
        capture_output=True, text=True, timeout=PATIENCE, env=pool.environment,
    )  # fmt: skip
    assert process.returncode == 3, process.stderr
    assert not process.stderr
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize(
    ("made", "done", "after"),
    [
        (SYNC, GENERATE, AFTER),
        (USED, GENERATE, AFTER),
        (USED, "client.models", AFTER),
        (USED, "lambda: client.cancel(bytes(16))", AFTER),
        (USED, "lambda: client.stream('counting', 'x')", AFTER),
        (USED, "lambda: client.embed('demo-embed', ['x'])", AFTER),
        (STREAM, "lambda: next(deltas)", AFTER_STREAM),
        (STREAM, "stream.read", AFTER_STREAM),
        (ENDLESS, "lambda: stream.result", AFTER),
        (CHOICES, "lambda: stream.result", AFTER),
        (ASYNC, "lambda: asyncio.run(client.models())", ASYNC_AFTER),
        (ASYNC_USED, "lambda: asyncio.run(client.models())", ASYNC_AFTER),
        (
            ASYNC_USED,
            "lambda: asyncio.run(client.generate('counting', 'x', max_tokens=1))",
            ASYNC_AFTER,
        ),
    ],
)  # fmt: skip
def test_a_use_in_a_fork_raises_and_the_parent_goes_on(
    pool: Pool, made: str, done: str, after: str
) -> None:
    report = ran(pool, made, done, after)
    child = report["child"]
    assert child["code"] == "bad_request", child
    assert str(report["parent"]) in child["message"] and str(child["pid"]) in child["message"]
    assert "make a client in each process, after the fork" in child["message"]
    assert os.waitstatus_to_exitcode(child["status"]) == 7
    assert report["ids"] == expected_ids("hello", 7, 3)


@pytest.mark.parametrize(
    ("made", "done", "after"),
    [
        (USED, "client.close", AFTER),
        (STREAM, "stream.close", AFTER_STREAM),
        (STREAM, "deltas.close", "ids = [*first.ids, *(i for d in stream for i in d.ids)]"),
        (ASYNC_USED, "lambda: asyncio.run(client.close())", ASYNC_AFTER),
    ],
)
def test_closing_in_a_fork_leaves_the_parent_alone(
    pool: Pool, made: str, done: str, after: str
) -> None:
    report = ran(pool, made, done, after)
    assert report["child"]["done"] == "None"
    assert os.waitstatus_to_exitcode(report["child"]["status"]) == 7
    assert report["ids"] == expected_ids("hello", 7, 3)


def test_the_result_of_a_stream_that_had_ended_before_can_be_read_in_a_fork(pool: Pool) -> None:
    report = ran(pool, f"{STREAM}; stream.read()", "lambda: stream.result.ids", AFTER_STREAM)
    assert report["child"]["done"] == repr(tuple(expected_ids("hello", 7, 3)))


def test_a_fork_makes_a_client_of_its_own(pool: Pool, tmp_path: Path) -> None:
    generate = "generate('counting', 'hello', seed=7, max_tokens=3).ids"
    done = f"lambda: Client(run_dir, connect_timeout=200).{generate}"
    report = ran(pool, USED, done, AFTER)
    assert report["child"]["done"] == repr(tuple(expected_ids("hello", 7, 3)))
