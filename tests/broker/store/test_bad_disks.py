"""Full, slow and failing disks under a store in a separate process (support/disk_shim.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxpool.broker.store.operations import ReadJob
from mlxpool.broker.store.records import JobState
from mlxpool.broker.store.sqlite_store import SqliteOpener
from support.disk_shim import NO_BOUND, ShimmedProcess
from support.job_store import MAX_BYTES, job_id
from support.pool import until

Console = Callable[..., ShimmedProcess]


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    """Returns a function that starts support/store_console.py on a disk in the test's folder."""
    started: list[ShimmedProcess] = []

    def start(*flags: str) -> ShimmedProcess:
        started.append(ShimmedProcess("store_console", tmp_path / "disk", *flags))
        assert started[-1].ask("health") == "ok 0"
        return started[-1]

    yield start
    for process in started:
        process.close()


def perform(program: ShimmedProcess, command: str) -> str:
    """Offers an operation and waits for its result."""
    assert program.ask(command) == "offered"
    return program.ask("result")


def stored(folder: Path, *numbers: int) -> list[tuple[JobState, int]]:
    """Returns the state and position of jobs, as the next broker reads them."""
    opener = SqliteOpener(folder / "disk" / "state", MAX_BYTES, reserve_bytes=1)
    with opener, opener.open() as store:
        store.begin(8, store.wall_seen)
        results = store.transaction(
            [ReadJob(job_id(number)) for number in numbers], store.wall_seen
        )
    return [(each.job.state, each.job.pos) for each in results]  # type: ignore[attr-defined]


# ---- a full disk ---------------------------------------------------------------------------------


def test_a_full_disk_refuses_new_jobs_and_loses_nothing(tmp_path: Path, console: Console) -> None:
    program = console("--reserve", "1000000")
    for number in (1, 2, 3):
        assert perform(program, f"submit {number}") == "Submit Submitted"
    assert perform(program, "progress 1 0 4") == "Progress Durable 4"
    assert perform(program, "finish 3") == "Finish Changed"

    program.leave(0)
    assert "reserve" in program.ask("sizes")
    assert perform(program, "submit 4 100000") == "Submit store_full"
    assert "reserve" not in program.ask("sizes")  # the reserve's bytes are for running jobs
    assert perform(program, "progress 1 4 4") == "Progress Durable 8"
    assert perform(program, "release 3") == "Release Changed"

    program.leave(0)
    for command in ("progress 1 8 4000", "progress 1 4008 4", "progress 2 0 4"):
        assert program.ask(command) == "offered"
    until(lambda: program.ask("health") == "full 3", "output waits for room")
    assert perform(program, "submit 5 100000") == "Submit store_full"
    assert perform(program, "read 1") == "ReadJob Found"  # reading goes on

    program.leave(NO_BOUND)
    results = [program.ask("result") for _ in range(3)]
    assert results == ["Progress Durable 4008", "Progress Durable 4012", "Progress Durable 4"]
    assert perform(program, "submit 4 100000") == "Submit Submitted"
    assert program.ask("health") == "ok 0"
    program.kill()
    assert stored(tmp_path, 1, 2, 3, 4) == [
        (JobState.WAITING, 4012),
        (JobState.WAITING, 4),
        (JobState.GONE, 0),
        (JobState.WAITING, 0),
    ]


def test_a_broker_that_ends_on_a_full_disk_keeps_what_was_told(
    tmp_path: Path, console: Console
) -> None:
    program = console()
    assert perform(program, "submit 1") == "Submit Submitted"
    program.leave(0)
    assert program.ask("progress 1 0 4000") == "offered"
    until(lambda: program.ask("health") == "full 1", "output waits for room")
    assert program.process.stdin is not None
    program.process.stdin.close()
    assert program.wait() == 0
    assert stored(tmp_path, 1) == [(JobState.WAITING, 0)]


def test_a_broker_starts_on_a_full_disk_in_the_room_of_the_reserve(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with ShimmedProcess("store_console", disk, "--reserve", "1000000") as program:
        assert perform(program, "submit 1") == "Submit Submitted"
    with ShimmedProcess("store_console", disk, "--reserve", "1000000", room=0) as program:
        assert perform(program, "progress 1 0 4") == "Progress Durable 4"
        assert "reserve" not in program.ask("sizes")
    with ShimmedProcess("store_console", disk, "--reserve", "1000000", room=0) as program:
        refusal = program.line()
        assert refusal.startswith("unusable: ") and "disk is full" in refusal
        assert program.wait() == 1
    assert stored(tmp_path, 1) == [(JobState.WAITING, 4)]


# ---- a disk that stalls --------------------------------------------------------------------------


def test_a_stalled_disk_fills_the_inbox_and_holds_up_nobody(
    tmp_path: Path, console: Console
) -> None:
    program = console("--operations", "20")
    assert perform(program, "submit 1") == "Submit Submitted"
    program.stall(True)
    assert program.ask("submit 2") == "offered"
    program.until_stalled()
    answers = [program.ask(f"submit {number}") for number in range(3, 30)]
    assert answers.count("offered") == 9  # with submission 2, half of the inbox
    assert set(answers) == {"offered", "store_busy"}
    answers = [program.ask(f"progress 1 {pos} 4") for pos in range(0, 80, 4)]
    assert answers == ["offered"] * 10 + ["store_busy"] * 10
    assert program.ask("health") == "ok 20"
    program.stall(False)
    results = [program.ask("result") for _ in range(20)]
    assert results == ["Submit Submitted"] * 10 + [
        f"Progress Durable {pos + 4}" for pos in range(0, 40, 4)
    ]
    assert perform(program, "submit 20") == "Submit Submitted"


# ---- a disk that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 6])
def test_a_failed_sync_acknowledges_nothing_and_the_store_is_made_anew(
    tmp_path: Path, console: Console, failures: int
) -> None:
    program = console()
    assert perform(program, "submit 1") == "Submit Submitted"
    assert perform(program, "progress 1 0 4") == "Progress Durable 4"
    program.fail_syncs(failures)
    assert perform(program, "submit 2") == "Submit store_closed"
    until(lambda: program.ask("health") == "ok 0", "the store is open again")
    assert perform(program, "submit 2") == "Submit Submitted"
    assert perform(program, "progress 1 4 4") == "Progress Durable 8"
    names = program.ask("sizes").split()
    assert [name for name in names if name.endswith(".db")] == ["jobs-2.db"]
    program.kill()
    assert stored(tmp_path, 1, 2) == [(JobState.WAITING, 8), (JobState.WAITING, 0)]
