"""Kills and stops ranks of a group under streams, and checks that each stream has every token.

python -m mlxpool.bench.groups.deaths --faults 50 --replicas 4 --seconds 300

In a round all streams count to 90, in prefill or in decode one rank of a group gets SIGKILL or
SIGSTOP, and the text of each stream is compared with that without a fault. The groups are loaded
once. A round begins as soon as two groups are ready (one, where there is only one), so while one
loads again, others get faults. Prints a line for each load and each fault as it comes, and after
`--faults` or `--seconds`, or at SIGTERM, the summary as JSON: faults by kind, streams, those that
were wrong, and the longest waits of moved streams for a token since the fault. `--seconds` counts
from the start of the program; a round that has begun ends first. Where there are fewer GPUs than
ranks, groups share them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxpool.bench.pools import interrupt_at_signals, serving
from mlxpool.client import Client
from mlxpool.common.errors import PoolError
from mlxpool.common.transport import question, sockets

MODEL = "bench"
SETTINGS = """
[pool]
step_limit = {limit}
prefill_limit = {limit}
restart_delay = 0.05
restart_delay_max = 0.05
restart_limit = 1000
poison_life = 0
stop_grace = 1.0
[models.{model}]
path = "{path}"
devices = {devices}
device_sums = "{sums}"
sequences = {streams}
replicas = {replicas}
memory_limit = {memory}
pin = true
"""
COUNT = [{"role": "user", "content": "Count to 90."}]
LAST = "90."  # what the text without a fault ends with
STUCK = 60.0  # seconds after a fault after which a stream that has not ended is stuck
LOOK_INTERVAL = 0.02  # seconds between two looks at the groups
SEEDS = itertools.count()
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault: the signal, when a rank gets it, and which rank."""

    signal: signal.Signals
    moment: str
    rank: int

    def __str__(self) -> str:
        return f"{self.signal.name} of rank {self.rank} in {self.moment}"


KINDS = tuple(
    itertools.starmap(
        Kind,
        itertools.product((signal.SIGKILL, signal.SIGSTOP), (PREFILL, DECODE), (1, 0)),
    )
)


