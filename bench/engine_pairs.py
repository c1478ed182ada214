"""Measures the engine of this checkout and of another one in alternating bursts, also of 0.1.

    python bench/engine_pairs.py --beside CHECKOUT [--model FOLDER ...]
        [--shape NAME[:LAYERS[:MODE]] ...] [--streams 1 8] [--prefill 512] [--sampled]
        [--rounds 8] [--seconds N] [--json FILE]

A process of each checkout loads each model. First all of them do everything once, at the same time,
so that kernels are compiled. Then they take turns: a burst of the one, a burst of the other. A pair
is two bursts that follow each other. Its ratio is the other's time divided by ours: above 1, this
checkout is faster. On a GPU the time is that of the clock. On a CPU it is the processor time, which
other programs change less; there is one BLAS thread unless OPENBLAS_NUM_THREADS says more.

    git worktree add /tmp/old 66becda        # 0.1.0
    python bench/engine_pairs.py --beside /tmp/old --shape small
    python bench/engine_pairs.py --beside /tmp/old --streams 1 32 \\
        --shape llama-3.2-1b:8:affine glm-4.7-flash:4 hybrid-0.8b:8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOTS = ("broker", "worker", "common", "client", "gateway", "bench")  # of a checkout
HERE = Path(__file__).resolve().parent.parent
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
PROMPT = 128  # tokens of the prompts of rows that decode
SPARE = 2048  # tokens of a row's context beyond its prompt
# A BLAS thread that waits for others uses processor time as well.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
FIRST_STEPS = 8  # that compile and are not measured


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: decode steps of so many `streams`, or a prefill of `tokens`."""

    streams: int = 0
    tokens: int = 0
    sampled: bool = False

    @property
    def name(self) -> str:
        if self.tokens:
            return f"prefill of {self.tokens:,} tokens"
        how = ", sampled" if self.sampled else ""
        return f"{self.streams} stream{'s' * (self.streams > 1)}{how}"

    @property
    def work(self) -> int:
        """The tokens of a step."""
        return self.tokens or self.streams


# ---- the process of a checkout, whose modules may be those of 0.1 --------------------------------


def serve(folder: Path, answers: IO[str]) -> None:
    """Answer each line of standard input: [streams, tokens, sampled, steps].

    The answer is the seconds of a step, of the clock and of the processor.
    """
    with contextlib.suppress(ImportError):  # 0.1 sets nothing
        import_module("mlxpool.worker.system.mlx_environment").set_mlx_environment()
    import mlx.core as mx

    try:
        engine = import_module("mlxpool.bench.our_engine").OurEngine
    except ImportError:
        engine = import_module("mlxpool.bench.ours").Ours  # as 0.1 has it
    ours = engine(folder, spare=SPARE)
    known: dict[tuple[int, int, bool], Callable[[], object]] = {}
    for line in sys.stdin:
        streams, tokens, sampled, steps = json.loads(line)
        key = streams, tokens, sampled
        if key not in known:
            options = SAMPLED if sampled else GREEDY
            known[key] = ours.prefill(tokens) if tokens else ours.steps([PROMPT] * streams, options)
        step = known[key]
        mx.synchronize()
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        mx.synchronize()
        took = (time.perf_counter() - clock) / steps, (time.process_time() - processor) / steps
        print(json.dumps(took), file=answers, flush=True)


# ---- the pairs -----------------------------------------------------------------------------------


