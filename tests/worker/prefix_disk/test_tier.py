"""Tests the disk tier without a model: finding, sharing and deleting records, and disk faults."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxpool.worker.prefix_disk import folder, index, pacing, reading, writing
from mlxpool.worker.prefix_disk.folder import Locked, ModelFolder, SegmentFile, UnsafeFolder
from mlxpool.worker.prefix_disk.reading import Reading, Room, choose, require_chosen
from mlxpool.worker.prefix_disk.records import BadRecord, Kind, root_key
from mlxpool.worker.prefix_disk.segments import MAX_APPEND_REST, Place, Segment
from mlxpool.worker.prefix_disk.survey import remove, survey
from mlxpool.worker.prefix_disk.tier import DiskTier
from mlxpool.worker.prefix_disk.writing import NamedArray, NewRecord
from support.disk_records import (
    DIGEST,
    check_tokens,
    read_all,
    record_of,
    records_of,
    tier_at,
    wanted,
    write_all,
    write_until_killed,
)
from support.pool import PATIENCE, until

IDS = tuple(range(5, 905))  # three blocks and a part


def segments(path: Path) -> list[Path]:
    return sorted(path.rglob("*.seg"))


def stored(path: Path, records: Sequence[NewRecord], digest: bytes = DIGEST) -> None:
    with tier_at(path, digest=digest) as tier:
        write_all(tier, records)
        assert tier.counters.dropped == tier.counters.bad == 0


def found_end(path: Path, prompt: Sequence[int], **what: object) -> int:
    """Returns how many inputs of a prompt a newly opened tier finds in the folder's records."""
    with tier_at(path) as tier:
        return check_tokens(read_all(tier, wanted(prompt, **what)), prompt)  # type: ignore[arg-type]


def damage(tier: DiskTier, record: NewRecord, at: Callable[[Place], int]) -> None:
    """Flips a bit of a record that a tier has found."""
    place = tier.index.records.place(record.kind, record.key)
    assert place is not None
    data = bytearray(place.segment.path.read_bytes())
    data[at(place)] ^= 1
    place.segment.path.write_bytes(data)


# ---- found records -------------------------------------------------------------------------------


def test_another_worker_finds_what_was_written(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS))
    assert found_end(tmp_path, [*IDS, 1, 2]) == len(IDS)
    assert found_end(tmp_path, IDS) == len(IDS) - 1  # the last input is always computed
    assert found_end(tmp_path, [*IDS[:800], 1, 2]) == 800  # inside a record
    assert found_end(tmp_path, [*IDS[:700], *IDS]) == 700  # inside a whole block
    assert found_end(tmp_path, [1, *IDS]) == 0


def test_only_what_the_memory_lacks_is_read(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS))
    with tier_at(tmp_path) as tier:
        prompt = [*IDS, 1]
        records = read_all(tier, wanted(prompt, matched=600))
        assert [record.header.start for record in records] == [512, 768]
        assert read_all(tier, wanted(prompt, matched=850)) == []  # the gain is too small
        assert check_tokens(read_all(tier, wanted(prompt, most=300)), prompt) == 300


def test_a_gap_ends_what_is_found(tmp_path: Path) -> None:
    records = records_of(IDS)
    stored(tmp_path, [records[0], *records[2:]])
    assert found_end(tmp_path, [*IDS, 1]) == 256
    with tier_at(tmp_path) as tier:  # the memory has the block that the disk lacks
        assert check_tokens(read_all(tier, wanted([*IDS, 1], matched=512)), IDS, 512) == len(IDS)


def test_of_several_branches_the_longest_is_read(tmp_path: Path) -> None:
    branch, other = [*IDS[:600], *range(50)], [*IDS[:600], *range(100, 190)]
    stored(tmp_path, [*records_of(branch), *records_of(other)])
    assert found_end(tmp_path, [*branch, 1]) == len(branch)
    assert found_end(tmp_path, [*other, 1]) == len(other)
    assert found_end(tmp_path, [*IDS[:640], 1]) == 600


def test_scopes_share_nothing(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS, "alice"))
    prompt = [*IDS, 1]
    assert found_end(tmp_path, prompt, scope="alice") == len(IDS)
    assert found_end(tmp_path, prompt, scope="bob") == found_end(tmp_path, prompt) == 0


