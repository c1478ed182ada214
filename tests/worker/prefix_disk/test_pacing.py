"""Tests the pauses of the thread that writes records, with a simulated clock."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prefix_disk import pacing
from mlxpool.worker.prefix_disk.pacing import (
    MIN_REST,
    PIECE,
    POLL,
    REST,
    SMALL_MIN_REST,
    SMALL_PIECE,
    Pace,
)
from mlxpool.worker.prefix_disk.records import (
    ALIGNMENT,
    Kind,
    block_key,
    checksum_of,
    decode_header,
    packed,
    pieces_of,
    places_of,
    root_key,
)
from mlxpool.worker.prefix_disk.segments import MAX_APPEND_REST, Bytes, Segment, SegmentWriter
from mlxpool.worker.prefix_disk.writing import NamedArray, NewRecord, areas, payload_of
from support.disk_records import ABOUT, DIGEST, encoded


class Clock:
    """A simulated clock: sleeping advances its time, `work` advances its processor time."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.sleeps: list[float] = []

    def work(self, seconds: float) -> None:
        self.used += seconds
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= POLL
        self.now += seconds
        self.sleeps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake_clock = Clock()
    monkeypatch.setattr(pacing, "time", fake_clock)
    yield fake_clock


def test_a_thread_rests_in_proportion_to_its_work(clock: Clock) -> None:
    pace = Pace(lambda: False)
    clock.work(5.0)
    pace.begin()  # earlier work does not count
    for _ in range(40):
        clock.work(0.001)
        pace.rest()
    assert clock.now == pytest.approx(5.0 + 40 * 0.001 * (1 + REST))
    asleep = len(clock.sleeps)
    clock.now += 100.0  # the thread waited for the disk
    pace.rest()
    assert len(clock.sleeps) == asleep


@pytest.mark.parametrize(("on_cores", "least"), [(True, SMALL_MIN_REST), (False, MIN_REST)])
def test_short_rests_are_taken_together(clock: Clock, on_cores: bool, least: float) -> None:
    pace = Pace(lambda: False, on_cores=on_cores)
    each = 0.4 * least / REST
    for _ in range(30):
        clock.work(each)
        pace.rest()
    assert clock.sleeps == pytest.approx([1.2 * least] * 10)


def test_pieces_are_small_while_steps_compute_on_the_same_cores() -> None:
    idle = [True]
    on_cores, beside = (Pace(lambda: idle[0], on_cores=on_cores) for on_cores in (True, False))
    sizes = []
    whole = memoryview(bytes(3 * PIECE))
    for piece in pieces_of(whole, lambda: on_cores.piece):
        sizes.append(len(piece))
        idle[0] = sum(sizes) < 2 * PIECE  # sequences begin to run
    assert sizes == [PIECE, PIECE] + [SMALL_PIECE] * (PIECE // SMALL_PIECE)
    assert beside.piece == PIECE > on_cores.piece


def test_a_rest_has_a_bound_and_the_next_one_does_the_rest_of_it(clock: Clock) -> None:
    pace = Pace(lambda: False)
    clock.work(0.001)
    pace.rest(0.004)
    assert sum(clock.sleeps) == pytest.approx(0.004)
    pace.rest()
    assert sum(clock.sleeps) == pytest.approx(0.001 * REST)


def test_a_rest_ends_when_nothing_runs_any_more(clock: Clock) -> None:
    pace = Pace(lambda: clock.now > 1.0)
    clock.work(0.5)
    pace.rest()
    assert 1.0 < clock.now <= 1.0 + 2 * POLL
    clock.work(0.5)
    asleep = len(clock.sleeps)
    pace.rest()
    assert len(clock.sleeps) == asleep


def record() -> NewRecord:
    """A record of some 100 kB; two of its three arrays are given in several parts."""
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 9, (3, n, 40), np.uint16) for n in (5, 90, 105)]
    arrays = (
        NamedArray("0.0", "bfloat16", tuple(parts)),
        NamedArray("0.1", "uint8", (rng.integers(0, 9, (2, 200, 1), np.uint8),)),
        NamedArray("1.0", "uint16", tuple(parts[::-1])),
    )
    ids, root = tuple(range(200)), root_key("")
    return NewRecord(Kind.TOKENS, 0, root, block_key(root, packed(ids)), ids, arrays)


class Copied(Pace):
    """A Pace that counts how many bytes of a buffer change between two pauses.

    A byte is counted as changed if it is not 255, the initial value of all bytes.
    """

    def __init__(self, buffer: Bytes) -> None:
        super().__init__(lambda: False)
        self._buffer, self._seen = buffer, 0
        self.bytes: list[int] = []

    def rest(self, most: float = math.inf) -> float:
        seen = int((self._buffer != 255).sum())
        self.bytes.append(seen - self._seen)
        self._seen = seen
        return 0.0


@given(st.lists(st.integers(1, 9), max_size=4), st.sampled_from([1, 2, 8]), st.integers(1, 2000))
def test_areas_have_each_item_once_and_a_bounded_size(
    shape: list[int], item: int, most: int
) -> None:
    touched = np.zeros(shape, np.int8)
    for area in areas(shape, item, most):
        assert touched[area].size * item <= max(most, item)
        touched[area] += 1
    assert (touched == 1).all()


@pytest.mark.parametrize("piece", [4096, 256])
def test_a_record_is_written_in_pieces_and_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, piece: int
) -> None:
    """Each copy, check and write handles at most `piece` bytes, however large the record is.

    All pauses between the pieces together last MAX_APPEND_REST, the longest time allowed.
    """
    monkeypatch.setattr(pacing, "SMALL_PIECE", piece)
    new, pace = record(), Pace(lambda: False)
    places = places_of([(array.name, array.dtype, array.shape) for array in new.arrays])
    whole = payload_of(new, places)
    dirty = np.full(whole.size, 255, np.uint8)
    copied = Copied(dirty)
    assert payload_of(new, places, dirty, copied) is dirty and np.array_equal(dirty, whole)
    # A copy has the bytes of the arrays, and of the padding between them.
    assert 0.9 * piece < max(copied.bytes) <= piece + 2 * ALIGNMENT and len(copied.bytes) > 20
    checked = list(pieces_of(whole.data, lambda: pace.piece))
    assert max(map(len, checked)) == piece
    header, _ = encoded(new)
    assert checksum_of(DIGEST, pace.between(checked)) == decode_header(DIGEST, header).checksum
    pwritev, sizes = os.pwritev, []

    def slow(descriptor: int, parts: list[memoryview], at: int) -> int:
        sizes.append(sum(map(len, parts)))
        clock.work(1.0)
        return pwritev(descriptor, [parts[0][:3000]], at)

    payloads = []
    for paced in (None, pace):
        writer = SegmentWriter(tmp_path, DIGEST, ABOUT)
        if paced is not None:
            monkeypatch.setattr(os, "pwritev", slow)
        began, before = clock.now, clock.used
        writer.append(header, whole.data, paced)
        rested = clock.now - began - (clock.used - before)
        writer.close()
        monkeypatch.setattr(os, "pwritev", pwritev)
        segment = Segment(writer.path, DIGEST)
        ((_, place),) = segment.scan()
        payloads.append(segment.read(place)[1].tobytes())
        segment.close()
    assert payloads[0] == payloads[1] == whole.tobytes()
    assert max(sizes) == piece and len(sizes) > 20
    # Other processes wait for the folder meanwhile, so the pauses are bounded.
    assert 0.9 * MAX_APPEND_REST < rested < 1.001 * MAX_APPEND_REST
