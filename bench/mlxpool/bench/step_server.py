"""Runs an engine in its own process, and times its steps at the request of another process.

    python step_server.py FOLDER   # PYTHONPATH: the modules of a checkout, version 0.1 or later

Input: a job as JSON in each line, {"decode": [length of each prompt], "options": {…}, "steps": 24}
or {"prefill": tokens, "steps": 1}. Output: the mean seconds of a step, in clock time and in
processor time of this process. A job that equals the previous job continues with its sequences.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

SPARE = 2048  # tokens of a row's context beyond its prompt

Step = Callable[[], object]


def serve(
    begin: Callable[[Mapping[str, Any]], Sequence[Step]],
    answers: IO[str],
    finish: Step = lambda: None,
) -> None:
    """Answers the jobs that arrive on standard input.

    `begin` returns one or more functions, each of which computes a step of a job. The answer is the
    time of the fastest function. `finish` waits for work that steps have queued.
    """
    name, ways = "", list[Step]()
    for line in sys.stdin:
        job = json.loads(line)
        steps = job.pop("steps")
        if json.dumps(job) != name:
            ways.clear()  # frees the rows of the previous job
            name, ways = json.dumps(job), [*begin(job)]
        times = []
        for step in ways:
            finish()
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            finish()
            took = time.perf_counter() - clock, time.process_time() - processor
            times.append([seconds / steps for seconds in took])
        print(json.dumps(min(times)), file=answers, flush=True)


def private_output() -> IO[str]:
    """Returns a stream to standard output that only answers use.

    Output of libraries goes to standard error instead.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = private_output()
    with contextlib.suppress(ImportError):  # mlxpool 0.1 does not have this setting
        import_module("mlxpool.worker.system.mlx_environment").set_mlx_environment()
    try:
        engine = import_module("mlxpool.bench.our_engine").OurEngine
    except ImportError:
        engine = import_module("mlxpool.bench.ours").Ours  # the name in mlxpool 0.1
    ours = engine(Path(sys.argv[1]), spare=SPARE)
    finish = import_module("mlx.core").synchronize

    def begin(job: Mapping[str, Any]) -> Sequence[Step]:
        if "prefill" in job:
            return [ours.prefill(job["prefill"])]
        return [ours.steps(job["decode"], job["options"])]

    serve(begin, answers, finish)


if __name__ == "__main__":
    main()
