"""The store's thread: group commits, bounds, shutdown, a newer broker on the store, kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mlxpool.broker.store.operations import Operation, ReadJob
from mlxpool.broker.store.records import Durable, Found, Refused, Result, StoreFenced, Submitted
from mlxpool.broker.store.sql.sql_store import SqlStore
from mlxpool.broker.store.sqlite_store import SqliteOpener
from mlxpool.broker.store.writer import OPERATION_BYTES, Bounds, HealthState, Inbox, StoreWriter
from support.job_store import BEGIN, BOOT, MAX_BYTES, RESERVE, job_id, progress, submit
from support.pool import PATIENCE, until

TESTS = Path(__file__).parents[2]
CLOSED = Refused("store_closed", "closed")


class Watched(SqliteOpener):
    """Opens stores that record the operations of each transaction, and wait until `gate` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_BYTES, reserve_bytes=RESERVE)
        self.groups: list[Sequence[Operation]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def open(self) -> SqlStore:  # type: ignore[override]
        store = super().open()
        perform = store.transaction

        def transaction(operations: Sequence[Operation], now: float) -> list[Result]:
            self.groups.append(operations)
            assert self.gate.wait(PATIENCE)
            if self.error is not None:
                raise self.error
            return perform(operations, now)

        store.transaction = transaction  # type: ignore[method-assign]
        return store


class Running:
    """A started StoreWriter; `results` waits until this number of operations has a result."""

    def __init__(self, path: Path) -> None:
        self.opener = Watched(path)
        self.wakes = 0
        self.writer = StoreWriter(self.opener, BOOT, self._wake, wall=lambda: BEGIN)
        self.writer.start()

    def _wake(self) -> None:
        self.wakes += 1

    def results(self, count: int) -> list[Result]:
        pairs: list[tuple[Operation, Result]] = []

        def enough() -> bool:
            pairs.extend(self.writer.take())
            return len(pairs) >= count

        until(enough, f"{count} results")
        return [result for _, result in pairs]

    def offer(self, *operations: Operation) -> None:
        for operation in operations:
            assert self.writer.offer(operation) is None


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path / "state")
    yield started
    started.opener.gate.set()
    assert started.writer.close(PATIENCE)


# ---- groups --------------------------------------------------------------------------------------


def test_what_comes_during_a_commit_is_one_commit(running: Running) -> None:
    running.opener.gate.clear()
    running.offer(submit(1))
    until(lambda: len(running.opener.groups) == 1, "the first commit")
    running.offer(*(submit(number) for number in range(2, 50)))
    running.opener.gate.set()
    results = running.results(49)
    assert all(isinstance(result, Submitted) for result in results)
    assert [len(group) for group in running.opener.groups] == [1, 48]
    until(lambda: running.wakes >= 2, "the loop is woken for each commit")


def test_results_come_with_the_operations_that_were_offered(running: Running) -> None:
    operations = [submit(1), ReadJob(job_id(1)), progress(1, 0)]
    running.offer(*operations)
    pairs: list[tuple[Operation, Result]] = []
    until(lambda: pairs.extend(running.writer.take()) or len(pairs) == 3, "all results")  # type: ignore[func-returns-value]
    assert all(operation is asked for (operation, _), asked in zip(pairs, operations, strict=True))
    assert [type(result) for _, result in pairs] == [Submitted, Found, Durable]


def test_a_stalled_store_is_seen(running: Running) -> None:
    running.opener.gate.clear()
    running.offer(submit(1))
    until(lambda: running.writer.health.busy > 0, "the store is busy")
    assert running.writer.health.operations == 1
    running.opener.gate.set()
    running.results(1)
    until(lambda: running.writer.health.busy == 0, "the store is idle")
    health = running.writer.health
    assert (health.state, health.operations, health.bytes) == (HealthState.OK, 0, 0)


# ---- the inbox -----------------------------------------------------------------------------------


def test_half_of_the_inbox_is_for_what_runs() -> None:
    inbox = Inbox(Bounds(operations=10))
    offered = [inbox.offer(submit(number)) for number in range(7)]
    assert [refused is None for refused in offered] == [True] * 5 + [False] * 2
    assert offered[5] is not None and offered[5].code == "store_busy"
    assert "at most 10" in offered[5].message
    assert [inbox.offer(progress(1, pos)) is None for pos in range(7)] == [True] * 5 + [False] * 2
    group = inbox.take()
    assert len(group) == 10
    assert inbox.offer(progress(1, 0)) is not None  # the first operations are in progress
    inbox.done(group)
    assert inbox.offer(submit(1)) is None
    assert inbox.load().operations == 1


def test_the_inbox_is_bounded_in_bytes() -> None:
    inbox = Inbox(Bounds(bytes=10_000))
    assert inbox.offer(submit(1, request=b"x" * 4000)) is None
    assert inbox.offer(submit(2, request=b"x" * 1000)) is not None
    assert inbox.offer(progress(1, 0)) is None
    inbox.done(inbox.take())
    assert inbox.load().bytes == 0
    assert inbox.offer(submit(3, request=b"x" * 50_000)) is None  # larger than the inbox, but alone
    assert inbox.load().bytes == 50_000 + OPERATION_BYTES


