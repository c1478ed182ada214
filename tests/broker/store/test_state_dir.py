"""The folder of the store: its owner, its location, its content."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.store import sqlite_store, state_dir
from mlxpool.broker.store.opening import opener
from mlxpool.broker.store.operations import Defer, FeedNext, Operation, ReadJob
from mlxpool.broker.store.records import (
    Changed,
    Durable,
    Fed,
    Found,
    OutOfSpace,
    StoreFailed,
    StoreInUse,
    StoreUnusable,
)
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.sqlite_store import (
    FRAME_HEAD,
    PAGE,
    SqliteDatabase,
    SqliteOpener,
    SqliteStore,
)
from mlxpool.broker.store.state_dir import StateDir, check_file_system, file_system
from support.job_store import BEGIN, BOOT, MAX_BYTES, RESERVE, finish, job_id, progress, submit


def open_folder(path: Path) -> SqliteOpener:
    return SqliteOpener(path, MAX_BYTES, reserve_bytes=RESERVE)


# ---- who has it ----------------------------------------------------------------------------------


def test_two_brokers_on_one_folder_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(StoreInUse, match=rf"pid {os.getpid()}.*state_dir")
    with open_folder(tmp_path / "state"), refused:
        open_folder(tmp_path / "state")
    open_folder(tmp_path / "state").close()


def test_a_foreign_program_cannot_open_the_database(tmp_path: Path) -> None:
    with open_folder(tmp_path / "state") as folder, folder.open():
        path = tmp_path / "state" / "jobs-1.db"
        connect = f"sqlite3.connect({str(path)!r}, timeout=0)"
        code = f"import sqlite3; {connect}.execute('SELECT * FROM job')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "database is locked" in done.stderr
        assert not path.with_name("jobs-1.db-shm").exists()  # the index of the log is in memory


def test_a_database_that_another_program_has_open_is_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path / "state") as folder:
        folder.open().close()
        other = sqlite3.connect(tmp_path / "state" / "jobs-1.db", isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnusable, match=r"another process has .*jobs-1\.db open"):
                folder.open()
        finally:
            other.close()
        folder.open().close()


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(StoreUnusable, match=f"belongs to uid {uid}"):
        open_folder(tmp_path / "state")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnusable, match="cannot be made"):
        open_folder(tmp_path / "file" / "state")


def test_what_is_no_folder_or_cannot_be_locked_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnusable, match=r"state_dir .*file is no folder"):
        open_folder(tmp_path / "file")
    (tmp_path / "state" / "lock").mkdir(parents=True)
    with pytest.raises(StoreUnusable, match=r"cannot be locked: .*lock"):
        open_folder(tmp_path / "state")


# ---- where it is ---------------------------------------------------------------------------------

MOUNTS = [("/", "ext4"), ("/home", "nfs4"), ("/home/a/local", "xfs"), ("/srv", "fuse.sshfs")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/home", "nfs4"),
        ("/home/a/state", "nfs4"),
        ("/home/a/local/state", "xfs"),
        ("/homes", "ext4"),
        ("/srv/state", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused_by_name() -> None:
    check_file_system(Path("/var/lib"), MOUNTS)
    for path, kind in (("/home/a", "nfs4"), ("/srv", "fuse.sshfs")):
        with pytest.raises(StoreUnusable, match=rf"{kind}, a network file system.*PostgreSQL"):
            check_file_system(Path(path), MOUNTS)


def test_the_mounts_of_this_machine_are_read(tmp_path: Path) -> None:
    assert file_system(tmp_path) != ""


def test_the_last_of_several_mounts_on_one_point_counts() -> None:
    assert file_system(Path("/x"), [("/", "ext4"), ("/x", "ext4"), ("/x", "nfs")]) == "nfs"


# ---- content -------------------------------------------------------------------------------------


def test_folder_and_parent_are_synced_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(state_dir, "sync", synced.append)
    state_dir.create(tmp_path / "state")
    assert synced == [tmp_path / "state", tmp_path]
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_the_reserve_is_held_when_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StateDir(tmp_path / "state", RESERVE) as folder:
        assert folder.hold_reserve()
        assert (tmp_path / "state" / "reserve").stat().st_size == RESERVE
        assert folder.free_reserve() and not folder.free_reserve()
        monkeypatch.setattr(StateDir, "free_bytes", lambda self: 2 * RESERVE - 1)
        assert not folder.hold_reserve()
        monkeypatch.setattr(StateDir, "free_bytes", lambda self: 2 * RESERVE)
        assert folder.hold_reserve()


def test_figures_say_that_there_is_no_room_for_new_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_folder(tmp_path) as folder, folder.open() as store:
        store.begin(BOOT, BEGIN)
        free = [10 * 2**30]
        monkeypatch.setattr(StateDir, "free_bytes", lambda self: free[0])
        for room in (True, False, True):
            free[0] = 10 * 2**30 if room else 2**20
            figures = store.figures()
            assert bool(figures.room) is room
            shown = JobFigures.of(figures, 0, 0, 0, {})
            assert (shown.store, shown.room) == ("ok" if room else "refusing", figures.room)


def test_the_newest_database_is_the_one(tmp_path: Path) -> None:
    with StateDir(tmp_path, RESERVE) as folder:
        assert folder.database().name == "jobs-1.db"
        for name in ("jobs-1.db", "jobs-1.db-wal", "jobs-9.db", "jobs-10.db", "jobs-x.db"):
            (tmp_path / name).write_bytes(name.encode())
        assert folder.database().name == "jobs-10.db"
        rebuilt = tmp_path / "rebuilt.db"
        rebuilt.write_bytes(b"new")
        (tmp_path / "jobs-11.db-wal").write_bytes(b"left over")
        assert folder.replace(rebuilt) == folder.database() == tmp_path / "jobs-11.db"
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"jobs-11.db", "jobs-x.db", "lock"}


def test_a_damaged_database_is_told_and_left_alone(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        (tmp_path / "jobs-1.db").write_bytes(b"this is no database" * 1000)
        with pytest.raises(StoreUnusable, match=r"cannot be opened.*not a database"):
            folder.open()
        assert (tmp_path / "jobs-1.db").read_bytes().startswith(b"this is no")
        with pytest.raises(StoreFailed, match="cannot be opened again"):
            folder.reopen()
        assert not (tmp_path / "rebuilt.db").exists()


def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_store, "MIN_VERSION", (99, 0, 0))
    with open_folder(tmp_path) as folder, pytest.raises(StoreUnusable, match=r"needs 99\.0\.0"):
        folder.open()


# ---- the settings of SQLite ----------------------------------------------------------------------


def test_the_settings_hold(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder, folder.open() as store:
        settings = {
            name: store.database.one(f"PRAGMA {name}")[0]  # type: ignore[index]
            for name in (
                *("journal_mode", "locking_mode", "synchronous", "secure_delete", "auto_vacuum"),
                *("fullfsync", "checkpoint_fullfsync", "max_page_count", "user_version"),
            )
        }
    assert settings == {
        "journal_mode": "wal",
        "locking_mode": "exclusive",
        "synchronous": 2,  # FULL
        "secure_delete": 1,
        "auto_vacuum": 2,  # INCREMENTAL
        "fullfsync": 1,
        "checkpoint_fullfsync": 1,
        "max_page_count": MAX_BYTES // 4096,
        "user_version": schema.VERSION,
    }


def test_no_other_user_can_read_the_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with open_folder(tmp_path) as folder:
        with_job(folder)
        store = folder.reopen()
        with store:
            store.resume(BOOT)
            store.transaction([submit(2)], BEGIN)
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes) == {"lock", "reserve", "jobs-2.db", "jobs-2.db-wal"}
    assert set(modes.values()) == {0o600}


def test_the_log_is_copied_into_the_database_and_pages_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "LOG_BYTES", 100_000)
    with open_folder(tmp_path) as folder, folder.open() as store:
        store.begin(BOOT, BEGIN)
        log = tmp_path / "jobs-1.db-wal"
        for number in range(40):
            store.transaction([submit(number, request=b"x" * 50_000)], BEGIN)
            store.tend()
            assert log.stat().st_size < 400_000
        before = (tmp_path / "jobs-1.db").stat().st_size
        delete_jobs(store)
        for _ in range(20):
            folder.folder.free_reserve()
            store.transaction([submit(100, request=b"y" * 120_000)], BEGIN)
            delete_jobs(store)
            store.tend()
        assert (tmp_path / "reserve").exists()
        assert store.database.number("PRAGMA freelist_count") <= sqlite_store.FREE_PAGES
        assert (tmp_path / "jobs-1.db").stat().st_size < before


@pytest.mark.parametrize("prompt", [100, 30_000])
def test_no_change_of_a_job_writes_its_prompt_again(tmp_path: Path, prompt: int) -> None:
    """Each change of a job writes at most 1 KiB to SQLite's log, averaged over 200 jobs."""
    jobs = range(200)
    with open_folder(tmp_path) as folder, folder.open() as store:
        store.begin(BOOT, BEGIN)
        database = store.database
        assert isinstance(database, SqliteDatabase)
        store.transaction([submit(number, request=b"x" * prompt) for number in jobs], BEGIN)

        def logged(*operations: Operation) -> float:
            """Returns the bytes of the log that a transaction writes for each job."""
            database.copy_log()
            results = store.transaction(operations, BEGIN)
            assert {type(result) for result in results} <= {Fed, Durable, Changed}
            frames = database.execute("PRAGMA wal_checkpoint(PASSIVE)")[0][1]
            return float(frames) * (FRAME_HEAD + PAGE) / len(jobs)

        fed = logged(FeedNext("m", 0, len(jobs)))
        first = logged(*(progress(number, 0, facts=b"facts") for number in jobs))
        second = logged(*(progress(number, 4) for number in jobs))
        deferred = logged(*(Defer(job_id(number), 0, 1.0, 1, 0.5, cause="why") for number in jobs))
        ended = logged(*map(finish, jobs))
    assert all(0 < size <= 1024 for size in (fed, first, second, deferred, ended))


