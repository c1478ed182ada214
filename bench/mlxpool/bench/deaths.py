"""Deaths: how long do streams wait after a fault, and does each stream get all its tokens?

In each round every kind of fault happens once while all streams run. The faults are SIGKILL or
SIGSTOP of a worker process (of each rank of a group), during prefill and during decode, and SIGKILL
of the broker, which is restarted immediately. The answer of each stream is compared with the answer
to the same request without a fault. A figure is the longest time after the fault that a stream
waited for a token; only streams that lost their worker or the broker are counted. If there are
fewer GPUs than ranks, groups share GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from mlxpool.bench.measurement import Measurement, Progress, percentile
from mlxpool.bench.models import absolute
from mlxpool.bench.pools import MODEL, START_TIMEOUT, serving, temporary_run_dir, toml_of, workers
from mlxpool.client import Client
from mlxpool.common.errors import Internal, PoolError

COUNTING = "builtin:counting"
STEP_US = 2000  # step time of the counting model, so that streams run when a fault comes
COUNT = [{"role": "user", "content": "Count to 90."}]  # the prompt for all other models
STUCK = 60.0  # seconds after a fault until an unfinished stream counts as stuck
LOOK_INTERVAL = 0.02  # seconds between two checks of the workers
PREFILL, DECODE = "prefill", "decode"
KILL, STOP, BROKER = "kill", "stop", "broker"  # values of --faults
SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}
PERCENTS = {"p50": 50.0, "p99": 99.0, "max": 100.0}


class Kind(Struct, frozen=True):
    """A kind of fault: signal, moment, and rank of the worker process.

    The rank -1 stands for the broker process.
    """

    signal: signal.Signals
    moment: str
    rank: int

    def __str__(self) -> str:
        whom = f"rank {self.rank} of a worker" if self.rank >= 0 else "the broker"
        return f"{self.signal.name} of {whom} in {self.moment}"


def kinds(faults: Sequence[str], devices: int) -> list[Kind]:
    """Returns the kinds of faults in `--faults`. Raises ValueError for an unknown name."""
    if unknown := set(faults) - {*SIGNALS, BROKER}:
        raise ValueError(
            f"--faults {min(unknown)}: unknown, must be one of {KILL}, {STOP}, {BROKER}"
        )
    signals = [number for name, number in SIGNALS.items() if name in faults]
    combinations = itertools.product(signals, (PREFILL, DECODE), reversed(range(devices)))
    broker = [Kind(signal.SIGKILL, DECODE, -1)] if BROKER in faults else []
    return [*itertools.starmap(Kind, combinations), *broker]


class Watched(Struct):
    """One stream: its text, and the arrival times of its deltas."""

    seed: int
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    attempts: int = 0

    def read(self, client: Client, prompt: dict[str, Any], tokens: int) -> None:
        """Reads a stream to its end."""
        arguments = {**prompt, "temperature": 0, "max_tokens": tokens, "seed": self.seed}
        try:
            with client.stream(MODEL, **arguments) as stream:
                for delta in stream:
                    self.times.append(time.monotonic())
                    self.text += delta.text
                self.attempts = stream.result.attempts
        except PoolError as error:
            self.error = f"{type(error).__name__}: {error}"

    def wait_after(self, fault: float) -> float | None:
        """Returns the longest wait for a token since the fault, in seconds; None if no token came.

        It is not always the first wait, because tokens that were sent before the fault can still
        arrive soon after it.
        """
        times = [fault, *(time for time in self.times if time > fault)]
        return max((after - before for before, after in pairwise(times)), default=None)


class Outcome(Struct, frozen=True):
    """The outcome of a fault.

    `streams`: the number of all streams. `wrong`: a message for each stream that failed or got a
    wrong text. `waits`: the longest wait for a token, in seconds, of each stream with the right
    text that lost its worker or the broker.
    """

    kind: Kind
    streams: int
    wrong: tuple[str, ...]
    waits: tuple[float, ...]

    @classmethod
    def of(
        cls, kind: Kind, streams: Sequence[Watched], texts: Sequence[str], fault: float
    ) -> Outcome:
        """Returns the outcome for these streams.

        `texts`: their expected texts. `fault`: the monotonic time of the fault. After the death of
        the broker, all streams are considered interrupted.
        """
        pairs = zip(streams, texts, strict=True)
        bad = [stream for stream, text in pairs if stream.error or stream.text != text]
        moved = [
            stream
            for stream in streams
            if (stream.attempts > 1 or kind.rank < 0) and stream not in bad
        ]
        waits = [stream.wait_after(fault) for stream in moved]
        return cls(
            kind,
            len(streams),
            tuple(f"{kind}: {stream.error or repr(stream.text)}" for stream in bad),
            tuple(wait for wait in waits if wait is not None),
        )

    def __str__(self) -> str:
        right = self.streams - len(self.wrong)
        longest = f", longest wait {max(self.waits):.3f} s" if self.waits else ""
        return (
            f"{self.kind}: {right} of {self.streams} streams are right, {len(self.waits)} were"
            f" moved{longest}"
        )


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    return (
        f"{options.model}, {options.replicas} workers of {options.devices} devices,"
        f" {options.streams} streams of at most {options.tokens} tokens, {options.rounds} faults of"
        f" each kind, a limit of {options.limit:g} s for a step."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the waits after each kind of fault. Raises Internal if an answer was wrong."""
    with temporary_run_dir() as run_dir, Pool(run_dir, options) as pool:
        progress("without a fault")
        streams = pool.streams()
        pool.end_of(streams)
        if failed := [stream.error for stream in streams if stream.error]:
            raise Internal(f"a stream failed without a fault: {failed[0]}")
        texts = [stream.text for stream in streams]
        outcomes: list[Outcome] = []
        for number in range(options.rounds):
            for kind in kinds(options.faults, options.devices):
                outcomes.append(pool.fault(kind, texts))
                progress(f"round {number + 1} of {options.rounds}: {outcomes[-1]}")
    yield from lines(outcomes)
    if wrong := [problem for outcome in outcomes for problem in outcome.wrong]:
        raise Internal(f"{len(wrong)} streams were wrong: {'; '.join(wrong)}")


