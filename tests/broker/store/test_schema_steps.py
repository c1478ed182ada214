"""Stores of earlier schemas become stores of the present one, with what is in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlxpool.broker.store.batch_operations import ListBatches, ReadBatch
from mlxpool.broker.store.batch_records import BatchList, BatchView
from mlxpool.broker.store.operations import (
    ListNotices,
    NoticeFailed,
    ReadJob,
    ReadNotices,
    Retry,
)
from mlxpool.broker.store.postgres_store import PostgresDatabase, PostgresOpener
from mlxpool.broker.store.records import Changed, Found, JobState, Notices, Result
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.rows import ROW_BYTES
from mlxpool.broker.store.sql.sql_store import SqlStore
from mlxpool.broker.store.sqlite_store import SqliteDatabase, SqliteOpener
from support.job_store import BEGIN, BOOT, MAX_BYTES, finish, job_id, submit
from support.postgres_server import PostgresServer


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


def back_to_version_4(database: Database) -> None:
    """Take away what the step from version 4 on adds."""
    database.change("DROP INDEX job_suspect")
    database.write_version(4)


def back_to_version_3(database: Database) -> None:
    """Take away what the steps from version 3 on add."""
    back_to_version_4(database)
    database.change("ALTER TABLE job DROP COLUMN retried")
    database.change("ALTER TABLE batch DROP COLUMN deleted")
    database.write_version(3)


def back_to_version_2(database: Database, dialect: schema.Dialect) -> None:
    """Make the outbox as it was, with the notices that there are; files have no places in lists."""
    back_to_version_3(database)
    for made in (*schema.LISTED, schema.DELETED_FILE):
        kind, name = made.split()[1:3]
        database.change(f"DROP {kind} {name}")
    for table, column in (
        ("batch", "end_seq"),
        ("file", "waits_since"),
        ("usage", "file_bytes"),
    ):
        database.change(f"ALTER TABLE {table} DROP COLUMN {column}")
    schema.perform(
        database,
        dialect,
        (
            "DROP INDEX outbox_due",
            "ALTER TABLE outbox RENAME TO outbox_3",
            "CREATE TABLE outbox (end_seq {integer} PRIMARY KEY, job {integer} NOT NULL,"
            " tries {integer} NOT NULL, due {real} NOT NULL, given_up {real},"
            " cause TEXT NOT NULL) {strict}",
            "CREATE INDEX outbox_due ON outbox (due)",
            "INSERT INTO outbox SELECT end_seq, job.seq, tries, outbox.due, given_up,"
            " outbox.cause FROM outbox_3 AS outbox JOIN job USING (end_seq)",
            "DROP TABLE outbox_3",
        ),
    )
    database.write_version(2)


def back_to_version_1(path: Path) -> None:
    """Take away what the steps from version 1 on add."""
    with SqliteDatabase(path, MAX_BYTES) as database:
        back_to_version_2(database, schema.SQLITE)
        for statement in schema.STEPS[1]:
            assert isinstance(statement, str)
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


def test_a_store_of_schema_3_goes_on(tmp_path: Path) -> None:
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        with opener.open() as store:
            store.begin(BOOT, BEGIN)
            store.transaction([submit(1), finish(1, state=JobState.DEAD)], BEGIN)
            new = columns(store.database), indices(store.database)
        with SqliteDatabase(opener.folder.database(), MAX_BYTES) as database:
            back_to_version_3(database)
        with opener.open() as store:
            assert (columns(store.database), indices(store.database)) == new
            store.begin(BOOT, BEGIN)
            found, again = store.transaction([ReadJob(job_id(1)), Retry(job_id(1))], BEGIN)
    assert isinstance(found, Found) and found.job.retried == ()
    assert isinstance(again, Changed) and again.job.retried == ((0, 1),)


def with_notices(store: SqlStore) -> Result:
    """Have three notices: one is due, one waits for its next try, one was given up."""
    store.begin(BOOT, BEGIN)
    jobs = [submit(number, notify=f"http://h{number}/x") for number in range(1, 4)]
    store.transaction([*jobs, submit(4), *map(finish, range(1, 5))], BEGIN)
    failed = (NoticeFailed(2, 30.0, "HTTP 500"), NoticeFailed(3, None, "HTTP 410"))
    store.transaction(failed, BEGIN)
    return store.transaction([ListNotices()], BEGIN)[0]


def check_notices(store: SqlStore, before: Result) -> None:
    store.begin(BOOT + 1, BEGIN)
    found, due = store.transaction([ListNotices(), ReadNotices()], BEGIN)
    assert isinstance(found, Notices) and isinstance(due, Notices)
    assert found == before and len(found.notices) == 3
    assert [notice.end_seq for notice in due.notices] == [1] and due.next == BEGIN + 30


def test_notices_of_schema_2_are_delivered_with_what_they_say(tmp_path: Path) -> None:
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        with opener.open() as store:
            new = columns(store.database), indices(store.database)
            before = with_notices(store)
        with SqliteDatabase(opener.folder.database(), MAX_BYTES) as database:
            back_to_version_2(database, schema.SQLITE)
        with opener.open() as store:
            assert (columns(store.database), indices(store.database)) == new
            check_notices(store, before)


def postgres_schema(database: Database) -> tuple[list[Any], list[Any]]:
    """Names and types of the columns, and the definitions of indices but for keys of tables."""
    found = database.execute(
        "SELECT table_name, column_name, data_type, is_nullable, collation_name"
        " FROM information_schema.columns WHERE table_schema = current_schema()"
        " ORDER BY table_name, column_name"
    )
    indexed = database.execute(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema()"
        " AND indexname NOT LIKE ? ORDER BY indexdef",
        "%_pkey%",
    )
    return list(found), list(indexed)


def test_a_postgresql_store_of_schema_2_goes_on(postgres: PostgresServer) -> None:
    url = postgres.new_url()
    with PostgresOpener(url, MAX_BYTES).open() as store:
        new = postgres_schema(store.database)
        before = with_notices(store)
        add_files(store.database)
    with PostgresDatabase(url) as database:
        back_to_version_2(database, schema.POSTGRES)
        assert postgres_schema(database) != new
    with PostgresOpener(url, MAX_BYTES).open() as store:
        assert postgres_schema(store.database) == new
        check_notices(store, before)
        check_files(store.database)


def add_files(database: Database) -> None:
    """Two files of one owner and one that is not complete of another."""
    for owner, size in (("a", 10), ("a", 5), ("b", 0)):
        database.change(
            "INSERT INTO file (id, owner, tenant, name, purpose, size, complete, created)"
            " VALUES (?, ?, '', 'n', '', ?, ?, 1.0)",
            f"{owner}{size}".encode(),
            owner,
            size,
            int(size > 0),
        )


def check_files(database: Database) -> None:
    found = database.execute("SELECT owner, file_bytes FROM usage ORDER BY owner")
    waiting = database.execute("SELECT waits_since FROM file ORDER BY id")
    assert list(found) == [("a", 15 + 2 * ROW_BYTES), ("b", ROW_BYTES)]
    assert list(waiting) == [(None,), (None,), (1.0,)]


def test_files_of_before_are_counted(tmp_path: Path) -> None:
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        with opener.open() as store:
            add_files(store.database)
        back_to_version_1(opener.folder.database())
        with opener.open() as store:
            check_files(store.database)


def test_files_of_each_owner_are_counted_by_an_index(tmp_path: Path) -> None:
    """Else the step takes the time of all owners times all files."""
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        opener.open().close()
        with SqliteDatabase(opener.folder.database(), MAX_BYTES) as database:
            back_to_version_2(database, schema.SQLITE)
            steps = schema.STEPS[2]
            counts = next(one for one in steps if str(one).startswith("UPDATE usage"))
            schema.perform(database, schema.SQLITE, steps[: steps.index(counts)])
            plan = database.execute(f"EXPLAIN QUERY PLAN {counts}")
    assert any("file USING" in row[-1] and "owner=?" in row[-1] for row in plan), plan
