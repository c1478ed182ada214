"""Runs many jobs under random faults: of their clients, workers and brokers, and of all at once.

Each job must look as if it ran exactly once: every reader, at any time and from any position, gets
the ids of an undisturbed run, and the feed of ended jobs lists the job once. The same holds for the
lines of a batch, which is sent and processed during the storm.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from chaos.checker import TraceLine
from chaos.storm import Plan, Storm, percentiles
from mlxpool.client import Client, LineResult
from mlxpool.common.errors import PoolError
from support.counting_checker import expected_ids
from support.pool import PATIENCE
from support.relay import Relay

# Brokers die more often than in the storm of streams: jobs exist for that case.
WEIGHTS = {
    "kill": 40, "short freeze": 10, "long freeze": 2, "term": 8, "restart": 5, "cut": 10,
    "broker": 20, "all at once": 5,
}  # fmt: skip
PAUSE = 0.2  # seconds before a retry of a refused submission
BATCH, CALLS = "storm batch", "storm calls"  # keys of batches


class JobStorm(Storm):
    """Runs jobs under random faults; `run` may be called once. `Plan.streams` counts the jobs."""

    weights = WEIGHTS

    def fault_actions(self, relay: Relay) -> dict[str, Callable[[], None]]:
        return {**super().fault_actions(relay), "all at once": self._kill_all}

    def _kill_all(self) -> None:
        """Sends SIGKILL to the broker and all its workers, as a power failure would end them."""
        assert self.pool.process is not None
        broker = psutil.Process(self.pool.process.pid)
        for process in [broker, *broker.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._kill_broker()

    def __init__(self, plan: Plan, tmp_path: Path, models: str = "") -> None:
        super().__init__(plan, tmp_path, ("--state-dir", str(tmp_path / "jobs")), models)
        self.counts: dict[str, int] = {}  # number of ids of a job, by key
        self.clients: dict[str, Client] = {}  # submitters, by key: ipc and tcp are two owners
        self.states: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lines = plan.streams // 2  # lines of the batch

    def _stream(self, client: Client, number: int) -> None:
        """Submits a job. Some jobs are read at once, some from the middle, most are not read."""
        if number == 0:
            self.submit_batches(client)
        key, count = f"storm {number}", self._count(number)
        if not self._submit(client, key, number, count):
            return
        self.counts[key], self.clients[key] = count, client
        if number % 4 == 0:
            self._read(client, key)
        elif number % 4 == 1:
            self._glance(client, key)

    def _count(self, number: int) -> int:
        """Returns the number of ids of the job, or of the line, with this number."""
        return 1 + (number * 7919) % self.plan.tokens

    def submit_batches(self, client: Client) -> None:
        lines = [
            {"prompt": f"line {n}", "options": {"max_tokens": self._count(n), "seed": 10_000 + n}}
            for n in range(self.lines)
        ]
        self._submit_batch(client, BATCH, "m", lines)

    def _submit_batch(
        self, client: Client, key: str, model: str, lines: list[dict[str, Any]]
    ) -> None:
        """Sends a batch until it is accepted or refused; its key makes repetitions harmless."""
        while self.injector_error is None:
            try:
                client.submit_batch(lines, model, key=key)
                self.clients[key] = client
                return
            except PoolError as error:
                if not error.retryable:
                    self.errors[f"{error.code}: {error.message}"] += 1
                    return
                time.sleep(PAUSE)

    def _ended_batch(self, key: str) -> list[LineResult]:
        """Returns the results of a batch; checks that every line was done exactly once.

        Returns [] if the batch was refused.
        """
        if (client := self.clients.pop(key, None)) is None:
            self.wrong.append(f"{key} was not accepted")
            return []
        batch = client.batch(key)
        if batch.wait()["done"] != self.lines:
            self.wrong.append(f"{key}: {batch.row}")
        results = list(batch.results())
        if [result.line for result in results] != list(range(self.lines)):
            self.wrong.append(f"lines of {key}: {len(results)} of {self.lines}")
        return results

    def check_batches(self) -> None:
        """Checks that every line of the batch is done exactly once, with the expected ids."""
        for result in self._ended_batch(BATCH):
            n = result.line
            wanted = expected_ids(f"line {n}", 10_000 + n, self._count(n))
            if result.result is None or list(result.result.ids) != wanted:
                self.wrong.append(f"line {n}: {result.state} {result.error}")

    def _submit(self, client: Client, key: str, number: int, count: int) -> bool:
        """Submits a job until it is accepted; its key makes repetitions harmless.

        Returns False after an error that is not retryable, or if the injection of faults has
        failed.
        """
        while self.injector_error is None:
            try:
                client.submit("m", key, key=key, max_tokens=count, seed=10_000 + number)
                return True
            except PoolError as error:
                if not error.retryable:
                    self.errors[f"{error.code}: {error.message}"] += 1
                    return False
                time.sleep(PAUSE)
        return False

    def _wanted(self, key: str) -> list[int]:
        return expected_ids(key, 10_000 + int(key.split()[1]), self.counts[key])

    def _glance(self, client: Client, key: str) -> None:
        """Reads the first ids of a job and leaves."""
        with client.fetch(key) as stream:
            self.expected[stream.id.hex()] = self._wanted(key)
            try:
                next(iter(stream), None)
            except PoolError as error:
                self.errors[f"{error.code}: {error.message}"] += 1

    def _read(self, client: Client, key: str) -> None:
        stream = client.fetch(key)
        self.expected[stream.id.hex()] = self._wanted(key)
        try:
            result = stream.read()
            if list(result.ids) != self._wanted(key):
                self.wrong.append(key)
        except PoolError as error:
            self.errors[f"{error.code}: {error.message}"] += 1

    def _finish(self) -> None:
        """Waits until all jobs have ended; checks that each ended once, with the right ids."""
        self.check_batches()
        end = time.monotonic() + 5 * PATIENCE
        while time.monotonic() < end:
            ends = [
                row for connection in set(self.clients.values()) for row in connection.jobs(after=0)
            ]
            rows = [row for row in ends if "line" not in row]
            if len(rows) >= len(self.counts):
                break
            time.sleep(PAUSE)
        self.states.update(str(row["state"]) for row in rows)
        ended = Counter(str(row["key"]) for row in ends)
        self.wrong += [key for key, count in ended.items() if count != 1]
        self.wrong += [key for key in self.counts if ended[key] != 1]
        self.wrong += [row["key"] for row in rows if row["ids"] != self.counts[row["key"]]]
        for key, client in self.clients.items():
            self._read(client, key)

    def _further_figures(self, lines: Sequence[TraceLine]) -> Mapping[str, Any]:
        waits, alone = rerun_waits(lines), started_alone(lines)
        return {
            "next token of a job from another broker, ms": percentiles(
                [seconds for id, seconds in waits if id not in alone]
            ),
            "the same of jobs that had to run alone, ms": percentiles(
                [seconds for id, seconds in waits if id in alone]
            ),
        }

    @property
    def done_once(self) -> bool:
        """Whether every job was done exactly once, and every reader got the expected ids."""
        all_done = self.states == {"done": len(self.counts)}
        return all_done and not self.wrong and not self.errors

    def report(self) -> dict[str, Any]:
        """Returns figures beyond those of the outcome."""
        return {
            "jobs": len(self.counts),
            "lines": self.lines,
            "states": dict(self.states),
            "wrong": self.wrong,
        }


def started_alone(lines: Sequence[TraceLine]) -> set[str]:
    """Returns the ids of jobs that a broker started alone.

    A broker starts a job alone if earlier brokers have ended while the job ran.
    """
    return {line["id"] for line in lines if line["what"] == "start_job" and line["alone"]}


def rerun_waits(lines: Sequence[TraceLine]) -> list[tuple[str, float]]:
    """Returns (job id, seconds from a broker's death to the job's next token) of interrupted jobs.

    If a further broker dies before the job has a token, the time still counts from the first death.
    """
    running: set[str] = set()
    waiting: dict[str, float] = {}
    waits: list[tuple[str, float]] = []
    for line in lines:
        if line["who"] == "chaos" and line["what"] == "broker killed":
            at: float = line["t"]
            waiting = dict.fromkeys(running, at) | waiting
            running.clear()
        if line["who"] != "broker":
            continue
        if line["what"] == "work":
            running.add(line["id"])
        elif line["what"] == "taken":
            if line["n"] and line["id"] in waiting:
                waits.append((line["id"], line["t"] - waiting.pop(line["id"])))
            if line["end"] is not None:
                running.discard(line["id"])
                waiting.pop(line["id"], None)
        elif line["what"] in ("done", "error"):
            running.discard(line["id"])
    return waits


class CallStorm(JobStorm):
    """A storm whose second batch has lines that are `embed` calls."""

    def __init__(self, plan: Plan, tmp_path: Path, encoder: Path) -> None:
        """`encoder`: the folder of an encoder model."""
        super().__init__(plan, tmp_path, f'[models.e]\npath = "{encoder}"\nreplicas = 2\n')

    def _text(self, line: int) -> str:
        return f"the quick fox {line}"

    def submit_batches(self, client: Client) -> None:
        super().submit_batches(client)
        lines = [{"kind": "embed", "inputs": [self._text(n)]} for n in range(self.lines)]
        self._submit_batch(client, CALLS, "e", lines)

    def check_batches(self) -> None:
        """Checks that every line of calls is done, once, with the vector of its text."""
        super().check_batches()
        client = self.clients.get(CALLS)
        results = self._ended_batch(CALLS)
        if client is None:
            return
        wanted = client.embed("e", [self._text(n) for n in range(self.lines)])
        for result in results:
            vectors = result.vectors
            far = vectors is None or any(
                abs(actual - other) > 1e-4
                for actual, other in zip(vectors[0], wanted[result.line], strict=True)
            )
            if far:
                self.wrong.append(f"line {result.line} of calls: {result.state} {result.error}")
