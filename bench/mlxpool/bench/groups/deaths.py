"""Kills and stops ranks of a group under streams, and checks that each stream has every token.

python -m mlxpool.bench.groups.deaths --faults 50 --seconds 170

In a round all streams count to 90, in prefill or in decode one rank of a group gets SIGKILL or
SIGSTOP, and the text of each stream is compared with that without a fault. Prints a line for each
fault as it comes, so that a run that is cut off says what it saw, and at the end JSON: faults,
streams, those that were wrong, and for each kind the longest wait for a token since the fault, of
the streams that were moved. With several groups a round begins when half of them are ready. Groups
share GPUs where CUDA_VISIBLE_DEVICES names each of them several times, such as 0,1,0,1.
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
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
path = "builtin:demo-chat"
devices = {devices}
device_sums = "{sums}"
sequences = {streams}
replicas = {replicas}
memory_limit = {memory}
pin = true
"""
COUNT = [{"role": "user", "content": "Count to 90."}]
READY_TIMEOUT = 300.0  # seconds until a group is ready
STREAM_TIMEOUT = 120.0  # seconds until every stream has ended
SEEDS = itertools.count()
PREFILL, DECODE = "prefill", "decode"
KINDS = tuple(itertools.product((signal.SIGKILL, signal.SIGSTOP), (PREFILL, DECODE), (1, 0)))


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


def main() -> int:
    """See the module. Returns 1 where a stream was wrong."""
    interrupt_at_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=600.0, help="no fault after so many")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.0, help="step_limit and prefill_limit")
    parser.add_argument("--sums", default="auto", help="device_sums")
    parser.add_argument("--memory", type=int, default=0, help="memory_limit of a group")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        settings = SETTINGS.format(
            model=MODEL,
            limit=options.limit,
            devices=options.devices,
            streams=options.streams,
            replicas=options.replicas,
            memory=options.memory,
            sums=options.sums,
        )
        with serving(Path(folder), settings), Client(Path(folder), connect_timeout=60) as client:
            found = _faults(options, Path(folder), client)
    print(json.dumps(found), flush=True)
    return int(bool(found["wrong"]))


def _faults(options: argparse.Namespace, run_dir: Path, client: Client) -> dict[str, Any]:
    draw = random.Random(1)
    began, end = time.monotonic(), time.monotonic() + options.seconds
    before = _wait_until_ready(run_dir, options.replicas)
    ready = time.monotonic() - began
    plain = _round(client, options.streams)[0]
    if plain.error or not plain.text.endswith("90."):
        raise SystemExit(f"the model does not count: {plain}")
    waits: dict[str, list[float]] = defaultdict(list)
    wrong, loads, faults, moved = list[str](), list[float](), 0, 0
    for number in range(options.faults):
        if time.monotonic() > end:
            break
        kind, moment, rank = KINDS[number % len(KINDS)]
        workers = _wait_until_ready(run_dir, max(1, options.replicas // 2))
        target = min(workers, key=lambda worker: worker["restarts"])
        loads.append(target["load_s"])
        pid = target["pid"] if rank == 0 else target["ranks"][rank - 1]["pid"]
        streams, fault = _fault(client, options.streams, int(pid), kind, moment, draw)
        faults += 1
        name = f"{kind.name} of rank {rank} in {moment}"
        right = sum(not one.error and one.text == plain.text for one in streams)
        resumed = sum(one.attempts > 1 for one in streams)
        told = f"{right} of {len(streams)} streams are right, {resumed} were moved"
        print(f"{time.monotonic() - began:.1f} s: {name}: {told}", flush=True)
        for one in streams:
            if one.error or one.text != plain.text:
                wrong.append(f"{name}: {one.error or one.text!r}")
            elif one.attempts > 1 and (wait := one.wait_after(fault)) is not None:
                moved += 1
                waits[name].append(wait)
        _wait_for_restart(run_dir, target)
    restarts = sum(worker["restarts"] for worker in _workers(run_dir))
    return {
        "faults": faults,
        "restarts": restarts - sum(worker["restarts"] for worker in before),
        "streams": faults * options.streams,
        "moved": moved,
        "wrong": wrong,
        "first_load_s": round(ready, 2),
        "load_s": _figures(loads),
        "longest_wait_s": {name: _figures(every) for name, every in sorted(waits.items())},
    }


def _figures(every: Sequence[float]) -> Mapping[str, float]:
    if not every:
        return {}
    ordered = sorted(every)
    return {
        "number": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 3),
        "max": round(ordered[-1], 3),
    }


def _round(client: Client, count: int) -> list[Watched]:
    streams, threads = _started(client, count)
    _join(threads)
    return streams


def _started(client: Client, count: int) -> tuple[list[Watched], list[threading.Thread]]:
    streams = [Watched(next(SEEDS)) for _ in range(count)]
    threads = [threading.Thread(target=one.read, args=(client,), daemon=True) for one in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + STREAM_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise SystemExit(f"a stream has not ended after {STREAM_TIMEOUT:.0f} s")


def _fault(
    client: Client,
    count: int,
    pid: int,
    kind: signal.Signals,
    moment: str,
    draw: random.Random,
) -> tuple[list[Watched], float]:
    """The streams of a round, and when the process got the signal."""
    streams, threads = _started(client, count)
    if moment == DECODE:
        while not all(one.times or one.error for one in streams):
            time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.01))
    fault = time.monotonic()
    os.kill(pid, kind)
    _join(threads)
    return streams, fault


def _workers(run_dir: Path) -> list[dict[str, Any]]:
    found = question.ask(sockets.ipc(run_dir, "admin"), None, "ps", {}) or {}
    return [dict(worker) for worker in found.get("workers", ())]


def _wait_until_ready(run_dir: Path, least: int) -> list[dict[str, Any]]:
    """The groups that are ready, when so many of them are."""
    end = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < end:
        found = [one for one in _workers(run_dir) if one["state"] == "ready"]
        if len(found) >= least:
            return found
        time.sleep(0.05)
    raise SystemExit(f"{least} groups are not ready: {_workers(run_dir)}")


def _wait_for_restart(run_dir: Path, before: Mapping[str, Any]) -> None:
    """Waits until the slot of a group that got a fault has another process."""
    end = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < end:
        for worker in _workers(run_dir):
            if worker["slot"] == before["slot"] and worker["restarts"] > before["restarts"]:
                return
        time.sleep(0.05)
    raise SystemExit(f"a group goes on after its fault: {_workers(run_dir)}")


if __name__ == "__main__":
    sys.exit(main())
