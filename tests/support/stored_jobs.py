"""A real store of jobs in place of `StoreModel`: operations wait in an inbox until `commit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxpool.broker.store.batch_operations import CancelBatch
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import ENDED, JobState, JobView, Refused, Result, Scope
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sqlite_store import SqliteOpener
from support.job_store import MAX_BYTES


class StoredJobs:
    """The store, with the part of `StoreModel`'s interface that simulations of batches need."""

    def __init__(self, folder: Path, boot: int = 1) -> None:
        self._opener = SqliteOpener(folder, MAX_BYTES)
        self._store = self._opener.open()
        self._boot = boot
        self._seen = 0.0
        self._clock: Callable[[], float] = lambda: 0.0
        self._store.begin(boot, 0.0)
        self.inbox: list[Operation] = []
        self.results: list[tuple[Operation, Result]] = []
        self.refusal: Refused | None = None  # refuses every offered operation
        self.most_waiting = 0  # the most operations in the inbox so far

    def follow(self, clock: Callable[[], float]) -> None:
        """Uses the clock of another simulation from now on; the time never goes back."""
        self._clock = clock

    @property
    def now(self) -> float:
        self._seen = max(self._seen, self._clock())
        return self._seen

    def offer(self, operation: Operation) -> None:
        if self.refusal is not None:
            self.results.append((operation, self.refusal))
            return
        self.inbox.append(operation)
        self.most_waiting = max(self.most_waiting, len(self.inbox))

    def commit(self) -> None:
        group, self.inbox = self.inbox, []
        results = self._store.transaction(group, self.now)
        self.results += zip(group, results, strict=True)

    def take(self) -> list[tuple[Operation, Result]]:
        taken, self.results = self.results, []
        return taken

    def crash(self) -> None:
        """Loses waiting operations and results that were not read; a new broker starts."""
        self.inbox, self.results = [], []
        self._boot += 1
        self._store.begin(self._boot, self.now)

    def close(self) -> None:
        self._store.close()
        self._opener.close()

    # ---- the state ---------------------------------------------------------------------------

    def ask(self, operation: Operation) -> Result:
        """Performs an operation directly on the store."""
        return self._store.transaction([operation], self.now)[0]

    def lines(self, batch: bytes) -> list[JobView]:
        """Returns the jobs of a batch in the order of the lines of its file."""
        return rows.select(self._store.database, "batch = ? ORDER BY line", batch)

    def job(self, key: str, owner: str = "uid:1", tenant: str = "") -> JobView:
        job = rows.find(self._store.database, Scope(owner, tenant, key))
        assert job is not None, f"no job {key}"
        return job

    def ended(self) -> int:
        """Returns the number of ended jobs."""
        states = ", ".join(f"'{state.value}'" for state in (*ENDED, JobState.GONE))
        return self._store.database.number(f"SELECT COUNT(*) FROM job WHERE state IN ({states})")

    def ask_key(self, id: bytes) -> str:
        """Returns the key of a job."""
        job = rows.find(self._store.database, id)
        assert job is not None
        return job.scope.key

    def ask_outbox(self) -> int:
        """Returns the number of undelivered notices."""
        return self._store.database.number("SELECT COUNT(*) FROM outbox")

    def ask_cancel_some(self, key: str, owner: str = "uid:1") -> None:
        """Cancels a batch directly in the store, and at most 10 of its jobs with it."""
        self.ask(CancelBatch(Scope(owner, "", key), count=10))
