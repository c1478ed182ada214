"""A client that uses the pool's stored jobs and batches from Python, while processes die."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from chaos.kept_readings import ALL, LONG, PAUSE, NativeReading
from chaos.kept_truth import SEED, Known, Truth, count_of, ids_of
from mlxpool.client import Client
from mlxpool.common.errors import PoolError, UnknownJob
from support.pool import PATIENCE

Answer = TypeVar("Answer")


class NativeOwner:
    """A thread that uses the Python client for one owner; each `act` performs one random action.

    The keys of all its jobs and batches begin with `name`.
    """

    def __init__(
        self, owner: str, name: str, run_dir: Path, truth: Truth, seed: int, lines: int
    ) -> None:
        """`lines`: the number of lines of a batch."""
        self.owner, self.name = owner, name
        self.truth, self.lines = truth, lines
        self.random = random.Random(f"{seed} {name}")
        self.client = Client(run_dir, connect_timeout=PATIENCE, broker_grace=PATIENCE)
        self.mine: list[Known] = []
        self.batches: list[str] = []
        self.number = 0
        self._first = [self.submit, self.batch]
        self._actions: dict[Callable[[], None], int] = {
            self.submit: 30,
            self.read: 30,
            self.look: 10,
            self.cancel: 6,
            self.release: 6,
            self.batch: 2,
            self.foreign: 2,
        }

    def act(self) -> None:
        """Does one random action; the first two calls submit one batch and one job."""
        if self._first:
            return self._first.pop()()
        actions, weights = [*self._actions], [*self._actions.values()]
        self.random.choices(actions, weights)[0]()

    def close(self) -> None:
        self.client.close()

    def fine(self, ask: Callable[[], Answer]) -> Answer:
        """Calls `ask` until the pool accepts it; returns the answer.

        Raises a PoolError that is not retryable.
        """
        end = time.monotonic() + LONG
        while True:
            self.truth.check()
            try:
                return ask()
            except PoolError as error:
                if not error.retryable or time.monotonic() > end:
                    raise
                self.truth.count(f"answered {error.code}")
            time.sleep(PAUSE)

    def _one(self, last: int = 60) -> Known | None:
        jobs = [job for job in self.mine if not job.released][-last:]
        return self.random.choice(jobs) if jobs else None

    def submit(self) -> None:
        self.number += 1
        key = f"{self.name}-{self.number}"
        settings: dict[str, Any] = {"priority": self.random.choice((0, 0, 1, "idle"))}
        for _ in range(2 if self.random.random() < 0.3 else 1):
            job = self.fine(
                lambda: self.client.submit(
                    "m", key, key=key, max_tokens=count_of(key), seed=SEED, **settings
                )
            )
            known = self.truth.accepted(Known(self.owner, key, job.id.hex()))
        self.mine.append(known)

    def read(self) -> None:
        known = self._one()
        if known is not None:
            start = self.random.choice((0, 0, 1, count_of(known.key) // 2))
            self.read_job(known, start, self.random.choice((1, 3, 10, ALL)))

    def read_job(self, known: Known, start: int = 0, stop: int = ALL) -> None:
        """Reads up to `stop` deltas of a job, from the id at position `start` on."""
        NativeReading(self.client, self.truth, known, start).run(stop)

    def look(self) -> None:
        known = self._one()
        if known is not None:
            self.truth.row(known, self.fine(lambda: self.client.job(known.key)))

    def cancel(self) -> None:
        known = self._one(3)
        if known is None:
            return
        known.fates |= {"cancelled"}
        self.fine(lambda: self.client.cancel(key=known.key))
        self.truth.row(known, row := self.fine(lambda: self.client.job(known.key)))
        if row["state"] not in ("done", "cancelled"):
            self.truth.error(f"{known.key}: cancelled, and is {row['state']}")

    def release(self) -> None:
        known = self._one()
        if known is not None and known.state:
            self.truth.row(known, self.fine(lambda: self.client.release(known.key)))

    def foreign(self) -> None:
        """Checks that this owner cannot see other owners' jobs."""
        others = [job for job in self.truth.jobs.copy().values() if job.owner != self.owner]
        if not others:
            return
        other = self.random.choice(others)
        names: list[str | bytes] = [other.key]
        if other.kind == "job":
            names.append(bytes.fromhex(other.id))
        for name in names:
            try:
                row = self.fine(lambda name=name: self.client.job(name))  # type: ignore[misc]
                self.truth.error(f"{self.owner} sees {row['key']} of {other.owner}")
            except UnknownJob:
                self.truth.count("foreign")

    # ---- batches ---------------------------------------------------------------------------------

    def batch(self) -> None:
        self.number += 1
        name = f"{self.name}-{self.number}"
        lines = [
            {
                "id": (key := f"{name}/{number}"), "prompt": key,
                "options": {"max_tokens": count_of(key), "seed": SEED},
            }
            for number in range(self.lines)
        ]  # fmt: skip
        self.fine(lambda: self.client.submit_batch(lines, "m", key=name))
        self.batches.append(name)
        self.truth.count("batches")

    def check_batch(self, name: str) -> None:
        """Waits for the end of a batch; checks that every line is done, with the expected ids."""
        batch = self.fine(lambda: self.client.batch(name))
        row = self.fine(batch.wait)
        results = self.fine(lambda: list(batch.results()))
        if row["done"] != self.lines or [outcome.line for outcome in results] != list(
            range(self.lines)
        ):
            self.truth.error(f"{name}: {row}, has {len(results)} results")
        for outcome in results:
            key = f"{name}/{outcome.line}"
            if outcome.result is None or outcome.result.ids != ids_of(key, count_of(key)):
                self.truth.error(f"{key}: {outcome.state} {outcome.error}")
        self.truth.count("batch done")
