"""A process that sends a part of a load on schedule, independently of the answers (open loop).

python -m mlxpool.bench.load.sender # in: a Job as JSON; out: its Samples

The process prints `ready`, then reads the start time of the load, in seconds of the monotonic
clock. It ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct

from mlxpool.bench.load.http_stream import HttpFailure
from mlxpool.bench.load.samples import Sample
from mlxpool.bench.load.targets import Answer, Send, Target, opened
from mlxpool.bench.load.workload import Lengths, Request, Workload, draw
from mlxpool.common.errors import PoolError
from mlxpool.common.records import as_map

REQUEST_TIMEOUT = 600.0  # seconds from sending a request to the end of its answer


class Job(Struct, frozen=True):
    """The part of a load that one process sends: every `processes`-th request from `number` on."""

    target: Target
    workload: Workload
    rate: float
    seed: str
    number: int
    processes: int

    def requests(self) -> list[Request]:
        """Returns the requests that this process sends."""
        return draw(self.workload, self.rate, self.seed)[self.number :: self.processes]

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Self:
        workload = members["workload"]
        lengths = {name: Lengths(**workload[name]) for name in ("prompt", "output")}
        return cls(
            **{
                **members,
                "target": Target(**members["target"]),
                "workload": Workload(**{**workload, **lengths}),
            }
        )


async def run(job: Job) -> list[Sample]:
    """Sends every request when it is due, and returns when all answers have ended."""
    requests = job.requests()
    async with opened(job.target, len(requests)) as send:
        begin = _read_start_time()
        ignore_eos = job.target.ignore_eos
        tasks = (sample_of(send, request, begin, exact=ignore_eos) for request in requests)
        return await asyncio.gather(*tasks)


async def sample_of(send: Send, request: Request, begin: float, *, exact: bool) -> Sample:
    """Sends a request when it is due; returns its sample.

    `begin`: the start of the load, in seconds of the monotonic clock. `exact`: an answer with
    another number of tokens than requested is counted as failed.
    """
    await asyncio.sleep(max(0.0, begin + request.due - time.monotonic()))
    answer = Answer(begin, len(request.prompt))
    sent = time.monotonic() - begin
    error = ""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT):
            await send(request, answer)
        error = _fault(request, answer, exact=exact)
    except Exception as problem:
        error = name_of(problem)
    return Sample(
        request.due,
        sent,
        answer.times,
        answer.prompt_tokens,
        answer.output_tokens,
        error,
        answer.exact,
        answer.counts,
        answer.ids,
    )


def _fault(request: Request, answer: Answer, *, exact: bool) -> str:
    """Returns the fault of a complete answer; "" if it has no fault."""
    if not answer.times:
        return "no token"
    if exact and answer.exact and answer.output_tokens != request.output:
        fewer = answer.output_tokens < request.output
        return "fewer tokens than asked for" if fewer else "more tokens than asked for"
    return ""


def name_of(problem: Exception) -> str:
    """Returns the name under which an error is counted."""
    if isinstance(problem, PoolError):
        return problem.code
    if isinstance(problem, TimeoutError):
        return f"no end after {REQUEST_TIMEOUT:g} s"
    if isinstance(problem, HttpFailure):
        return str(problem)
    if isinstance(problem, OSError):
        return type(problem).__name__
    return f"{type(problem).__name__}: {problem}"


def _read_start_time() -> float:
    """Prints `ready`; returns the time to start. Blocks this process until the time is known."""
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    return begin


def _end_with_input() -> None:
    """Ends this process when its standard input ends, because its starter has ended."""
    sys.stdin.read()
    os._exit(1)


def _allow_connections() -> None:
    """Raises the limit of open files to the highest allowed value."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        pass  # macOS reports a limit that macOS does not accept


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process's starter
    line = sys.stdin.readline()
    if not line:
        return
    _allow_connections()
    samples = asyncio.run(run(Job.from_json(json.loads(line))))
    json.dump([as_map(sample) for sample in samples], sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # the thread that reads standard input never ends by itself


if __name__ == "__main__":
    main()