class Side:
    """A model in a process of one checkout."""

    def __init__(self, checkout: Path, folder: Path, log: IO[bytes]) -> None:
        self.checkout = checkout
        # -S: an editable installation of this checkout would come before PYTHONPATH.
        roots = [str(checkout / root) for root in ROOTS]
        packages = [one for one in sys.path if Path(one).name in ("site-packages", "dist-packages")]
        path = os.pathsep.join([*roots, *packages])
        program = str(Path(__file__).resolve())
        command = [sys.executable, "-S", "-P", program, "--serve", str(folder)]
        self._process = subprocess.Popen(
            command,
            env={**ONE_THREAD, **os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def begin(self, case: Case, steps: int) -> None:
        assert self._process.stdin is not None
        request = [case.streams, case.tokens, case.sampled, steps]
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def end(self) -> tuple[float, float]:
        """Seconds of a step of what was begun, of the clock and of the processor.

        Raises SystemExit when the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} ended: see its messages above")
        clock, processor = json.loads(line)
        return clock, processor

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def sides(checkouts: list[Path], folder: Path) -> Iterator[list[Side]]:
    """Processes of the checkouts meanwhile; what they say of errors is printed if they fail."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        found = [Side(one, folder, log) for one in checkouts]
        for one in found:
            stack.callback(one.close)
        try:
            yield found
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise


def steps_of(case: Case, seconds: float, burst: float) -> int:
    """The steps of a burst of about `burst` seconds."""
    return max(1, min(200, round(burst / max(seconds, 1e-5))))


def measure(
    beside: Side, ours: Side, case: Case, rounds: int, burst: float, until: float
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Pairs of seconds of a step, the other checkout's first.

    There are fewer rounds when the time is over.
    """
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    first = {}
    for side in (beside, ours):
        side.begin(case, FIRST_STEPS if case.streams else 1)
        first[side] = side.end()[0]
    # A row has room for so many tokens in all rounds.
    steps = max(1, min(steps_of(case, max(first.values()), burst), (SPARE - FIRST_STEPS) // rounds))
    for number in range(rounds):
        if time.monotonic() > until:
            break
        found = {}
        for side in (beside, ours) if number % 2 else (ours, beside):
            side.begin(case, steps)
            found[side] = side.end()
        pairs.append((found[beside], found[ours]))
    return pairs


def shown(model: str, case: Case, pairs: Any, which: int) -> tuple[str, ...]:
    """A row of the table; `which`: 0 the clock, 1 the processor."""
    from mlxpool.bench import report

    before = [case.work / pair[0][which] for pair in pairs]
    now = [case.work / pair[1][which] for pair in pairs]
    ratios = [pair[0][which] / pair[1][which] for pair in pairs]
    ratio = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} - {max(ratios):.2f})"
    return model, case.name, report.spread(before, 0), report.spread(now, 0), ratio


def folders(options: argparse.Namespace, scratch: Path) -> list[tuple[str, Path]]:
    """The models with their names; those of shapes are written first."""
    from mlxpool.bench import checkpoint

    found = [(folder.name, folder.resolve()) for folder in options.model]
    for text in options.shape:
        name, _, rest = text.partition(":")
        layers, _, mode = rest.partition(":")
        folder = scratch / text.replace(":", "-")
        checkpoint.write(folder, name, layers=int(layers or 0), quantise=mode)
        found.append((text, folder))
    return found


def measured(options: argparse.Namespace, which: int) -> tuple[list[tuple[str, ...]], Any]:
    """Rows of the table, and the pairs of each model and case."""
    until = time.monotonic() + options.seconds
    cases = [Case(streams=count) for count in options.streams]
    if options.sampled:
        cases += [Case(streams=count, sampled=True) for count in options.streams]
    cases += [Case(tokens=count) for count in options.prefill]
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as scratch, ExitStack() as stack:
        models = [
            (name, stack.enter_context(sides([options.beside.resolve(), HERE], folder)))
            for name, folder in folders(options, Path(scratch))
        ]
        every = [side for _, both in models for side in both]
        for case in cases:  # all processes at the same time
            for side in every:
                side.begin(case, 1)
        for _ in cases:
            for side in every:
                side.end()
        for name, (beside, ours) in models:
            for case in cases:
                pairs = measure(beside, ours, case, options.rounds, options.burst, until)
                if pairs:
                    rows.append(shown(name, case, pairs, which))
                    figures[f"{name}, {case.name}"] = pairs
                    print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows, figures


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--beside", type=Path, help="the other checkout")
    found.add_argument("--model", type=Path, nargs="*", default=[], help="folders of models")
    found.add_argument("--shape", nargs="*", default=[], help="random weights, see above")
    found.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    found.add_argument("--prefill", type=int, nargs="*", default=[], help="tokens of prompts")
    found.add_argument("--sampled", action="store_true", help="decode with sampling, too")
    found.add_argument("--rounds", type=int, default=8, help="pairs of each case (8)")
    found.add_argument("--burst", type=float, default=0.3, help="seconds of a burst (0.3)")
    found.add_argument("--seconds", type=float, default=1e9, help="after which it ends early")
    found.add_argument("--json", type=Path, help="write the figures to this file")
    found.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return found


def main() -> int:
    options = parser().parse_args()
    if options.serve is not None:
        with os.fdopen(os.dup(1), "w") as answers:
            os.dup2(2, 1)  # whatever a library prints
            serve(options.serve, answers)
        return 0
    if options.beside is None or not (options.model or options.shape):
        parser().error("--beside, and --model or --shape")
    from mlxpool.broker.processes.blas import preload

    os.environ |= preload()  # as workers have it
    import mlx.core as mx

    from mlxpool.bench import report

    which = int(mx.default_device().type == mx.DeviceType.cpu)
    rows, figures = measured(options, which)
    print(report.machine())
    print(report.versions())
    time_of = ("the clock", "the processor")[which]
    head = ("model", f"tokens/s by {time_of}", "beside", "here", "ratio of pairs")
    print(report.table(head, rows))
    report.save(options.json, {"seconds": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
