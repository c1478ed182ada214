"""The interface that the SQL of the operations needs; each database implements it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlxpool.common.closing import Closing

Row = Sequence[Any]


class Database(Closing):
    """A connection, used by one thread at a time.

    Statements have `?` for parameters. Values are int, float, str, bytes and None. Every method can
    raise `StoreFailed`. A method that writes can raise `OutOfSpace`; then only `rollback` and
    `close` may follow.
    """

    __slots__ = ()

    @abstractmethod
    def execute(self, sql: str, *values: Any) -> list[Row]:
        """Run a statement; returns its rows."""

    @abstractmethod
    def change(self, sql: str, *values: Any) -> int:
        """Run an UPDATE, DELETE or INSERT; returns the number of changed rows."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction that writes."""

    @abstractmethod
    def commit(self) -> None:
        """End the transaction. When it returns, the transaction survives the loss of power."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo the open transaction, if any. Raises nothing."""

    @property
    @abstractmethod
    def operation_errors(self) -> tuple[type[Exception], ...]:
        """The exceptions of a statement that fails while the database works."""

    def lock_boot(self) -> int:
        """Returns the number of the owning broker; it cannot change before the commit."""
        return self.number("SELECT boot FROM meta")

    @abstractmethod
    def used_bytes(self) -> int:
        """Returns the bytes that the tables take, without free pages."""

    @abstractmethod
    def read_version(self) -> int:
        """Returns the version of the schema; 0 in an empty database."""

    @abstractmethod
    def write_version(self, version: int) -> None:
        """Set the version of the schema, in the open transaction."""

    # ---- parts that both databases share -----------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin; at the end of the `with` commit, or undo everything after an exception."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.rollback()
            raise

    def one(self, sql: str, *values: Any) -> Row | None:
        """Returns the first row; None without rows."""
        rows = self.execute(sql, *values)
        return rows[0] if rows else None

    def number(self, sql: str, *values: Any) -> int:
        """Returns the only value of the only row; 0 for NULL and without a row."""
        row = self.one(sql, *values)
        return 0 if row is None or row[0] is None else int(row[0])

    def savepoint(self) -> None:
        """Begin a part of the transaction that can be undone alone."""
        self.change("SAVEPOINT operation")

    def release(self) -> None:
        """Keep the changes since the savepoint."""
        self.change("RELEASE SAVEPOINT operation")

    def undo(self) -> None:
        """Undo the changes since the savepoint."""
        self.change("ROLLBACK TO SAVEPOINT operation")
        self.release()