def test_another_digest_finds_nothing(tmp_path: Path) -> None:
    """Records of other weights, dtypes, layouts or versions are not used in any folder."""
    stored(tmp_path, records_of(IDS), digest=bytes(reversed(DIGEST)))
    (there,) = segments(tmp_path)
    assert found_end(tmp_path, [*IDS, 1]) == 0
    there.rename(ModelFolder(tmp_path, "m", 1).segments_of(DIGEST) / there.name)
    os.utime(next(iter(segments(tmp_path))), (1, 1))
    with tier_at(tmp_path) as tier:
        assert read_all(tier, wanted([*IDS, 1])) == []
        assert tier.counters.bad == 1


@pytest.mark.parametrize(
    ("states", "length", "end"),
    [
        ([900], 1000, 900),
        ([900], 900, 0),  # a row begins with one token less than the prompt
        ([850, 900], 900, 850),
        ([512], 1000, 512),
        ([512, 700], 1000, 700),
        ([300], 1000, 300),
        ([], 1000, 0),
    ],
)
def test_a_recurrent_model_gets_the_last_snapshot(
    tmp_path: Path, states: list[int], length: int, end: int
) -> None:
    stored(tmp_path, records_of(IDS, states=states))
    prompt = [*IDS, *range(100)][:length]
    with tier_at(tmp_path) as tier:
        records = read_all(tier, wanted(prompt, stateful=True))
    assert check_tokens(records, prompt) == end
    assert [record.header.end for record in records if record.header.kind is Kind.STATE] == (
        [end] if end else []
    )


def test_a_snapshot_inside_what_the_memory_has_is_read_alone(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS, states=[512, 700]))
    with tier_at(tmp_path) as tier:
        (state,) = read_all(tier, wanted(IDS, matched=800, restorable=512, stateful=True))
        assert (state.header.kind, state.header.end) == (Kind.STATE, 700)
        assert read_all(tier, wanted(IDS, matched=800, restorable=700, stateful=True)) == []


# ---- the folder ----------------------------------------------------------------------------------


def test_a_record_is_written_once(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS))
    with tier_at(tmp_path, records=4) as tier:
        write_all(tier, records_of(IDS))
        assert tier.counters.written_bytes == 0
    assert len(segments(tmp_path)) == 1


def test_two_workers_see_what_the_other_writes_and_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REFRESH_INTERVAL", 0.02)
    with tier_at(tmp_path) as tier, tier_at(tmp_path) as other:
        write_all(tier, records_of(IDS[:512]))
        until(lambda: len(other.index.records) == 2, "the records are found")
        write_all(other, records_of(IDS)[2:])
        until(lambda: len(tier.index.records) == 4, "the records are found")
        assert len(segments(tmp_path)) == 2
        prompt = [*IDS, 1]
        assert check_tokens(read_all(tier, wanted(prompt)), prompt) == len(IDS)
        for path in segments(tmp_path):
            path.unlink()
        until(
            lambda: not len(tier.index.records) and not len(other.index.records), "nothing is there"
        )
        write_all(tier, records_of(IDS))  # into a new segment, because the tier's own was deleted
        until(lambda: len(other.index.records) == 4, "the records are found")
        assert tier.counters.bad == other.counters.bad == 0


def test_the_budget_holds_and_the_least_recently_used_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SEGMENTS", 4)
    size = 64 * 1024
    each, budget = _large(0, size), 16 * (size + 8192)
    in_use = time.time() + 3600
    with tier_at(tmp_path, budget=budget) as tier:
        for number in range(40):
            write_all(tier, _large(number, size))
            assert sum(path.stat().st_size for path in segments(tmp_path)) <= budget
            # Marks the first segment as used last, by more than the resolution of a file's time.
            os.utime(segments(tmp_path)[0], (in_use, in_use))
        assert tier.counters.dropped == 0
        assert tier.counters.written_bytes > 40 * size
    with tier_at(tmp_path, budget=budget) as other:
        left = sum(path.stat().st_size for path in segments(tmp_path)) // size
        until(lambda: len(other.index.records) == left, "the records are found")
        assert other.index.has(Kind.TOKENS, each[0].key)
        assert not other.index.has(Kind.TOKENS, _large(8, size)[0].key)
        assert other.index.has(Kind.TOKENS, _large(39, size)[0].key)


