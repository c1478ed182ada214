"""The store in SQLite. A single connection locks the file, and every commit is durable.

SQLite has a write-ahead log and synchronous=FULL, so a commit is one fsync of the log. The index of
the log is in this process's memory (locking_mode EXCLUSIVE before the first access). So no second
connection is possible; before 3.51.3, SQLite could damage a log with two connections.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import OutOfSpace, Result, StoreFailed, StoreInUse, StoreUnusable
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.sql.database import Database, Row
from mlxpool.broker.store.sql.sql_store import ADMIT_SHARE, KEY_LIFE, Opener, SqlStore
from mlxpool.broker.store.state_dir import RESERVE_BYTES, StateDir, make_private, sync

MIN_VERSION = (3, 37, 0)  # the first version with STRICT tables and RETURNING
PAGE = 4096  # bytes
# The order matters: locking_mode before the first access to the log, auto_vacuum before tables.
PRAGMAS = {
    "locking_mode": "EXCLUSIVE",
    "page_size": str(PAGE),
    "auto_vacuum": "INCREMENTAL",
    "journal_mode": "WAL",
    "synchronous": "FULL",
    "fullfsync": "1",  # has an effect only on macOS
    "checkpoint_fullfsync": "1",
    "secure_delete": "ON",
    "wal_autocheckpoint": "0",  # `tend` copies the log, after the results were handed out
    "foreign_keys": "OFF",
    "temp_store": "MEMORY",
    "cache_size": "-16384",  # KiB
}
NO_BOUND = 1 << 44  # bytes
LOG_HEAD, FRAME_HEAD = 32, 24  # bytes before the frames of the log, and before each page in it
LOG_BYTES = 32 * 1024 * 1024  # length of the log above which it is copied
RESERVE_PAUSE = 60.0  # seconds until a deleted reserve file is allocated again
FREE_PAGES = 256  # most free pages that one call gives back
# Result codes after which this connection cannot be trusted.
BROKEN = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOMEM,
    }
)


class SqliteDatabase(Database):
    """A connection to a database file. Raises StoreError if the file cannot be opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        if sqlite3.sqlite_version_info < MIN_VERSION:
            raise StoreUnusable(
                f"this Python has SQLite {sqlite3.sqlite_version}; the store of jobs needs"
                f" {'.'.join(map(str, MIN_VERSION))} or later"
            )
        self.path = path
        self._copied_salt = b""
        make_private(path)
        self._connection = sqlite3.connect(
            path, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._set_up(max_bytes)
        except BaseException:
            self._connection.close()
            raise

    def _set_up(self, max_bytes: int) -> None:
        for name, value in PRAGMAS.items():
            row = self.one(f"PRAGMA {name} = {value}")
            if name == "journal_mode" and (row is None or row[0] != "wal"):
                raise StoreUnusable(f"SQLite cannot use a write-ahead log for {self.path}: {row}")
        self.execute(f"PRAGMA max_page_count = {max(64, max_bytes // PAGE)}")
        self.begin()  # locks the file; the lock stays after the rollback
        self.rollback()
        if self.path.with_name(self.path.name + "-shm").exists():
            raise StoreInUse(f"another process has {self.path} open")

    @property
    def operation_errors(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error, OverflowError, UnicodeError)

    def _translated(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        if code == sqlite3.SQLITE_FULL:
            return OutOfSpace(f"no room for {self.path}: {error}")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreInUse(f"another process has {self.path} open: {error}")
        if code in BROKEN:
            return StoreFailed(f"SQLite failed on {self.path}: {error} ({name})")
        return error

    def execute(self, sql: str, *values: Any) -> list[Row]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def change(self, sql: str, *values: Any) -> int:
        try:
            return self._connection.execute(sql, values).rowcount
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def begin(self) -> None:
        self.change("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.change("COMMIT")

    def rollback(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the owner of this object closes a failed connection

    def used_bytes(self) -> int:
        pages = self.number("PRAGMA page_count") - self.number("PRAGMA freelist_count")
        return pages * PAGE

    def read_version(self) -> int:
        return self.number("PRAGMA user_version")

    def write_version(self, version: int) -> None:
        self.execute(f"PRAGMA user_version = {version}")

    def copy_to(self, path: Path) -> None:
        """Writes the readable contents of this database into a new file, and syncs the file."""
        path.unlink(missing_ok=True)
        make_private(path)
        self.execute("VACUUM INTO ?", str(path))
        sync(path)

    def copy_log(self) -> None:
        """Copies the log into the database file. The next commit overwrites the log from its start.

        The log file keeps its size. An overwrite is faster than an append, because it syncs only
        data, and not the new size of the file.
        """
        salt = self._log_salt()
        row = self.one("PRAGMA wal_checkpoint(PASSIVE)")
        if row is not None and row[1] == row[2]:  # frames in the log, copied frames
            self._copied_salt = salt

    def give_back(self, pages: int) -> None:
        """Gives free pages back to the file system, outside a transaction."""
        try:
            # `execute` would run one step of the pragma, which frees one page; `executescript` runs
            # all steps.
            self._connection.executescript(f"PRAGMA incremental_vacuum({pages})")
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def log_is_long(self, size: int) -> bool:
        """Returns whether the log has at least `size` bytes that are not in the database file yet.

        The valid frames of the log are followed by old frames from before the last overwrite. The
        salt of old frames differs from the salt in the log's header. So the log has `size` valid
        bytes if the frame at that offset has the header's salt.
        """
        salt = self._log_salt()
        if not salt or salt == self._copied_salt:
            return False
        frame = LOG_HEAD + (FRAME_HEAD + PAGE) * (size // (FRAME_HEAD + PAGE))
        return self._log_part(frame + 8, len(salt)) == salt

    def _log_salt(self) -> bytes:
        return self._log_part(16, 8)

    def _log_part(self, start: int, count: int) -> bytes:
        try:
            with open(f"{self.path}-wal", "rb", buffering=0) as log:
                log.seek(start)
                return log.read(count)
        except FileNotFoundError:
            return b""

    def close(self) -> None:
        self._connection.close()


class SqliteStore(SqlStore):
    """The store in a locked folder. Raises StoreError or sqlite3.Error."""

    def __init__(self, folder: StateDir, max_bytes: int, key_life: float = KEY_LIFE) -> None:
        self._folder = folder
        self._hold_reserve_at = math.inf  # time by the store's clock
        self._sqlite = database = SqliteDatabase(folder.database(), max_bytes)
        try:
            if schema.ensure(database, schema.SQLITE):
                sync(folder.path)
            super().__init__(database, max_bytes, key_life)
            # An empty store needs no reserve: it has no running jobs to write on a full disk.
            self._holds_reserve = self._has_contents()
        except BaseException:
            database.close()
            raise

    def _has_contents(self) -> bool:
        tables = ("job", "batch", "file")
        return any(
            self._sqlite.number(f"SELECT EXISTS (SELECT 1 FROM {table})") for table in tables
        )

    def begin(self, boot: int, now: float) -> None:
        super().begin(boot, now)
        self._hold_reserve_at = now + RESERVE_PAUSE  # opening may have deleted the reserve file

    def transaction(self, operations: Sequence[Operation], now: float) -> list[Result]:
        if not self._holds_reserve and any(operation.admits for operation in operations):
            self._holds_reserve = True
            self._folder.hold_reserve()
        return super().transaction(operations, now)

    def hold_reserve(self) -> None:
        """Allocates the reserve file if the store is not empty and the disk has room.

        If the disk gets full, the file is deleted to make room for the necessary writes.
        """
        if self._holds_reserve:
            self._folder.hold_reserve()

    def room(self, share: float = ADMIT_SHARE) -> int:
        return min(super().room(share), self._folder.free_bytes() - 2 * LOG_BYTES)

    def tend(self) -> None:
        """Copies a long log into the database, returns free pages, allocates the reserve file."""
        database = self._sqlite
        if self._holds_reserve and self.wall_seen >= self._hold_reserve_at:
            held = self._folder.hold_reserve()
            self._hold_reserve_at = math.inf if held else self.wall_seen + RESERVE_PAUSE
        if not database.log_is_long(LOG_BYTES):
            return
        if database.number("PRAGMA freelist_count") > FREE_PAGES:
            database.give_back(FREE_PAGES)
        database.copy_log()
        self.hold_reserve()

    def free_reserve(self) -> bool:
        self._hold_reserve_at = self.wall_seen + RESERVE_PAUSE
        return self._folder.free_reserve()


class SqliteOpener(Opener):
    """The opener of the store in a folder. It locks the folder for the life of the broker.

    Raises StoreInUse if another broker has locked the folder, and StoreUnwritable or StoreUnusable
    if the folder cannot be used.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        key_life: float = KEY_LIFE,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.folder = StateDir(path, reserve_bytes)
        self._max_bytes, self._key_life = max_bytes, key_life

    def open(self) -> SqliteStore:
        """Opens the store, or creates it if it does not exist.

        Raises StoreUnusable if the store cannot be opened. The message names a remedy.
        """
        try:
            try:
                store = self._open()
            except OutOfSpace:
                self.folder.free_reserve()
                return self._open()
            store.hold_reserve()
            return store
        except StoreUnusable:
            raise
        except OutOfSpace as error:
            raise StoreUnusable(f"the disk of the store is full, free some room: {error}") from None
        except (OSError, sqlite3.Error) as error:
            path = self.folder.path
            what = "put a copy of the folder in its place, or give another state_dir"
            raise StoreUnusable(
                f"the store of jobs in {path} cannot be opened: {error}; {what}"
            ) from error

    def reopen(self) -> SqliteStore:
        """Opens the store after a disk failure, as a new file with the readable contents.

        After a failed fsync, reads of the old file may return data that is not on the disk. Raises
        StoreFailed if the store cannot be opened now.
        """
        rebuilt = self.folder.path / "rebuilt.db"
        try:
            with SqliteDatabase(self.folder.database(), NO_BOUND) as database:
                database.copy_to(rebuilt)
            self.folder.replace(rebuilt)
            return self._open()
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"the store of jobs cannot be opened again: {error}") from error
        finally:
            rebuilt.unlink(missing_ok=True)

    def _open(self) -> SqliteStore:
        return SqliteStore(self.folder, self._max_bytes, self._key_life)

    def close(self) -> None:
        self.folder.close()
