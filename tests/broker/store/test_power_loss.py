"""After a loss of power the store opens, and has every acknowledged job and id.

The disk images are made from a log of all writes, truncations, syncs and renames
(support/disk_log.py). So they lack unsynced data, which copies of the live files would have.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxpool.broker.store import state_dir
from mlxpool.broker.store.operations import ExportJobs
from mlxpool.broker.store.records import Export, JobState, StoreError
from mlxpool.broker.store.sqlite_store import LOG_HEAD, SqliteOpener
from mlxpool.common.protocol.token_ids import unpack_ids
from support.disk_log import Disk, Record, read_log
from support.disk_shim import ShimmedProcess
from support.job_store import BOOT, MAX_BYTES, job_id, token


@dataclass(slots=True)
class Acknowledged:
    """The data that the store has acknowledged: the jobs, their durable ids and their ends."""

    ids: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[JobState, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def note(self, mark: str) -> None:
        what, number, *more = mark.split()
        if what == "job":
            self.ids[int(number)] = 0
        elif what == "ids":
            self.ids[int(number)] = int(more[0])
        elif what == "gone":
            self.gone.add(int(number))
        else:
            self.ends[int(number)] = JobState(more[0]), int(more[1])


def losses(state: Path, told: Acknowledged) -> list[str]:
    """Opens a disk image as a store; returns its faults, and acknowledged data that it lacks."""
    try:
        with SqliteOpener(state, MAX_BYTES, reserve_bytes=1) as opener, opener.open() as store:
            store.begin(BOOT + 1, store.wall_seen)
            bad = store.database.execute("PRAGMA integrity_check")
            if bad != [("ok",)]:
                return [f"integrity: {bad[:3]}"]
            everything = ExportJobs(count=100_000, max_bytes=1 << 40, states=tuple(JobState))
            (export,) = store.transaction([everything], store.wall_seen)
    except StoreError as error:
        return [f"it does not open: {error}"]
    assert isinstance(export, Export)
    return compare(export, told)


def compare(export: Export, told: Acknowledged) -> list[str]:
    stored = {each.job.id: each for each in export.jobs}
    messages = []
    for number, count in told.ids.items():
        each = stored.get(job_id(number))
        if each is None:
            messages.append(f"job {number} is missing")
            continue
        job = each.job
        if job.state is JobState.GONE:
            continue
        ids = [token_id for chunk in each.chunks for token_id in unpack_ids(chunk.ids)]
        if ids[:count] != [token(number, pos) for pos in range(count)]:
            messages.append(f"job {number} has {len(ids)} ids of {count}")
        if number in told.ends and (job.state, job.end_seq) != told.ends[number]:
            messages.append(f"job {number} is {job.state} {job.end_seq}, not {told.ends[number]}")
        if number in told.gone:
            messages.append(f"job {number} is there, though it is gone")
        if len(each.blobs) != 2 or each.request != b"request %d" % number:
            messages.append(f"job {number} has another request")
    return messages


def run_workload(folder: Path, *flags: str) -> list[Record]:
    log = folder / "log"
    with ShimmedProcess("store_workload", folder / "disk", *flags, log=log) as program:
        assert program.wait() == 0
    return read_log(log)


def lost_in_images(
    folder: Path, records: list[Record], images: int, seed: int
) -> tuple[int, list[str]]:
    """Makes disk images by cutting the log at random places.

    Returns the number of images in which acknowledged data is lost, and the losses."""
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(1, len(records) + 1) for _ in range(images))
    disk, acknowledged = Disk(str((folder / "disk").resolve())), Acknowledged()
    bad, what, at = 0, [], 0
    for cut in cuts:
        for record in records[at:cut]:
            disk.play(record)
            if record.what == "M":
                acknowledged.note(record.data.decode())
        at = cut
        target = folder / "image"
        disk.image(target, draw)
        lost = losses(target / "state", acknowledged)
        bad += bool(lost)
        what += lost
        shutil.rmtree(target)
    return bad, what


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns off syncs of the state folder, because a disk image is only read."""
    monkeypatch.setattr(state_dir, "sync", lambda path: None)


@pytest.mark.usefixtures("unsynced")
def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    records = run_workload(tmp_path, "--jobs", "60")
    kinds = {record.what for record in records}
    assert kinds >= {"K", "O", "W", "S", "D", "M"}
    heads = [record for record in records if record.what == "W" and len(record.data) == LOG_HEAD]
    assert len(heads) > 3  # how often the log was begun again, after its copy into the database
    assert lost_in_images(tmp_path, records, images=60, seed=1) == (0, [])


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("mutant", ["normal", "off", "early", "parent"])
def test_a_store_that_breaks_a_rule_is_caught(tmp_path: Path, mutant: str) -> None:
    records = run_workload(tmp_path, "--jobs", "30", "--mutant", mutant)
    # The points of the power cuts, and the log's content at these points, vary between runs: some
    # images have lost data, others have not.
    outcomes = (lost_in_images(tmp_path, records, images=12, seed=seed) for seed in range(1, 9))
    assert any(bad and what for bad, what in outcomes)


@pytest.mark.long
@pytest.mark.usefixtures("unsynced")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_nothing_acknowledged_is_lost_in_many_images(tmp_path: Path, seed: int) -> None:
    records = run_workload(tmp_path, "--jobs", "300", "--seed", str(seed))
    assert lost_in_images(tmp_path, records, images=400, seed=seed) == (0, [])
