"""What the SQL of the operations needs of a database; each store has its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxpool.common.closing import Closing

Row = Sequence[Any]


class Database(Closing):
    """One connection, used by one thread at a time.

    Statements have `?` for parameters. Values are int, float, str, bytes and None. Every method can
    raise `StoreFailed`, and what writes `OutOfSpace`, after which only `rollback` and `close` may
    follow.
    """

    __slots__ = ()

    @abstractmethod
    def execute(self, sql: str, *values: Any) -> list[Row]:
        """Run a statement; returns its rows."""

    @abstractmethod
    def change(self, sql: str, *values: Any) -> int:
        """Run an UPDATE, DELETE or INSERT; returns how many rows it changed."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction that writes."""

    @abstractmethod
    def commit(self) -> None:
        """End the transaction. When it returns, what was written survives the loss of power."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo the transaction, if there is one. Raises nothing."""

    @property
    @abstractmethod
    def operation_errors(self) -> tuple[type[Exception], ...]:
        """What a statement raises that cannot be performed, while the database is well."""

    def lock_boot(self) -> int:
        """The number of the broker that has the store, which stays so until the commit."""
        return self.number("SELECT boot FROM meta")

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that the tables take, without what is free in them."""

    @abstractmethod
    def read_version(self) -> int:
        """The version of the schema; 0 in an empty database."""

    @abstractmethod
    def write_version(self, version: int) -> None:
        """Set it, in the transaction that is open."""

    # ---- what both have in common ------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin, and commit at the end of the `with`, or undo everything after an exception."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.rollback()
            raise

    def one(self, sql: str, *values: Any) -> Row | None:
        """The first row, if there is one."""
        rows = self.execute(sql, *values)
        return rows[0] if rows else None

    def number(self, sql: str, *values: Any) -> int:
        """The only value of the only row; 0 for NULL and for no row."""
        row = self.one(sql, *values)
        return 0 if row is None or row[0] is None else int(row[0])

    def savepoint(self) -> None:
        """Begin a part of the transaction that can be undone alone."""
        self.change("SAVEPOINT operation")

    def release(self) -> None:
        """Keep what was done since the savepoint."""
        self.change("RELEASE SAVEPOINT operation")

    def undo(self) -> None:
        """Undo what was done since the savepoint."""
        self.change("ROLLBACK TO SAVEPOINT operation")
        self.release()
