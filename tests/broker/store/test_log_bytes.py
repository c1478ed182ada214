"""A change of a job does not write its request again, whatever the size of that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxpool.broker.store.operations import FeedNext
from mlxpool.broker.store.records import Fed
from mlxpool.broker.store.sqlite_store import SqliteOpener
from support.job_store import BEGIN, MAX_BYTES, progress, submit

JOBS = 64  # that progress in one transaction, as in a broker with that many running jobs
MOST_BYTES = 1024  # of the log, for one progress of a job


@pytest.mark.parametrize("size", [500, 30_000])
def test_the_log_of_a_progress_is_small_whatever_the_request(tmp_path: Path, size: int) -> None:
    with (
        SqliteOpener(tmp_path / "state", MAX_BYTES, reserve_bytes=1) as opener,
        opener.open() as store,
    ):
        store.begin(1, BEGIN)
        store.transaction([submit(n, request=os.urandom(size)) for n in range(JOBS)], BEGIN)
        (fed,) = store.transaction([FeedNext("m", 0, JOBS, held=frozenset())], BEGIN)
        assert isinstance(fed, Fed) and len(fed.jobs) == JOBS
        store.transaction([progress(n, 0) for n in range(JOBS)], BEGIN)
        (log,) = (tmp_path / "state").glob("*.db-wal")
        store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert log.stat().st_size == 0
        store.transaction([progress(n, 4) for n in range(JOBS)], BEGIN)
        assert 0 < log.stat().st_size <= JOBS * MOST_BYTES
