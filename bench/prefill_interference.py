"""Measures the prefill of a long prompt beside running streams, and cancels; mlx-lm 0.32 as peer.

    python bench/prefill_interference.py [--rounds 7] [--json FILE]

Both run the same random model of the embedded one's size with a context of 16,384, in float32,
with the same BLAS, in one process. A long prompt is admitted while eight streams decode: the gaps
are those between two tokens of the running streams from its admission to its first token, ours
through the compute thread with its queues, theirs in a bare loop. Cancels are timed from the
message to the end of the stream, which comes after its row is free. Their bound is two steps, one
chunk and 5 ms, with steps and chunks as long as this run's 99th percentile. For decode alone see
`mlxpool bench engine`.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxpool.bench import checkpoint, report
from mlxpool.bench.shapes import SHAPES
from mlxpool.broker.processes.blas import preload
from mlxpool.common.process import private_temp
from mlxpool.worker.compute.progress import Progress

SHAPE = "small"
MODEL = SHAPES[SHAPE]
LONG_PROMPT = 4000  # tokens
UNLIMITED = 10**6  # tokens
RNG = np.random.default_rng(0)


def prompt(tokens: int) -> list[int]:
    ids: list[int] = RNG.integers(0, MODEL["vocab_size"], tokens).tolist()
    return ids


def p99(values: Iterable[float]) -> float:
    return float(np.percentile(list(values), 99))


# ---- a compute thread --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A delta and the time of its arrival."""

    at: float
    name: int
    ended: bool


class TimedProgress(Progress):
    """Records the seconds of every step, with chunks of prompts and without."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.durations: dict[str, list[float]] = {"prefill": [], "decode": []}
        self._awaited_from = 0.0

    def awaits(
        self, request: bytes | None, tokens: int, rows: int, *, measured: bool = True
    ) -> None:
        """See Progress."""
        super().awaits(request, tokens, rows, measured=measured)
        self._awaited_from = time.perf_counter()

    def ended(self, *, fresh: bool) -> None:
        """See Progress."""
        self.durations[self.phase].append(time.perf_counter() - self._awaited_from)
        super().ended(fresh=fresh)


class ComputeHarness:
    """A started compute thread whose messages this process sends and receives."""

    def __init__(self, folder: Path) -> None:
        from mlxpool.common.config.schema import ModelConfig, WorkerConfig
        from mlxpool.worker.compute.messages import Loaded
        from mlxpool.worker.compute.thread import Compute

        self.mail: queue.SimpleQueue[Any] = queue.SimpleQueue()
        model = ModelConfig(path=str(folder), sequences=9, prefix_cache="off")
        self.progress = TimedProgress()
        self.compute = Compute(
            WorkerConfig("", "bench/0", "", "bench", model), self.progress, self._post
        )
        self.compute.start()
        while not isinstance(self.mail.get()[1], Loaded):
            pass

    def _post(self, mail: object) -> None:
        self.mail.put((time.perf_counter(), mail))

    def start(self, name: int, tokens: int) -> None:
        from mlxpool.common.options import Options
        from mlxpool.common.protocol.resume import Facts
        from mlxpool.worker.compute.messages import Admit
        from mlxpool.worker.prompt.detokenizer import Detokenizer
        from mlxpool.worker.scheduling.sequence import Sequence as Job

        greedy = Options(temperature=0.0, ignore_eos=True)
        count = MODEL["max_position_embeddings"] - tokens
        job = Job(bytes([name] * 16), 1, tuple(prompt(tokens)), greedy, 0, count)
        self.compute.send(Admit(job, Facts(), Detokenizer(lambda token: b"", ()), time.monotonic()))

    def cancel(self, name: int) -> None:
        from mlxpool.worker.compute.messages import Drop

        self.compute.send(Drop((bytes([name] * 16), 1)))

    def until(self, wanted: Callable[[Arrival], bool]) -> list[Arrival]:
        """The arrivals up to and including the first for which `wanted` is true."""
        found: list[Arrival] = []
        while True:
            at, mail = self.mail.get()
            self.compute.delta_queue.acknowledge()
            arrived = [Arrival(at, one.id[0], one.end is not None) for one in mail.deltas]
            found += arrived
            if any(map(wanted, arrived)):
                return found

    def until_all(self, names: Sequence[int]) -> None:
        """Wait for a token of each stream."""
        left = set(names)

        def last(arrival: Arrival) -> bool:
            left.discard(arrival.name)
            return not left

        self.until(last)

    def stop(self, names: Sequence[int]) -> None:
        """Cancel the streams and wait for their ends."""
        for name in names:
            self.cancel(name)
        left = set(names)

        def last(arrival: Arrival) -> bool:
            if arrival.ended:
                left.discard(arrival.name)
            return not left

        self.until(last)


def gaps_of(arrivals: Iterable[tuple[float, int]]) -> list[float]:
    """Seconds between two tokens of each stream."""
    last: dict[int, float] = {}
    gaps = []
    for at, name in arrivals:
        if name in last:
            gaps.append(at - last[name])
        last[name] = at
    return gaps


def our_interference(worker: ComputeHarness) -> dict[str, float]:
    """Seconds: a long prompt alone and beside eight streams, and the p99 gaps of these."""
    started = time.perf_counter()
    worker.start(100, LONG_PROMPT)
    alone = worker.until(lambda arrival: arrival.name == 100)[-1].at - started
    worker.stop([100])
    for name in range(8):
        worker.start(name, 128)
    worker.until_all(range(8))
    arrivals = [a for _ in range(20) for a in worker.until(lambda arrival: arrival.name == 7)]
    quiet = gaps_of((a.at, a.name) for a in arrivals)
    started = time.perf_counter()
    worker.start(100, LONG_PROMPT)
    found = worker.until(lambda arrival: arrival.name == 100)
    beside = next(a.at for a in found if a.name == 100) - started
    before = [(a.at, a.name) for a in arrivals[-8:]]
    gaps = gaps_of([*before, *((a.at, a.name) for a in found if a.name != 100)])
    worker.stop([100, *range(8)])
    return {"alone": alone, "beside": beside, "p99": p99(gaps), "quiet": p99(quiet)}


def their_interference(model: Any) -> dict[str, float]:
    """The same measurement with mlx-lm's BatchGenerator."""
    from mlx_lm.generate import BatchGenerator

    batch: Any = BatchGenerator(model, max_tokens=UNLIMITED)
    (first,) = batch.insert([prompt(LONG_PROMPT)])
    started = time.perf_counter()
    while not batch.next()[1]:
        pass
    alone = time.perf_counter() - started
    batch.remove([first])
    batch.insert([prompt(128) for _ in range(8)])
    while len(batch.next()[1]) < 8:
        pass
    arrivals = []
    for _ in range(20):
        arrivals += [(time.perf_counter(), one.uid) for one in batch.next()[1]]
    quiet = gaps_of(arrivals)
    (new,) = batch.insert([prompt(LONG_PROMPT)])
    started = time.perf_counter()
    arrivals = arrivals[-8:]
    while True:
        rows = batch.next()[1]
        arrivals += [(time.perf_counter(), one.uid) for one in rows if one.uid != new]
        if any(one.uid == new for one in rows):
            break
    beside = time.perf_counter() - started
    return {"alone": alone, "beside": beside, "p99": p99(gaps_of(arrivals)), "quiet": p99(quiet)}


