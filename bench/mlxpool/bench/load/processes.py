"""Starts the processes that send a load, and collects their samples."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from msgspec.structs import replace

from mlxpool.bench.load.samples import Sample
from mlxpool.bench.load.sender import Job
from mlxpool.common.records import as_map

START_DELAY = 0.3  # seconds between the time when all processes are ready and the start of the load


def run(job: Job) -> list[Sample]:
    """Sends a whole load from `job.processes` processes; they have ended when this call returns.

    Returns the samples in the order of the requests. Raises ChildProcessError if a process fails;
    its traceback is on standard error.
    """
    with ExitStack() as stack:
        children = [
            stack.enter_context(_started(replace(job, number=number)))
            for number in range(job.processes)
        ]
        for child in children:
            if _line_of(child) != "ready\n":
                raise ChildProcessError(f"a process that sends to {_named(job)} ended: see above")
        begin = time.monotonic() + START_DELAY
        for child in children:
            _tell(child, str(begin))
        samples: list[Sample | None] = [None] * job.workload.requests
        for number, child in enumerate(children):
            samples[number :: job.processes] = _samples(job, child)
        return [sample for sample in samples if sample is not None]


def _samples(job: Job, child: subprocess.Popen[str]) -> Sequence[Sample]:
    assert child.stdout is not None
    output = child.stdout.read()
    if child.wait() != 0:
        raise ChildProcessError(f"a process that sends to {_named(job)} ended: see above")
    return [Sample(**fields) for fields in json.loads(output)]


@contextmanager
def _started(job: Job) -> Iterator[subprocess.Popen[str]]:
    """Runs a sender process during a `with` block, and kills it at the end if it still runs."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlxpool.bench.load.sender"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            _tell(child, json.dumps(as_map(job)))
            yield child
        finally:
            child.kill()  # does nothing if the process was waited for


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    try:
        print(line, file=child.stdin, flush=True)
    except BrokenPipeError:
        pass  # the process has ended; the next read shows it


def _line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _named(job: Job) -> str:
    return job.target.url or job.target.run_dir
