"""Compares the steps of the compute thread in this checkout and in another one, in pairs.

    python bench/loop_pairs.py --beside CHECKOUT [--model counting|FOLDER] [--rows 8]
        [--steps 2000] [--bursts 10] [--json FILE]

What a setting adds must cost nothing where it is off. So a process of each checkout runs requests
with all settings at their defaults through the compute thread's loop: messages, admission,
schedule, pass, draw, texts, deltas. They take turns: a burst of steps of the one, a burst of the
other. A pair is two bursts that follow each other; its ratio is our processor time divided by the
other's, so above 1 this checkout is slower. Also: how many functions a step calls, of Python and of
C, which is the same in each run.

The counting model takes no time, so there the loop is all that is measured. `--model` with the
folder of a model measures its passes as well, with one BLAS thread.

    git worktree add /tmp/before 9b7dea9d     # before 8-bit keys, the disk tier and speculation
    python bench/loop_pairs.py --beside /tmp/before
    python bench/loop_pairs.py --beside /tmp/before --model worker/mlxpool/worker/demo
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from mlxpool.bench import report
from mlxpool.broker.processes.blas import preload
from mlxpool.common.config.schema import Counting
from mlxpool.common.options import Options
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.loop import ComputeLoop
from mlxpool.worker.compute.messages import Admit, DeltaQueue, StepDeltas
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.system.cpu_threads import CpuThreads

HERE = Path(__file__).resolve().parent.parent
ROOTS = ("broker", "worker", "common", "client", "gateway", "bench")  # of a checkout
COUNTING = "counting"
PROMPT = 16  # tokens of each request
ANSWER = 1000  # tokens; then the requests end, and others take their places
FIRST_STEPS = 64  # that compile and are not measured
COUNTED_STEPS = 100  # whose calls are counted, in the middle of answers
# A BLAS thread that waits for others uses processor time as well.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


# ---- the process of a checkout -------------------------------------------------------------------


def make_engine(model: str, rows: int) -> Engine:
    """Returns the engine, with every setting that it may leave out."""
    if model == COUNTING:
        return CountingEngine(Counting(step_us=0, prefill_us=0), 0)
    from mlxpool.worker.engine.model_engine import ModelEngine
    from mlxpool.worker.weights.inspect import inspect
    from mlxpool.worker.weights.load import load

    engine = ModelEngine(load(inspect(Path(model))), max_sequences=rows)
    engine.warm_up()
    return engine


class Loop:
    """The compute thread's loop in this thread, with `rows` requests at any time."""

    def __init__(self, model: str, rows: int) -> None:
        self._engine = make_engine(model, rows)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        progress = Progress(lambda: None)
        self._deltas = DeltaQueue(self._take, progress)
        threads = CpuThreads(None, os.cpu_count() or 1)
        self._loop = ComputeLoop(
            self._engine, rows, self._inbox, self._deltas, progress, threads, self._take
        )
        self._number = 0
        for _ in range(rows):
            self._ask()

    def _ask(self) -> None:
        self._number += 1
        prompt = tuple(range(1, PROMPT + 1))
        options = Options.parse({"seed": self._number, "temperature": 0.0, "ignore_eos": True})
        seq = Sequence(self._number.to_bytes(16, "big"), 1, prompt, options, 1, ANSWER)
        text = Detokenizer(self._engine.piece, ())
        self._inbox.put(Admit(seq, Facts(), text, time.monotonic()))

    def _take(self, message: object) -> None:
        """What the main thread does with a message."""
        if isinstance(message, StepDeltas):
            self._deltas.acknowledge()
            for one in message.deltas:
                if one.end is not None:
                    self._ask()

    def run(self, steps: int) -> float:
        """Returns the processor seconds of so many steps."""
        began = time.process_time()
        for _ in range(steps):
            deltas = self._loop._take_messages()
            deltas += self._loop._step()
            self._deltas.put(deltas)
        return time.process_time() - began

    def calls(self, steps: int) -> dict[str, float]:
        """Returns how many functions a step calls: of Python and of C."""
        found: Counter[str] = Counter()

        def note(frame: FrameType, event: str, argument: object) -> None:
            found[event] += 1

        sys.setprofile(note)
        try:
            self.run(steps)
        finally:
            sys.setprofile(None)
        return {"Python": found["call"] / steps, "C": found["c_call"] / steps}


def serve(model: str, rows: int) -> None:
    """Answer each line of standard input: the processor seconds of so many steps; 0: the calls."""
    loop = Loop(model, rows)
    loop.run(FIRST_STEPS)
    for line in sys.stdin:
        steps = int(line)
        answer = loop.run(steps) if steps else loop.calls(COUNTED_STEPS)
        print(json.dumps(answer), flush=True)


# ---- the pairs -----------------------------------------------------------------------------------


class Side:
    """The process of one checkout."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        self._checkout = checkout
        # -S: an editable installation of this checkout would come before PYTHONPATH.
        packages = [one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
        path = os.pathsep.join([*(str(checkout / root) for root in ROOTS), *packages])
        program = [str(Path(__file__).resolve()), "--serve", f"--model={options.model}"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", *program, f"--rows={options.rows}"],
            env={**os.environ, **ONE_THREAD, **preload(), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, steps: int) -> Any:
        """Returns the answer of `serve`. Raises SystemExit when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._checkout} ended: see its messages above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="the other checkout")
    parser.add_argument("--model", default=COUNTING, help="counting, or the folder of a model")
    parser.add_argument("--rows", type=int, default=8, help="that decode at once (8)")
    parser.add_argument("--steps", type=int, default=2000, help="of each checkout (2000)")
    parser.add_argument("--bursts", type=int, default=10, help="into which they are divided (10)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model != COUNTING:
        options.model = str(Path(options.model).resolve())
    if options.serve:
        serve(options.model, options.rows)
        return 0
    if options.beside is None:
        parser.error("--beside is missing")
    each = max(1, options.steps // options.bursts)
    with ExitStack() as stack:
        sides = [Side(one, options) for one in (options.beside.resolve(), HERE)]
        for side in sides:
            stack.callback(side.close)
        calls = [side.ask(0) for side in sides]
        pairs = []
        for number in range(options.bursts):
            found = {side: side.ask(each) for side in (sides if number % 2 else sides[::-1])}
            pairs.append([1e6 * found[side] / each for side in sides])
    rows = [("processor, us", *(report.spread([pair[n] for pair in pairs]) for n in range(2)))]
    rows += [(f"calls of {kind}", *(f"{one[kind]:,.1f}" for one in calls)) for kind in calls[0]]
    ratios = [ours / beside for beside, ours in pairs]
    whole = sum(ours for _, ours in pairs) / sum(beside for beside, _ in pairs)
    print(report.machine())
    print(report.versions())
    print(report.table((f"a step of {options.rows} rows", "beside", "here"), rows))
    print(f"\nprocessor, here divided by beside: {report.spread(ratios, 3)}")
    print(f"the same of all bursts together: {whole:.3f}")
    report.save(options.json, {"us": pairs, "calls": calls, "median": statistics.median(ratios)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