def delete_jobs(store: SqliteStore) -> None:
    for table in ("job", "request"):
        store.database.change(f"DELETE FROM {table}")


def test_a_store_has_no_reserve_until_it_has_something_to_write(tmp_path: Path) -> None:
    reserve = tmp_path / "reserve"
    for start in range(2):
        with open_folder(tmp_path) as folder, folder.open() as store:
            store.begin(BOOT + start, BEGIN)
            store.transaction([ReadJob(job_id(1))], BEGIN + sqlite_store.RESERVE_PAUSE)
            store.tend()
            assert not reserve.exists()
    with open_folder(tmp_path) as folder:
        with_job(folder)
        assert reserve.exists()
        assert folder.folder.free_reserve()
        with folder.open():
            assert reserve.exists(), "what is there may have to be written on a full disk"


def test_a_reserve_that_was_used_is_taken_again_when_a_while_has_passed(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder, folder.open() as store:
        store.begin(BOOT, BEGIN)
        store.transaction([submit(0)], BEGIN)
        assert store.free_reserve()
        store.transaction([submit(1)], BEGIN + 1)
        store.tend()
        assert not (tmp_path / "reserve").exists()
        store.transaction([submit(2)], BEGIN + 1 + sqlite_store.RESERVE_PAUSE)
        store.tend()
        assert (tmp_path / "reserve").exists()


def test_a_disk_without_room_to_open_the_store_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: SqliteOpener) -> SqliteStore:
        raise OutOfSpace("no room")

    monkeypatch.setattr(SqliteOpener, "_open", full)
    refused = pytest.raises(StoreUnusable, match="disk of the store is full, free some room")
    with open_folder(tmp_path) as folder, refused:
        folder.open()
    assert not (tmp_path / "reserve").exists()