@dataclass(slots=True)
class Watched:
    """One stream: when its deltas came, and what they were. No other one has its seed."""

    seed: int
    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    attempts: int = 0

    def read(self, client: Client) -> None:
        """Reads a stream to its end."""
        try:
            with client.stream(
                MODEL, messages=COUNT, temperature=0, max_tokens=400, seed=self.seed
            ) as stream:
                for delta in stream:
                    self.times.append(time.monotonic())
                    self.text += delta.text
                self.attempts = stream.result.attempts
        except PoolError as error:
            self.error = f"{type(error).__name__}: {error}"

    def wait_after(self, fault: float) -> float | None:
        """The longest wait for a token since the fault, in seconds; None: it had all of them.

        Tokens that were under way arrive first.
        """
        times = [fault, *(one for one in self.times if one > fault)]
        return max((after - before for before, after in pairwise(times)), default=None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did: `waits` are those of streams that were moved, in seconds."""

    kind: Kind
    slot: str
    streams: int
    wrong: tuple[str, ...]
    moved: int
    waits: tuple[float, ...]

    @classmethod
    def of(
        cls, kind: Kind, slot: str, streams: Sequence[Watched], text: str, fault: float
    ) -> Outcome:
        """The outcome for these streams, each of which should have had `text`."""
        bad = [one for one in streams if one.error or one.text != text]
        moved = [one for one in streams if one.attempts > 1 and one not in bad]
        waits = [one.wait_after(fault) for one in moved]
        return cls(
            kind,
            slot,
            len(streams),
            tuple(f"{kind}: {one.error or repr(one.text)}" for one in bad),
            len(moved),
            tuple(wait for wait in waits if wait is not None),
        )

    def __str__(self) -> str:
        right = self.streams - len(self.wrong)
        longest = f", longest wait {max(self.waits):.2f} s" if self.waits else ""
        return (
            f"{self.kind} of {self.slot}: {right} of {self.streams} streams are right,"
            f" {self.moved} were moved{longest}"
        )


def main() -> int:
    """See the module. Returns 1 where a stream was wrong, or no fault was made."""
    interrupt_at_signals()
    began = time.monotonic()
    options = _options()
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        settings = SETTINGS.format(
            model=MODEL,
            path=options.model,
            limit=options.limit,
            devices=options.devices,
            streams=options.streams,
            replicas=options.replicas,
            memory=options.memory,
            sums=options.sums,
        )
        with serving(Path(folder), settings), Client(Path(folder), connect_timeout=60) as client:
            rounds = Rounds(options, Groups(Path(folder), options.devices, began), client, began)
            try:
                rounds.run()
            except KeyboardInterrupt:
                print("interrupted: what follows is of the faults so far", flush=True)
            print(json.dumps(rounds.summary()), flush=True)
    return int(rounds.failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:demo-chat", help="it has to count to 90")
    parser.add_argument("--faults", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=600.0, help="no fault after so many")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.0, help="step_limit and prefill_limit")
    parser.add_argument("--sums", default="auto", help="device_sums")
    parser.add_argument("--memory", type=int, default=0, help="memory_limit of a group")
    return parser.parse_args()


class Groups:
    """The groups of the pool as `ps` has them; prints a line for each load that has ended."""

    def __init__(self, run_dir: Path, devices: int, began: float) -> None:
        self._run_dir, self._devices, self._began = run_dir, devices, began
        self._known: dict[str, int] = {}  # restarts by slot, of those that were ready
        self.loads: list[float] = []  # seconds, of those that had a fault
        self.first_load = 0.0  # seconds until the first group was ready

    def ready(self) -> list[dict[str, Any]]:
        """The groups that are ready now, the one with the fewest restarts first."""
        every = self.every()
        found = [one for one in every if one["state"] == "ready"]
        for one in found:
            if self._known.get(one["slot"]) != one["restarts"]:
                self._came(one)
        return sorted(found, key=lambda one: int(one["restarts"]))

    def every(self) -> list[dict[str, Any]]:
        """All groups."""
        found = question.ask(sockets.ipc(self._run_dir, "admin"), None, "ps", {}) or {}
        return [dict(worker) for worker in found.get("workers", ())]

    def pid(self, group: Mapping[str, Any], rank: int) -> int:
        """The process of a rank of a group that is ready."""
        return int(group["pid"] if rank == 0 else group["ranks"][rank - 1]["pid"])

    @property
    def restarts(self) -> int:
        """Ends of groups that nobody asked for."""
        return sum(int(one["restarts"]) for one in self.every())

    def _came(self, group: Mapping[str, Any]) -> None:
        now = time.monotonic() - self._began
        if self._known.get(group["slot"]) is not None:
            self.loads.append(float(group["load_s"]))
        self.first_load = self.first_load or now
        self._known[group["slot"]] = int(group["restarts"])
        phases = ", ".join(f"{name} {took:g}" for name, took in _load_phases(group))
        print(f"{now:.1f} s: {group['slot']} loaded in {group['load_s']} s ({phases})", flush=True)


def _load_phases(group: Mapping[str, Any]) -> Sequence[tuple[str, float]]:
    return [(name, float(took)) for name, took in (group.get("load_phases") or {}).items()]


class Rounds:
    """Rounds of streams, each with a fault, and what came of them."""

    def __init__(
        self, options: argparse.Namespace, groups: Groups, client: Client, began: float
    ) -> None:
        self._options, self._groups, self._client = options, groups, client
        self._began, self._end = began, began + options.seconds
        self._draw = random.Random(1)
        self.outcomes: list[Outcome] = []
        self.why = ""  # the faults ended early

    def run(self) -> None:
        """Makes faults until there are enough, or the time is over."""
        least = min(2, self._options.replicas)
        self._wait(lambda: len(self._groups.ready()) >= least, f"{least} groups are ready")
        if self.why:
            return
        streams, threads = self._started()
        if not self._ended(threads) or streams[0].error or not streams[0].text.endswith(LAST):
            self.why = f"the model does not count: {streams[0]}"
            return
        kinds = itertools.cycle(KINDS)
        while len(self.outcomes) < self._options.faults:
            self._wait(lambda: len(self._groups.ready()) >= least, f"{least} groups are ready")
            if self.why or time.monotonic() > self._end:
                return
            outcome = self._round(next(kinds), streams[0].text)
            if outcome is not None:
                self.outcomes.append(outcome)
                now = time.monotonic() - self._began
                print(f"{now:.1f} s: {len(self.outcomes)}: {outcome}", flush=True)

    @property
    def failed(self) -> bool:
        """Whether a stream was wrong, or nothing was tried."""
        return not self.outcomes or any(one.wrong for one in self.outcomes)

    def summary(self) -> dict[str, Any]:
        """The figures so far."""
        groups = self._groups
        return {
            **summary(self.outcomes),
            **({"ended_early": self.why} if self.why else {}),
            "restarts": groups.restarts,
            "seconds": round(time.monotonic() - self._began, 1),
            "first_load_s": round(groups.first_load, 2),
            "load_s": figures(groups.loads),
        }

    def _round(self, kind: Kind, text: str) -> Outcome | None:
        """One round with a fault; None: no group was ready when it was to come."""
        before = {one["slot"]: one["tokens"] for one in self._groups.ready()}
        streams, threads = self._started()
        if kind.moment == DECODE:
            self._wait(
                lambda: all(one.times or one.error for one in streams), "all streams have begun"
            )
        time.sleep(self._draw.uniform(0.0, 0.01))
        # The one that has made most tokens since; before the first tokens, that with fewest faults.
        made = [(one["tokens"] - before.get(one["slot"], 0), one) for one in self._groups.ready()]
        ready = [one for _, one in sorted(made, key=lambda pair: -pair[0])]
        if not ready:
            self._ended(threads)
            return None
        fault = time.monotonic()
        os.kill(self._groups.pid(ready[0], kind.rank), kind.signal)
        if not self._ended(threads):
            for one, thread in zip(streams, threads, strict=True):
                if thread.is_alive():
                    one.error = f"stuck: no end {STUCK:.0f} s after the fault"
        return Outcome.of(kind, ready[0]["slot"], streams, text, fault)

    def _started(self) -> tuple[list[Watched], list[threading.Thread]]:
        streams = [Watched(next(SEEDS)) for _ in range(self._options.streams)]
        threads = [
            threading.Thread(target=one.read, args=(self._client,), daemon=True) for one in streams
        ]
        for thread in threads:
            thread.start()
        return streams, threads

    def _ended(self, threads: Sequence[threading.Thread]) -> bool:
        """Waits for the ends of streams; returns whether all have ended in time."""
        end = time.monotonic() + STUCK
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _wait(self, happened: Callable[[], bool], what: str) -> None:
        """Waits for something, until the time is over: then `why` says what did not happen."""
        while not happened():
            if time.monotonic() > self._end:
                states = [one["state"] for one in self._groups.every()]
                self.why = f"not {what} within {self._options.seconds:.0f} s: {states}"
                return
            time.sleep(LOOK_INTERVAL)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of these faults."""
    waits: dict[str, list[float]] = defaultdict(list)
    for one in outcomes:
        waits[str(one.kind)] += one.waits
    kinds = Counter(str(one.kind) for one in outcomes)
    return {
        "faults": len(outcomes),
        "kinds": dict(sorted(kinds.items())),
        "met_no_stream": sum(not one.moved and not one.wrong for one in outcomes),
        "streams": sum(one.streams for one in outcomes),
        "moved": sum(one.moved for one in outcomes),
        "wrong": [wrong for one in outcomes for wrong in one.wrong],
        "longest_wait_s": {name: figures(every) for name, every in sorted(waits.items()) if every},
    }


def figures(every: Sequence[float]) -> Mapping[str, float]:
    """The number, the median and the largest of these; nothing of none."""
    if not every:
        return {}
    ordered = sorted(every)
    return {
        "number": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 3),
        "max": round(ordered[-1], 3),
    }


if __name__ == "__main__":
    sys.exit(main())