def test_a_group_is_bounded() -> None:
    inbox = Inbox(Bounds(group_operations=3, group_bytes=5000))
    for number in range(4):
        inbox.offer(submit(number))
    inbox.offer(submit(5, request=b"x" * 6000))
    inbox.offer(submit(6, request=b"x" * 6000))
    assert [len(inbox.take()) for _ in range(4)] == [3, 1, 1, 1]


def test_output_alone_is_gathered_and_anything_else_is_not() -> None:
    inbox = Inbox(Bounds())
    inbox.offer(progress(1, 0))
    assert inbox.take(until=0.0) == []  # the time is over before the output is due
    inbox.offer(ReadJob(job_id(1)))
    assert len(inbox.take(until=0.0)) == 2
    inbox.offer(progress(1, 4))
    assert len(inbox.take()) == 1  # after GATHER


def test_a_closed_inbox_hands_out_what_it_has() -> None:
    inbox = Inbox(Bounds())
    inbox.offer(progress(1, 0))
    inbox.close(CLOSED)
    assert inbox.offer(progress(1, 4)) == CLOSED
    assert len(inbox.take()) == 1
    assert inbox.take() == []


def test_a_paused_inbox_refuses_and_is_opened_again() -> None:
    inbox = Inbox(Bounds())
    inbox.offer(progress(1, 0))
    assert len(inbox.empty(CLOSED)) == 1
    assert inbox.offer(progress(1, 4)) == CLOSED
    inbox.open()
    assert inbox.offer(progress(1, 4)) is None


# ---- ends ----------------------------------------------------------------------------------------


def test_what_waits_is_committed_before_the_end(tmp_path: Path) -> None:
    running = Running(tmp_path / "state")
    running.opener.gate.clear()
    running.offer(*(submit(number) for number in range(1, 20)))
    threading.Timer(0.05, running.opener.gate.set).start()
    assert running.writer.close(PATIENCE)
    assert len(running.results(19)) == 19
    assert running.writer.health.state is HealthState.CLOSED
    assert running.writer.offer(submit(20)).code == "store_closed"  # type: ignore[union-attr]
    opener = SqliteOpener(tmp_path / "state", MAX_BYTES, reserve_bytes=RESERVE)
    with opener, opener.open() as store:
        assert store.database.number("SELECT COUNT(*) FROM job") == 19


def test_a_writer_that_was_never_started_closes(tmp_path: Path) -> None:
    writer = StoreWriter(Watched(tmp_path / "state"), BOOT, lambda: None)
    assert writer.close()
    Watched(tmp_path / "state").close()  # the folder is not locked any more


def test_a_fenced_broker_is_told_so(running: Running) -> None:
    running.opener.error = StoreFenced("another broker has it")
    running.offer(submit(1))
    assert running.results(1) == [Refused("store_closed", "another broker has it")]
    assert running.writer.close(PATIENCE)
    health = running.writer.health
    assert (health.state, health.reason) == (HealthState.FENCED, "another broker has it")
    assert running.writer.offer(submit(2)) == Refused("store_closed", "another broker has it")


def test_an_error_of_ours_leaves_nothing_without_an_answer(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.opener.error = KeyError("a bug")
    running.opener.gate.clear()
    running.offer(submit(1), submit(2))
    running.opener.gate.set()
    results = running.results(2)
    assert {type(result) for result in results} == {Refused}
    assert running.writer.close(PATIENCE)
    assert running.writer.health.state is HealthState.FAILED
    assert "the thread of the store ended" in caplog.text


# ---- SIGKILL -------------------------------------------------------------------------------------


def killed_workload(folder: Path, lines: int, seed: int) -> dict[int, int]:
    """Runs support.store_workload, and kills it after `lines` acknowledgements.

    Returns the number of acknowledged token ids of each job.
    """
    command = [sys.executable, "-m", "support.store_workload", str(folder), "--print"]
    program = subprocess.Popen(
        [*command, "--jobs", "20000", "--seed", str(seed)],  # too many to end before the kill
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    positions: dict[int, int] = {}
    with program:
        assert program.stdout is not None
        for index, line in enumerate(program.stdout):
            what, number, *more = line.split()
            positions[int(number)] = (
                int(more[0]) if what == "ids" else positions.get(int(number), 0)
            )
            if index == lines:
                program.send_signal(signal.SIGKILL)  # also read lines that are still in the pipe
    assert program.returncode == -signal.SIGKILL
    return positions


def test_a_kill_in_the_middle_of_commits_loses_nothing_acknowledged(tmp_path: Path) -> None:
    draw = random.Random(5)
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        positions = killed_workload(folder, draw.randint(1, 300), seed)
        opener = SqliteOpener(folder / "state", MAX_BYTES, reserve_bytes=1)
        with opener, opener.open() as store:
            assert store.database.execute("PRAGMA integrity_check") == [("ok",)]
            rows = store.database.execute("SELECT id, pos, state FROM job")
        stored = {int.from_bytes(id, "big"): (pos, state) for id, pos, state in rows}
        assert positions
        for number, pos in positions.items():
            assert stored[number][0] >= pos or stored[number][1] == "gone"