def lines(outcomes: Sequence[Outcome]) -> Iterator[Measurement]:
    """Yields a measurement for each kind of fault: the waits of the streams that it interrupted.

    A kind that interrupted no stream has no measurement.
    """
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        these = [outcome for outcome in outcomes if outcome.kind == kind]
        waits = [1000 * wait for outcome in these for wait in outcome.waits]
        streams = sum(outcome.streams for outcome in these)
        wrong = sum(len(outcome.wrong) for outcome in these)
        note = (
            f"{kind}: {len(these)} times, {streams - wrong} of {streams} streams were right,"
            f" {len(waits)} were moved."
        )
        if waits:
            sides = {name: (percentile(waits, percent),) for name, percent in PERCENTS.items()}
            group = "the next token after a fault"
            yield Measurement(group, str(kind), "ms", sides, less_is_better=True, note=note)


class Pool:
    """Runs a pool and a client with streams, and causes faults in the pool's processes."""

    def __init__(self, run_dir: Path, options: argparse.Namespace) -> None:
        self._run_dir, self._options = run_dir, options
        self._draw = random.Random(1)
        self._prompt: dict[str, Any] = {"messages": COUNT}
        model: dict[str, Any] = {
            "path": absolute(options.model),
            "devices": options.devices,
            "replicas": options.replicas,
            "sequences": options.streams,
            "pin": True,
        }
        if options.model == COUNTING:
            self._prompt = {"prompt": COUNT[0]["content"], "ignore_eos": True}
            model["counting.step_us"] = STEP_US
        self._toml = toml_of(
            model,
            {
                "step_limit": options.limit,
                "prefill_limit": options.limit,
                "restart_delay": 0.05,
                "restart_delay_max": 0.05,
                "restart_limit": 1000,
                "poison_life": 0,
                "stop_grace": 1.0,
            },
        )

    def __enter__(self) -> Pool:
        with ExitStack() as stack:
            self._broker = stack.enter_context(serving(self._run_dir, self._toml))
            self._client = stack.enter_context(Client(self._run_dir, connect_timeout=60))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def streams(self) -> list[Watched]:
        """Starts streams when all workers are ready."""
        self._ready()
        streams = [Watched(seed) for seed in range(self._options.streams)]
        arguments = (self._client, self._prompt, self._options.tokens)
        self._threads = [
            threading.Thread(target=stream.read, args=arguments, daemon=True) for stream in streams
        ]
        for thread in self._threads:
            thread.start()
        return streams

    def end_of(self, streams: Sequence[Watched]) -> None:
        """Waits for the ends of streams; a stream that does not end gets an error."""
        end = time.monotonic() + STUCK
        for stream, thread in zip(streams, self._threads, strict=True):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                stream.error = f"stuck: no end after {STUCK:.0f} s"

    def fault(self, kind: Kind, texts: Sequence[str]) -> Outcome:
        """Starts streams, causes a fault, and returns the outcome once all streams have ended."""
        streams = self.streams()
        if kind.moment == DECODE:
            _wait(
                lambda: all(stream.times or stream.error for stream in streams),
                "all streams have begun",
            )
        time.sleep(self._draw.uniform(0.0, 0.01))
        victim = max(self._ready(), key=lambda worker: int(worker["running"]))
        fault = time.monotonic()
        if kind.rank < 0:
            self._broker.kill()
            self._broker.wait()
            self._broker = self._stack.enter_context(serving(self._run_dir, self._toml))
        else:
            pids = [victim["pid"], *(rank["pid"] for rank in victim.get("ranks") or ())]
            os.kill(int(pids[kind.rank]), kind.signal)
        self.end_of(streams)
        return Outcome.of(kind, streams, texts, fault)

    def _ready(self) -> list[dict[str, Any]]:
        """Waits until all workers are ready, and returns them."""
        ready_workers: list[dict[str, Any]] = []

        def ready() -> bool:
            ready_workers[:] = [
                worker for worker in workers(self._run_dir) if worker["state"] == "ready"
            ]
            return len(ready_workers) == int(self._options.replicas)

        _wait(ready, f"{self._options.replicas} workers are ready")
        return ready_workers


def _wait(happened: Callable[[], bool], what: str) -> None:
    """Waits until `happened` is true. Raises Internal naming `what` if it takes too long."""
    end = time.monotonic() + START_TIMEOUT
    while not happened():
        if time.monotonic() > end:
            raise Internal(f"not {what} within {START_TIMEOUT:.0f} s")
        time.sleep(LOOK_INTERVAL)