def _large(number: int, size: int) -> list[NewRecord]:
    (record,) = record_of((number, 1), 0, root_key(""))
    array = NamedArray("0.0", "uint8", (np.zeros((1, 2, size // 2), np.uint8),))
    return [NewRecord(record.kind, 0, record.parent, record.key, record.ids, (array,))]


def test_segments_of_other_digests_count_and_go_first(tmp_path: Path) -> None:
    size, budget = 2**20, 4 * 2**20
    with tier_at(tmp_path, digest=bytes(32), budget=budget) as old:
        write_all(old, _large(0, size))
    os.utime(segments(tmp_path)[0], (1, 1))
    with tier_at(tmp_path, budget=budget) as new:
        for number in range(3):
            write_all(new, _large(number, size))
    assert len(list((tmp_path / "m").iterdir())) == 2  # the lock, and the folder of the new digest


def test_a_record_larger_than_the_budget_is_not_written(tmp_path: Path) -> None:
    with tier_at(tmp_path, budget=2**20) as tier:
        write_all(tier, _large(0, 2**20))
        assert tier.counters.dropped == 1 and segments(tmp_path) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("part", ["", "m"])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int, part: str) -> None:
    root = tmp_path / "root"
    model_folder = ModelFolder(root, "m", 1)
    model_folder.prepare(DIGEST)
    (root / part).chmod(mode)
    with pytest.raises(UnsafeFolder, match=rf"has the mode {mode:04o}.*chmod 700"):
        model_folder.prepare(DIGEST)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(UnsafeFolder, match="runs as 4711; name another folder with prefix_dir"):
        ModelFolder(tmp_path, "m", 1).prepare(DIGEST)


def test_names_of_models_are_folders(tmp_path: Path) -> None:
    for name in ("org/name", "a:b", "ümlaut", "%2F"):
        ModelFolder(tmp_path, name, 1).prepare(DIGEST)
    assert set(folder.models_in(tmp_path)) == {"org/name", "a:b", "ümlaut", "%2F"}
    assert all(path.parent == tmp_path for path in folder.models_in(tmp_path).values())


def test_folders_that_may_not_be_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, records_of(IDS))
    ModelFolder(tmp_path, "other", 1).prepare(DIGEST)
    ModelFolder(tmp_path, "m", 1).prepare(bytes(32))
    real, locked = os.scandir, {tmp_path / "other", tmp_path / "m" / bytes(16).hex()}

    def scandir(path: Path) -> object:
        if Path(path) in locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [(contents.model, contents.records) for contents in survey(tmp_path, verify=True)] == [
        ("m", 4)
    ]


# ---- faults of the disk --------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "ERROR_PAUSE", 0.0)
    records = records_of(IDS)
    with tier_at(tmp_path) as tier:
        write_all(tier, records[:1])
        with file_size_limit(segments(tmp_path)[0].stat().st_size + 500):
            write_all(tier, records[1:2])
        assert tier.counters.dropped == 1
        write_all(tier, records[2:])  # there is room again
        assert tier.counters.dropped == 1
    assert found_end(tmp_path, [*IDS, 1]) == 256
    with tier_at(tmp_path) as tier:
        write_all(tier, records)
    assert found_end(tmp_path, [*IDS, 1]) == len(IDS)


def test_writing_pauses_while_the_disk_is_full(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        with file_size_limit(100):
            write_all(tier, records_of(IDS))
        assert tier.counters.dropped == 4 and tier.counters.written_bytes == 0
        write_all(tier, records_of(IDS))  # no write is tried
        assert tier.counters.dropped == 8
    assert segments(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, records_of(IDS))
    real = os.open

    def read_only(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **named)

    with tier_at(tmp_path) as tier:
        monkeypatch.setattr(os, "open", read_only)
        prompt = [*IDS, 1]
        assert check_tokens(read_all(tier, wanted(prompt)), prompt) == len(IDS)
        write_all(tier, records_of((1, 2, 3)))
        assert tier.counters.dropped == 1
        monkeypatch.undo()


def test_a_bad_record_is_a_miss_and_is_written_again(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS))
    with tier_at(tmp_path, records=4) as tier:
        damage(tier, records_of(IDS)[1], lambda place: place.offset + place.header + 5)
        prompt = [*IDS, 1]
        assert check_tokens(read_all(tier, wanted(prompt)), prompt) == 256
        assert tier.counters.bad == 1
        write_all(tier, records_of(IDS))
        until(
            lambda: tier.index.records.place(Kind.TOKENS, records_of(IDS)[1].key),
            "it is there again",
        )
        assert check_tokens(read_all(tier, wanted(prompt)), prompt) == len(IDS)


def test_a_bad_snapshot_is_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    records = records_of(IDS, states=[512, 900])
    stored(tmp_path, records)
    with tier_at(tmp_path, records=len(records)) as tier:
        damage(tier, records[-1], lambda place: place.offset + place.header)
        restored = read_all(tier, wanted([*IDS, 1], stateful=True))
    states = [record.header.end for record in restored if record.header.kind is Kind.STATE]
    assert states == [512]


def test_a_segment_that_shrinks_while_it_is_read_is_a_miss(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS))
    with tier_at(tmp_path, records=4) as tier:
        os.truncate(segments(tmp_path)[0], 4000)
        assert read_all(tier, wanted([*IDS, 1])) == []
        assert tier.counters.bad == 2  # the part at the end, then the first block


def test_a_reading_that_nobody_wants_ends(tmp_path: Path) -> None:
    stored(tmp_path, records_of(tuple(range(256 * 40))))
    with tier_at(tmp_path, records=40) as tier:
        reading = tier.reader.begin(wanted(range(256 * 40)))
        tier.reader.room.limit = 1  # reads one record at a time
        until(lambda: reading.take() is not None, "a record comes")
        reading.end()
        until(lambda: reading.finished, "it ends")
        assert reading.take() is None
        assert tier.counters.read_bytes < 40 * 256 * 12


def test_a_worker_waits_for_the_lock_behind_many_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty workers hold the lock one after the other, each for the longest pause.

    The clock is simulated.
    """
    now, others, held = [0.0], 30, ModelFolder(tmp_path, "m", 1).locked()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds
            if now[0] > others * MAX_APPEND_REST:
                held.__exit__(None, None, None)

    ModelFolder(tmp_path, "m", 1).prepare(bytes(32))
    held.__enter__()
    monkeypatch.setattr(folder, "time", Clock)
    with ModelFolder(tmp_path, "m", 1).locked():
        assert now[0] > others * MAX_APPEND_REST


def test_a_lock_that_a_stopped_process_holds_costs_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LOCK_WAIT", 0.05)
    with tier_at(tmp_path) as tier:
        with ModelFolder(tmp_path, "m", 1).locked():
            write_all(tier, records_of((1, 2, 3)))
            with pytest.raises(Locked), ModelFolder(tmp_path, "m", 1).locked():
                pass
        assert tier.counters.dropped == 1
        write_all(tier, records_of(IDS))  # without a pause, because the disk itself works
        assert tier.counters.dropped == 1 and tier.counters.written_bytes > 0


def test_a_worker_writes_on_after_its_records_were_deleted(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        write_all(tier, records_of(IDS[:256]))
        assert remove(tmp_path, "m") > 0
        assert not ModelFolder(tmp_path, "m", 1).segments_of(DIGEST).exists()
        write_all(tier, records_of(IDS)[1:])
        assert tier.counters.dropped == 0 and len(segments(tmp_path)) == 1
        remove(tmp_path, "m")
    with tier_at(tmp_path) as tier:
        remove(tmp_path, "m")
        write_all(tier, records_of(IDS))  # the tier's first segment
        assert tier.counters.dropped == 0 and len(segments(tmp_path)) == 1


def test_a_folder_that_is_deleted_before_the_lock_is_taken_costs_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder disappears while the thread pauses before the lock. Only this record is lost.

    Later writes are not suspended, unlike after a full disk.
    """
    prepare = ModelFolder.prepare

    def prepare_and_lose(self: ModelFolder, digest: bytes) -> Path:
        path = prepare(self, digest)
        shutil.rmtree(self.path)
        return path

    with tier_at(tmp_path) as tier:
        with monkeypatch.context() as patched:
            patched.setattr(ModelFolder, "prepare", prepare_and_lose)
            write_all(tier, records_of((1, 2, 3)))
        assert tier.counters.dropped == 1
        write_all(tier, records_of(IDS))
        assert tier.counters.dropped == 1 and tier.counters.written_bytes > 0


def test_the_last_segment_of_a_digest_is_deleted_for_a_new_one(tmp_path: Path) -> None:
    size = 2**18
    with tier_at(tmp_path, budget=2 * size) as tier:
        for number in range(3):
            write_all(tier, _large(number, size))
        assert tier.counters.dropped == 0 and len(segments(tmp_path)) == 1


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading, "REFRESH_INTERVAL", 0.02)
    stored(tmp_path, records_of(IDS[:512]))
    for path in segments(tmp_path):
        os.utime(path, (1, 1))
    failed: list[str] = []
    real = ModelFolder.each

    def each(model_folder: ModelFolder) -> Iterator[SegmentFile]:
        if 1 <= len(failed) <= 3:
            failed.append("files")
            raise OSError(errno.EIO, "Input/output error")
        return real(model_folder)

    def segment(path: Path, digest: bytes) -> Segment:
        if not failed:
            failed.append("segment")
            raise OSError(errno.EMFILE, "Too many open files")
        return Segment(path, digest)

    monkeypatch.setattr(ModelFolder, "each", each)
    monkeypatch.setattr(index, "Segment", segment)
    with tier_at(tmp_path, records=2) as tier:
        assert failed == ["segment", "files", "files", "files"]
        assert check_tokens(read_all(tier, wanted([*IDS, 1])), IDS) == 512
        assert tier.counters.bad == 0
    assert len([record for record in caplog.records if "folder" in record.message]) == 1


