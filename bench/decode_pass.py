"""Compares decode passes of one kernel with those of a kernel for each operation, on a CUDA GPU.

    python bench/decode_pass.py [--shape llama-3.2-1b[:LAYERS]] [--rows 1 8 32 128] [--length 128]
        [--steps 100] [--rounds 4] [--json FILE]

For each number of rows both compute the same pass over rows of so many tokens: the table has how
far their logits are apart, and how many of their best tokens are equal. Then an engine decodes by
the one and by the other in turn, and one kernel is launched alone, each launch behind the one
before. The model has random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mlxpool.worker.system.mlx_environment import set_mlx_environment

set_mlx_environment()  # before MLX is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from mlxpool.bench import checkpoint, report  # noqa: E402
from mlxpool.bench.our_engine import OurEngine, burst, decode  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.in_pool.ragged_runner import RaggedRunner  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence as EngineSequence  # noqa: E402

LAUNCHES = 20  # of one kernel alone, in a graph
WARM_STEPS = 10


def runner_of(engine: ModelEngine) -> RaggedRunner:
    """Raises SystemExit where the engine has no pass of one kernel."""
    layout = engine._layout
    if not isinstance(layout, PagedLayout) or layout.ragged is None:
        raise SystemExit("the model has no ragged passes here")
    if layout.ragged._one_kernel is None:
        raise SystemExit("one kernel does not serve the model here: see the log")
    return layout.ragged


@contextmanager
def ordinary(runner: RaggedRunner) -> Iterator[None]:
    """Passes have a kernel for each operation meanwhile."""
    with mock.patch.object(runner, "_one_kernel", None):
        yield


def logits(engine: ModelEngine, rows: Sequence[EngineSequence]) -> Any:
    """Computes one pass over the next input of each row, and takes it back; returns its logits."""
    every = [engine._rows[seq] for seq in rows]
    spans = [RowSpan(row, 1) for row in every]
    assert engine._uploads is not None
    engine._uploads.begin()
    found = engine._layout.step(spans, [7] * len(rows), None, list(range(len(rows)))).logits
    mx.eval(found)
    for row in every:
        row.trim(row.offset - 1)
    return np.array(found.astype(mx.float32))


def agreement(engine: ModelEngine, rows: Sequence[EngineSequence]) -> tuple[float, float, int]:
    """The greatest difference of logits, the share of equal ones, and rows of one best token."""
    with ordinary(runner_of(engine)):
        plain = logits(engine, rows)
    ours, again = logits(engine, rows), logits(engine, rows)
    if not (ours == again).all():
        raise SystemExit("the same pass gives other logits the second time")
    same = int((ours.argmax(1) == plain.argmax(1)).sum())
    return float(np.abs(ours - plain).max()), float((ours == plain).mean()), same


def alone(runner: RaggedRunner, lines: int) -> float:
    """Milliseconds of one kernel, over the rows of the newest pass."""
    made, decoding = runner._one_kernel, runner._decoding
    assert made is not None and decoding is not None
    numbers = decoding.numbers.copy()
    numbers[:lines] = 7
    plan, drawn = mx.array(numbers), mx.zeros((lines,), dtype=mx.int32)
    times = []
    for _ in range(4):
        last = made(plan, drawn, decoding.shape.lines)
        mx.eval(last)
        begun = time.perf_counter()
        for _ in range(LAUNCHES):  # two that run at the same time would wait for each other
            (follows,) = mx.depends([plan], [last])
            last = made(follows, drawn, decoding.shape.lines)
        mx.eval(last)
        times.append(1e3 * (time.perf_counter() - begun) / LAUNCHES)
    return min(times)


def measured(ours: OurEngine, count: int, options: argparse.Namespace) -> tuple[str, ...]:
    """A row of the table."""
    engine, rows = ours.running([options.length] * count)
    runner = runner_of(engine)
    apart, equal, same = agreement(engine, rows)
    print(f"{count} rows: {apart:.4f} apart, {equal:.4f} equal, {same} best tokens", flush=True)
    times: dict[bool, list[float]] = {True: [], False: []}

    def step() -> None:
        decode(engine, rows)

    for _ in range(options.rounds):
        for one in (True, False):
            if one:
                burst(step, WARM_STEPS)
                times[one].append(burst(step, options.steps))
            else:
                with ordinary(runner):
                    burst(step, WARM_STEPS)
                    times[one].append(burst(step, options.steps))
    burst(step, WARM_STEPS)
    while engine.in_flight:
        engine.collect()
    kernel = alone(runner, count)
    now, before = (1e3 * statistics.median(times[one]) for one in (True, False))
    shown = (
        str(count), f"{apart:.4f}", f"{equal:.4f}", f"{same} of {count}", f"{kernel:.3f}",
        f"{now:.3f}", f"{before:.3f}", f"{before / now:.2f}",
    )  # fmt: skip
    print(*shown, sep=" | ", flush=True)
    engine.close()
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b", help="NAME[:LAYERS]")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--length", type=int, default=128, help="tokens of the prompts (128)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a burst (100)")
    parser.add_argument("--rounds", type=int, default=4, help="bursts of each (4)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    name, _, layers = options.shape.partition(":")
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as scratch:
        folder = checkpoint.write(Path(scratch) / name, name, layers=int(layers or 0))
        ours = OurEngine(folder)
        table = [measured(ours, count, options) for count in options.rows]
    print(report.machine())
    print(report.versions())
    head = (
        "rows", "logits apart", "equal", "best tokens equal", "one kernel alone, ms",
        "a step, ms", "with a kernel for each operation", "ratio",
    )  # fmt: skip
    print(report.table(head, table))
    report.save(options.json, {"rows": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
