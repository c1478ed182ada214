"""The store in PostgreSQL. One broker uses it at a time; a broker on another machine can take over.

The session that has the advisory lock owns the store. A broker can lose its session, and so the
lock, and still run. So the store has the boot number of the broker that owns it. Each transaction
locks this number, and fails if it is another broker's number.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, cast

import psycopg

from mlxpool.broker.store.records import (
    OutOfSpace,
    StoreError,
    StoreFailed,
    StoreInUse,
    StoreUnusable,
)
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.sql.database import Database, Row
from mlxpool.broker.store.sql.sql_store import KEY_LIFE, Opener, SqlStore

LOCK = 0x6D6C7870  # "mlxp": the first half of the advisory lock's number
LOCK_WAIT = 2.0  # seconds to wait until the server notices the end of the last session
# Timeouts for a server that does not answer: seconds, but tcp_user_timeout is in milliseconds.
CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "mlxpool",
}


class PostgresDatabase(Database):
    """A session that holds the advisory lock. Raises StoreUnusable, StoreInUse or StoreFailed."""

    def __init__(self, url: str) -> None:
        try:
            self._connection = psycopg.connect(url, autocommit=True, **cast(Any, CONNECTION))
        except psycopg.Error as error:
            raise StoreFailed(f"PostgreSQL cannot be reached: {error}") from error
        try:
            self._set_up()
        except BaseException:
            self._connection.close()
            raise

    def _set_up(self) -> None:
        if self._value("SHOW fsync") != "on":
            raise StoreUnusable(
                "this PostgreSQL runs with fsync=off: a job that is accepted could be lost with"
                " the power; set fsync = on"
            )
        self.execute("SET synchronous_commit = on")
        until = time.monotonic() + LOCK_WAIT
        while not self._value("SELECT pg_try_advisory_lock(?, hashtext(current_schema()))", LOCK):
            if time.monotonic() >= until:
                raise StoreInUse(
                    "another broker has the store of jobs in this PostgreSQL database; stop it, or"
                    " give another database"
                )
            time.sleep(0.05)

    def _value(self, sql: str, *values: Any) -> Any:
        row = self.one(sql, *values)
        return None if row is None else row[0]

    @property
    def operation_errors(self) -> tuple[type[Exception], ...]:
        return (psycopg.DatabaseError, UnicodeError)

    def execute(self, sql: str, *values: Any) -> list[Row]:
        cursor = self._run(sql, values)
        return cast(list[Row], cursor.fetchall()) if cursor.description else []

    def change(self, sql: str, *values: Any) -> int:
        return self._run(sql, values).rowcount

    def _run(self, sql: str, values: tuple[Any, ...]) -> psycopg.Cursor[Any]:
        try:
            return self._connection.execute(_translated(sql), values)
        except psycopg.errors.DiskFull as error:
            raise OutOfSpace(f"PostgreSQL has no room: {error}") from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreFailed(f"PostgreSQL failed: {error}") from error

    def begin(self) -> None:
        self.change("BEGIN")

    def commit(self) -> None:
        self.change("COMMIT")

    def rollback(self) -> None:
        try:
            self._connection.execute("ROLLBACK")
        except psycopg.Error:
            pass  # the session is lost, and its transaction with it

    def lock_boot(self) -> int:
        # The query locks the row: a broker that takes over the store waits until this transaction
        # ends. If it has already stored its own boot number, the query returns that number.
        return self.number("SELECT boot FROM meta FOR UPDATE")

    def used_bytes(self) -> int:
        return self.number("SELECT SUM(bytes) FROM usage")

    def read_version(self) -> int:
        if self._value("SELECT to_regclass('store_version')") is None:
            return 0
        return self.number("SELECT version FROM store_version")

    def write_version(self, version: int) -> None:
        self.change("CREATE TABLE IF NOT EXISTS store_version (version BIGINT NOT NULL)")
        self.change("DELETE FROM store_version")
        self.change("INSERT INTO store_version (version) VALUES (?)", version)

    def close(self) -> None:
        try:  # otherwise the server holds the lock until it notices the end of the session
            self._connection.execute("SELECT pg_advisory_unlock_all()")
        except psycopg.Error:
            pass
        self._connection.close()


@cache
def _translated(sql: str) -> str:
    """Returns a statement with psycopg's placeholders in place of `?`.

    The statement must contain no `%`, and no `?` that is not a placeholder.
    """
    return sql.replace("?", "%s")


class PostgresOpener(Opener):
    """The opener of the store at a URL such as postgresql://user@host/database."""

    def __init__(self, url: str, max_bytes: int, key_life: float = KEY_LIFE) -> None:
        self._url, self._max_bytes, self._key_life = url, max_bytes, key_life

    def open(self) -> SqlStore:
        """Opens the store; creates its tables in an empty database. Raises StoreUnusable."""
        try:
            return self._open()
        except StoreUnusable:
            raise
        except (StoreError, psycopg.Error) as error:
            raise StoreUnusable(f"the store of jobs cannot be opened: {error}") from error

    def reopen(self) -> SqlStore:
        """Opens the store after its session was lost. Raises StoreError."""
        try:
            return self._open()
        except psycopg.Error as error:
            raise StoreFailed(f"the store of jobs cannot be opened again: {error}") from error

    def _open(self) -> SqlStore:
        database = PostgresDatabase(self._url)
        try:
            schema.ensure(database, schema.POSTGRES)
            return SqlStore(database, self._max_bytes, self._key_life)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Does nothing: the lock ended with the session."""