def test_a_look_at_the_folder_rests_until_a_sequence_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of a folder pauses between records while sequences run.

    If a sequence waits for the scan, the scan reads the other records without pauses.
    """
    rested = threading.Event()

    def sleep(seconds: float) -> None:
        rested.set()
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic, thread_time=time.thread_time)
    monkeypatch.setattr(pacing, "time", clock)
    with tier_at(tmp_path) as tier:
        until(lambda: tier.reader.looked, "the folder is looked at")
        monkeypatch.setattr(pacing, "REST", 1e12)
        tier.state.busy = True
        stored(tmp_path, records_of(IDS))
        assert rested.wait(PATIENCE)
        rested.clear()
        assert rested.wait(PATIENCE), "it rests on"
        assert len(tier.index.records) < 4
        assert check_tokens(read_all(tier, wanted([*IDS, 1])), IDS) == len(IDS)


def test_a_record_that_is_written_during_a_look_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "REFRESH_INTERVAL", 0.02)
    (record,) = records_of(IDS[:256])
    real, listed, may_go_on, looks = ModelFolder.each, threading.Event(), threading.Event(), []

    def each(model_folder: ModelFolder) -> Iterator[SegmentFile]:
        if threading.current_thread().name != "prefix-reader":
            return real(model_folder)
        files = list(real(model_folder))
        looks.append(len(files))
        if len(looks) == 2:
            listed.set()
            may_go_on.wait()
        return iter(files)

    monkeypatch.setattr(ModelFolder, "each", each)
    with tier_at(tmp_path) as tier:
        assert listed.wait(PATIENCE)
        write_all(tier, [record])  # to a segment that the refresh has not seen
        monkeypatch.setattr(tier.index, "_open", lambda path: None)  # and that no refresh will open
        may_go_on.set()
        until(lambda: len(looks) > 2, "the look is over")
        assert looks[:2] == [0, 0] and tier.index.has(record.kind, record.key)


def test_an_unreadable_header_hides_no_other_record(tmp_path: Path) -> None:
    other = [*IDS[:600], *range(100, 190)]
    stored(tmp_path, [*records_of(IDS[:700]), *records_of(other)])
    with tier_at(tmp_path, records=4) as tier:
        damage(tier, records_of(other)[-1], lambda place: place.offset + 20)
        prompt = [*IDS[:700], 1]
        assert check_tokens(read_all(tier, wanted(prompt)), prompt) == 700
        assert tier.counters.bad == 1


def test_a_record_of_other_inputs_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS, states=[700]))
    with tier_at(tmp_path, records=6) as tier:
        (*blocks, state) = choose(
            wanted([*IDS[:700], 1], stateful=True), tier.index.records, _never
        )
        for choice in (blocks[1], state):
            header = choice.place.segment.header(choice.place)
            require_chosen(header, choice, IDS)
            for wrong in (
                replace(header, ids=bytes(len(header.ids))),
                replace(header, parent=bytes(32)),
                replace(header, start=header.start + 256),
                replace(header, key=bytes(32)),
            ):
                with pytest.raises(BadRecord):
                    require_chosen(wrong, choice, IDS)
            with pytest.raises(BadRecord, match="other inputs"):
                require_chosen(header, choice, [*IDS[:260], *IDS])


def _never(kind: Kind, key: bytes, error: Exception) -> None:
    raise AssertionError(error)


def test_the_bound_of_what_waits_is_that_of_all_readings(tmp_path: Path) -> None:
    stored(tmp_path, records_of(IDS[:512]))
    with tier_at(tmp_path) as tier:
        (record, _) = read_all(tier, wanted(IDS))
        room = Room(record.arrays.nbytes)
        first, second = (Reading(wanted(IDS), room) for _ in range(2))
        assert first.put(record) and not room.has(record.arrays.nbytes)
        waiting = threading.Thread(target=second.put, args=(record,))
        waiting.start()
        assert second.take() is None  # the record waits for room
        first.end()
        waiting.join()
        assert second.take() is record and room.used == 0


def test_the_compute_thread_frees_the_last_record(tmp_path: Path) -> None:
    (record,) = records_of((1, 2, 3))
    array = weakref.ref(record.arrays[0].parts[0])
    with tier_at(tmp_path) as tier:
        tier.writes.put(record)
        del record
        until(lambda: tier.writes.pending == 0, "it is written")
        assert array() is None


# ---- fuzz ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_damaged_folders_give_right_records_or_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With flips, cuts and moved bytes in two segments, a prompt gets its own records or a miss."""
    path, places = tmp_path_factory.mktemp("fuzz"), st.integers(0, 2**20)
    branch = [*IDS[:300], *range(2000, 2300)]
    stored(path, records_of(IDS, states=[300, 512, 900]))
    stored(path, records_of(branch, states=[600]))
    for file in segments(path):
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at, other = (data.draw(places) % len(content) for _ in range(2))
            kind = data.draw(st.sampled_from(["bit", "cut", "move", "zeros"]))
            if kind == "bit":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "cut":
                del content[at:]
            else:
                end = min(len(content), at + data.draw(st.integers(1, 2000)))
                moved = bytes(end - at) if kind == "zeros" else bytes(content[at:end])
                content[other : other + len(moved)] = moved
            if not content:
                break
        file.write_bytes(content)
    with tier_at(path) as tier:
        for prompt in ([*IDS, 1], [*branch, 1], [*IDS[:512], 7, 8]):
            for stateful in (False, True):
                records = read_all(tier, wanted(prompt, stateful=stateful))
                check_tokens(records, prompt)


# ---- kills ---------------------------------------------------------------------------------------


def _grew(path: Path, size: int) -> bool:
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in segments(path)) > size
    return False


def test_writers_that_are_killed_leave_right_records(tmp_path: Path) -> None:
    """Two writers at a time use one folder and are killed at any moment; records stay right."""
    context = multiprocessing.get_context("spawn")
    for number in range(3):
        pair = [
            context.Process(target=write_until_killed, args=(tmp_path, 2 * number + writer))
            for writer in range(2)
        ]
        for process in pair:
            process.start()
        size = sum(path.stat().st_size for path in segments(tmp_path))
        until(partial(_grew, tmp_path, size + 2**17), "they have written")
        for process in pair:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in pair:
            process.join()
    with tier_at(tmp_path) as tier:
        until(lambda: len(tier.index.records) > 20, "the records are found")
        ends = []
        for number in range(6):
            prompt = [*range(number * 1_000_000, number * 1_000_000 + 700), 1]
            ends.append(check_tokens(read_all(tier, wanted(prompt, stateful=True)), prompt))
        assert tier.counters.bad == 0  # torn records are at the end of a segment and do not count
        assert ends.count(700) >= 3  # at least one of each pair had written
