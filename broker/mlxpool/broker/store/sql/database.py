"""The interface of a database for the operations' SQL; each database has an implementation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxpool.common.closing import Closing

Row = Sequence[Any]


class Database(Closing):
    """A connection to a database, used by one thread at a time.

    Statements have `?` for parameters. Values are int, float, str, bytes or None. Every method can
    raise `StoreFailed`. A method that writes can also raise `OutOfSpace`; then only `rollback` and
    `close` may follow.
    """

    __slots__ = ()

    @abstractmethod
    def execute(self, sql: str, *values: Any) -> list[Row]:
        """Runs a statement and returns its rows."""

    @abstractmethod
    def change(self, sql: str, *values: Any) -> int:
        """Runs an UPDATE, DELETE or INSERT and returns the number of changed rows."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a write transaction."""

    @abstractmethod
    def commit(self) -> None:
        """Commits the transaction. Once this returns, the transaction survives a loss of power."""

    @abstractmethod
    def rollback(self) -> None:
        """Undoes the open transaction, if there is one. Raises nothing."""

    @property
    @abstractmethod
    def operation_errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that mean that only the statement failed: the database still works."""

    def lock_boot(self) -> int:
        """Returns the boot number of the broker that owns the store.

        Locks this number until the commit.
        """
        return self.number("SELECT boot FROM meta")

    @abstractmethod
    def used_bytes(self) -> int:
        """Returns the bytes of the tables, without free pages."""

    @abstractmethod
    def read_version(self) -> int:
        """Returns the version of the schema; 0 in an empty database."""

    @abstractmethod
    def write_version(self, version: int) -> None:
        """Sets the version of the schema, within the open transaction."""

    # ---- parts that both databases share -----------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begins a transaction. The `with` block commits it, or undoes it after an exception."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.rollback()
            raise

    def one(self, sql: str, *values: Any) -> Row | None:
        """Returns the first row of a query; None without rows."""
        rows = self.execute(sql, *values)
        return rows[0] if rows else None

    def number(self, sql: str, *values: Any) -> int:
        """Returns the only value of a query's only row; 0 for NULL or no row."""
        row = self.one(sql, *values)
        return 0 if row is None or row[0] is None else int(row[0])

    def savepoint(self) -> None:
        """Sets a savepoint. `undo` then undoes only the changes made after it."""
        self.change("SAVEPOINT operation")

    def release(self) -> None:
        """Keeps the changes made since the savepoint."""
        self.change("RELEASE SAVEPOINT operation")

    def undo(self) -> None:
        """Undoes the changes made since the savepoint."""
        self.change("ROLLBACK TO SAVEPOINT operation")
        self.release()