def cancels(worker: ComputeHarness, count: int) -> dict[str, float]:
    """Seconds from a cancel to the freed row, beside seven other streams."""
    others = list(range(7))
    for name in others:
        worker.start(name, 128)
    worker.until_all(others)
    times: dict[str, list[float]] = {"decode": [], "prefill": []}
    durations = worker.progress.durations
    for found in durations.values():
        found.clear()
    for number in range(count):
        for phase, tokens in (("decode", 128), ("prefill", LONG_PROMPT)):
            worker.start(100, tokens)
            if phase == "decode":
                worker.until(lambda arrival: arrival.name == 100)
            else:
                time.sleep(0.05 + 0.01 * (number % 10))
            started = time.perf_counter()
            worker.cancel(100)
            ends = worker.until(lambda arrival: arrival.name == 100 and arrival.ended)
            times[phase].append(ends[-1].at - started)
    step, chunk = p99(durations["decode"]), p99(durations["prefill"])
    worker.stop(others)
    return {
        "decode": p99(times["decode"]),
        "prefill": p99(times["prefill"]),
        "step": step,
        "chunk": chunk,
        "bound": 2 * step + chunk + 0.005,
    }


# ---- tables ------------------------------------------------------------------------------------


def show(figures: dict[str, Any], rounds: int) -> None:
    blas = "on" if "blas" in os.environ.get("LD_PRELOAD", "") else "absent"
    print(f"{report.versions()}; {report.machine()}; OpenBLAS {blas}")
    print(f"{rounds} rounds: median (minimum - maximum)\n")
    names = ("p99", "quiet", "alone", "beside")
    head = ("4,000 tokens join, seconds", "p99 gap", "p99 quiet", "first token alone", "with the 8")
    entries = [
        (side, *(report.spread([one[name] for one in figures[side]], 3) for name in names))
        for side in ("ours", "theirs")
    ]
    print(report.table(head, entries), "\n")
    print(show_cancels(figures["cancel"]))


def show_cancels(found: dict[str, float]) -> str:
    kinds = ("decode", "prefill", "step", "chunk", "bound")
    head = ("cancel, p99 in decode, s", "in prefill", "p99 of a step", "of a chunk", "the bound")
    return report.table(head, [[f"{found[kind]:.4f}" for kind in kinds]])


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """The medians that have targets."""
    ours, theirs = figures["ours"], figures["theirs"]
    gaps = [one["p99"] / other["p99"] for one, other in zip(ours, theirs, strict=True)]
    return {
        "gap, ours / theirs": statistics.median(gaps),
        "first token, beside / alone": statistics.median(o["beside"] / o["alone"] for o in ours),
    }


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm import load

    model = load(str(folder))[0]
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    figures: dict[str, Any] = {}
    worker = ComputeHarness(folder)
    our_interference(worker), their_interference(model)  # warm-up
    pairs = [(our_interference(worker), their_interference(model)) for _ in range(rounds)]
    figures["ours"], figures["theirs"] = ([pair[side] for pair in pairs] for side in (0, 1))
    figures["cancel"] = cancels(worker, 4 * rounds)
    figures["summary"] = summary(figures)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("cancel",), help="leave the rest out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    private_temp.use()
    if preload() and "blas" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **preload()})
    from mlxpool.worker.__main__ import SWITCH_INTERVAL

    sys.setswitchinterval(SWITCH_INTERVAL)
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as root:
        folder = checkpoint.write(Path(root) / "model", SHAPE)
        if options.only:
            print(show_cancels(cancels(ComputeHarness(folder), 4 * options.rounds)))
            return
        figures = measure(folder, options.rounds)
    show(figures, options.rounds)
    print()
    for name, value in figures["summary"].items():
        print(f"{name}: {value:.2f}")
    report.save(options.json, figures)


if __name__ == "__main__":
    main()