def test_only_what_is_not_copied_counts_as_the_length_of_the_log(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder, folder.open() as store:
        store.begin(BOOT, BEGIN)
        database = store.database
        assert isinstance(database, SqliteDatabase)
        log = tmp_path / "jobs-1.db-wal"
        database.copy_log()  # until here, the log has the creation of the tables
        for number in range(2):  # the second pass overwrites the first pass's frames
            assert not database.log_is_long(200_000)
            store.transaction([submit(2 * number, request=b"x" * 100_000)], BEGIN)
            assert not database.log_is_long(200_000)
            store.transaction([submit(2 * number + 1, request=b"x" * 150_000)], BEGIN)
            assert database.log_is_long(200_000)
            database.copy_log()
            assert log.stat().st_size > 250_000
        assert log.stat().st_size < 500_000


# ---- versions of the schema ----------------------------------------------------------------------


def with_job(folder: SqliteOpener) -> None:
    with folder.open() as store:
        store.begin(BOOT, BEGIN)
        store.transaction([submit(1)], BEGIN)


@pytest.mark.parametrize("other", [schema.VERSION - 1, schema.VERSION + 1])
def test_another_schema_is_refused_and_left_alone(tmp_path: Path, other: int) -> None:
    with open_folder(tmp_path) as folder:
        with_job(folder)
        path = folder.folder.database()
        with SqliteDatabase(path, MAX_BYTES) as database:
            database.write_version(other)
        with pytest.raises(
            StoreUnusable,
            match=rf"schema {other}, .*schema {schema.VERSION} alone.*empty state_dir",
        ):
            folder.open()
        with SqliteDatabase(path, MAX_BYTES) as database:
            assert database.read_version() == other
            assert database.number("SELECT COUNT(*) FROM job") == 1
            database.write_version(schema.VERSION)
        with folder.open() as store:
            store.begin(BOOT + 1, BEGIN)
            (result,) = store.transaction([ReadJob(job_id(1))], BEGIN)
    assert isinstance(result, Found)


# ---- the choice ----------------------------------------------------------------------------------


def test_a_folder_or_a_url_chooses_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opener(str(tmp_path), MAX_BYTES) as chosen:
        assert isinstance(chosen, SqliteOpener)
    assert type(opener("postgresql://h/d", MAX_BYTES)).__name__ == "PostgresOpener"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnusable, match="'mysql'; it may be a folder, or postgresql://"):
        opener("mysql://h/d", MAX_BYTES)
    assert not (tmp_path / "mysql:").exists()
    monkeypatch.setitem(sys.modules, "mlxpool.broker.store.postgres_store", None)
    with pytest.raises(StoreUnusable, match=r"mlxpool\[postgres\]"):
        opener("postgresql://h/d", MAX_BYTES)
