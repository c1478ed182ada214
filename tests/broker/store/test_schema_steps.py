"""Stores of earlier schemas become stores of the present one, with what is in them."""

from __future__ import annotations

import re
from pathlib import Path

from mlxpool.broker.store.batch_operations import ListBatches, ReadBatch
from mlxpool.broker.store.batch_records import BatchList, BatchView
from mlxpool.broker.store.operations import ReadJob
from mlxpool.broker.store.records import Found, JobState
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.rows import ROW_BYTES
from mlxpool.broker.store.sqlite_store import SqliteDatabase, SqliteOpener
from support.job_store import BEGIN, BOOT, MAX_BYTES, job_id, submit


def columns(database: Database) -> dict[str, set[str]]:
    """The columns of each table."""
    tables = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
    return {
        name: {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
        for (name,) in tables
        if not name.startswith("sqlite_")
    }


def indices(database: Database) -> set[str]:
    found = database.execute("SELECT name FROM sqlite_schema WHERE type = 'index'")
    return {name for (name,) in found if not name.startswith("sqlite_")}


def back_to_version_1(path: Path) -> None:
    """Take away what the steps from version 1 on add."""
    with SqliteDatabase(path, MAX_BYTES) as database:
        for statement in reversed([*schema.STEPS[1], *schema.STEPS[2]]):
            if added := re.match(r"ALTER TABLE (\w+) ADD COLUMN (\w+)", statement):
                database.change(f"ALTER TABLE {added[1]} DROP COLUMN {added[2]}")
            elif made := re.match(r"CREATE (INDEX|TABLE) (\w+)", statement):
                database.change(f"DROP {made[1]} {made[2]}")
        database.write_version(1)


def test_a_store_of_schema_1_goes_on(tmp_path: Path) -> None:
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        with opener.open() as store:
            store.begin(BOOT, BEGIN)
            new = columns(store.database), indices(store.database)
            jobs = (
                submit(1),
                submit(2, batch=b"b" * 16, line=0),
                submit(3, batch=b"b" * 16, line=1),
            )
            store.transaction(jobs, BEGIN)
            for statement in (
                "INSERT INTO file (id, owner, tenant, name, purpose, size, complete, created)"
                " VALUES (x'01', 'a', '', 'n', '', 1, 1, 1.0)",
                "INSERT INTO batch (id, owner, tenant, key, file, digest, defaults, state,"
                " next_line, next_start, created, notify) VALUES (?, 'a', '', 'k', x'01', x'02',"
                " x'', 'fed', 3, 9, 1.0, '')",
                "INSERT INTO failed_line (batch, line, label, cause) VALUES (?, 2, '', 'bad')",
                "UPDATE job SET state = 'dead' WHERE batch = ? AND line = 1",
            ):
                values = [b"b" * 16] * statement.count("?")
                store.database.change(statement, *values)
        back_to_version_1(opener.folder.database())
        with opener.open() as store:
            assert (columns(store.database), indices(store.database)) == new
            store.begin(BOOT, BEGIN)
            found, batch, listed = store.transaction(
                [ReadJob(job_id(1)), ReadBatch(b"b" * 16), ListBatches(live=True)], BEGIN
            )
    assert isinstance(found, Found)
    assert isinstance(batch, BatchView) and isinstance(listed, BatchList)
    assert listed.batches == (batch,)
    assert dict(batch.counts) == {JobState.WAITING: 1, JobState.DEAD: 1} and batch.failed == 1


def test_files_of_before_are_counted(tmp_path: Path) -> None:
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        with opener.open() as store:
            for owner, size in (("a", 10), ("a", 5), ("b", 0)):
                store.database.change(
                    "INSERT INTO file (id, owner, tenant, name, purpose, size, complete, created)"
                    " VALUES (?, ?, '', 'n', '', ?, ?, 1.0)",
                    f"{owner}{size}".encode(),
                    owner,
                    size,
                    int(size > 0),
                )
        back_to_version_1(opener.folder.database())
        with opener.open() as store:
            found = store.database.execute("SELECT owner, file_bytes FROM usage ORDER BY owner")
            waiting = store.database.execute("SELECT waits_since FROM file ORDER BY id")
    assert list(found) == [("a", 15 + 2 * ROW_BYTES), ("b", ROW_BYTES)]
    assert list(waiting) == [(None,), (None,), (1.0,)]
