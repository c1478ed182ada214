"""The disk tier of one worker: a thread that reads records, and one that writes them.

The compute thread asks for records and gives some away; it never waits for the disk. Whatever the
disk does, a request gets its tokens: what cannot be read is a miss, what cannot be written is lost.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.closing import Closing
from mlxpool.worker.prefix_disk import records
from mlxpool.worker.prefix_disk.contents import NewRecord, payload_of
from mlxpool.worker.prefix_disk.folder import UNWRITTEN, Locked, ModelFolder
from mlxpool.worker.prefix_disk.index import Index
from mlxpool.worker.prefix_disk.keys import packed
from mlxpool.worker.prefix_disk.pacing import Pace
from mlxpool.worker.prefix_disk.readings import (
    Choice,
    Reading,
    ReadRecord,
    Room,
    Wanted,
    choose,
    require_chosen,
)
from mlxpool.worker.prefix_disk.records import (
    BadRecord,
    Kind,
    checksum_of,
    payload_bytes,
    pieces_of,
    places_of,
)
from mlxpool.worker.prefix_disk.segments import MAX_APPEND_REST, Bytes, Segment, SegmentWriter

log = logging.getLogger("mlxpool.worker")

REFRESH_INTERVAL = 1.0  # seconds between two looks at what other workers wrote and deleted
SEGMENTS = 8  # of the budget; the least recently used is deleted whole
ERROR_PAUSE = 30.0  # seconds without writing after the disk was full or failed
NEW_SECONDS = 5.0  # after its last change a segment without a header is no new one

Fault = tuple[type[OSError], int | None]  # a kind of error, which is logged once

UNREAD = "a segment of the prefix cache cannot be read now"

# Errors that say nothing about the file: it is opened again later.
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR})


class TierCounters(Struct):
    """What the tier did since the start; all but `dropped` are each written by one thread."""

    hits: int = 0  # sequences that got tokens from the disk
    tokens: int = 0  # that they got
    read_bytes: int = 0
    written_bytes: int = 0
    bad: int = 0  # records that did not check, or could not be read
    dropped: int = 0  # records that were not written: the disk was full, failed or too slow
    bytes: int = 0  # of all segments of the model


class DiskTier(Closing):
    """The records of one model in a folder that workers share.

    `digest` covers all that decides what a record's arrays are. `about` says it in words. `room`:
    bytes of records that wait to be taken or written, each. `on_cores`: whether steps compute on
    the cores that the threads use. `wake` is called by the reading thread when the compute thread
    has something to do.
    """

    def __init__(
        self,
        folder: ModelFolder,
        digest: bytes,
        about: Mapping[str, Any],
        *,
        budget: int,
        room: int,
        on_cores: bool,
        wake: Callable[[], None],
    ) -> None:
        self._folder, self._digest, self._about = folder, digest, about
        self.unread = Room(room)  # of records that wait to be taken
        self._budget, self._room, self._wake = budget, room, wake
        self._path: Path = folder.segments_of(digest)
        self.counters = TierCounters()
        self._count = threading.Lock()  # of `counters.dropped`
        self.busy = False  # whether sequences run: then writes are spread over time
        self.index = Index()
        self._segments: dict[str, Segment | None] = {}  # by file name; None: of no use
        self._refreshed = 0.0
        self.looked = False  # whether the index has what was there at the start
        self._progress = 0.0  # when the reading thread did something last, monotonic seconds
        self._reads = False  # whether it reads for a sequence
        self._awaits_room = False  # whether it waits for the compute thread
        self._readings: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        # Each in a list, out of which the compute thread takes it, so that this thread frees it.
        self._writes: queue.SimpleQueue[list[NewRecord] | None] = queue.SimpleQueue()
        self._pending = 0  # records that were given to `write` and not given back
        self._pending_bytes = 0
        self._written: deque[list[NewRecord]] = deque()
        self._writer: SegmentWriter | None = None
        self._pace = Pace(self._writes_at_once, on_cores=on_cores)
        self._look_pace = Pace(self._looks_at_once, on_cores=on_cores)
        self._buffer: Bytes | None = None  # for the arrays of records, while they come
        self._paused_until = 0.0
        self._read_fault: Fault | None = None  # of the newest look at the folder
        self._segment_fault: Fault | None = None  # of the newest segment that could not be read
        self._fault: Fault | None = None  # of the newest write that failed
        # Records of this worker that the index may not have yet, and their segments.
        self._unseen: dict[tuple[Kind, bytes], Path] = {}
        self._threads = [
            threading.Thread(target=self._read_all, name="prefix-reader", daemon=True),
            threading.Thread(target=self._write_all, name="prefix-writer", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads; the first thing that they do is to find what is there."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads when they have done what they do now."""
        self._closing.set()
        self._readings.put(None)
        self._writes.put(None)

    def join(self) -> None:
        """Waits for the end of the threads, after `close`."""
        for thread in self._threads:
            thread.join()
        for segment in self._segments.values():
            if segment is not None:
                segment.close()

    # ---- the compute thread ----------------------------------------------------------------------

    def has(self, kind: Kind, key: bytes) -> bool:
        """Whether there is a record of a kind and key."""
        return self.index.has(kind, key) or (kind, key) in self._unseen

    def begin(self, wanted: Wanted) -> Reading:
        """Begins to read what the disk has for a sequence."""
        reading = Reading(wanted, self.unread)
        self._readings.put(reading)
        return reading

    @property
    def last_progress(self) -> float:
        """When the disk answered last, monotonic seconds: now, while it is not the one to answer.

        What other sequences read counts as well.
        """
        return monotonic() if self._awaits_room else self._progress

    def write(self, record: NewRecord) -> None:
        """Gives a record away; `free` gives it back. The arrays must not change until then."""
        self._pending += 1
        self._pending_bytes += record.nbytes
        self._writes.put([record])

    def free(self) -> None:
        """Drops the records that were written: the thread that uses MLX frees its arrays."""
        while self._written:
            record = self._written.popleft().pop()
            self._pending -= 1
            self._pending_bytes -= record.nbytes

    def takes(self, size: int) -> bool:
        """Whether another record of so many bytes may be given away now."""
        self.free()
        return not self._pending or self._pending_bytes + size <= self._room

    @property
    def pending(self) -> int:
        """Records that were given to `write` and are not written yet."""
        self.free()
        return self._pending

    def count_dropped(self) -> None:
        """Counts a record that is not written; any thread may call it."""
        with self._count:
            self.counters.dropped += 1

    # ---- the thread that reads -------------------------------------------------------------------

    def _looks_at_once(self) -> bool:
        """Whether a look at the folder has no rests: nothing runs, or a sequence waits for it."""
        return self._writes_at_once() or self._reads or not self._readings.empty()

    def _read_all(self) -> None:
        try:
            self._refresh(monotonic())
            self.looked = True
            while not self._closing.is_set():
                try:
                    reading = self._readings.get(timeout=REFRESH_INTERVAL)
                except queue.Empty:
                    self._refresh(monotonic())
                    continue
                if reading is not None:
                    self._read(reading)
        except Exception:
            log.exception("the disk tier of the prefix cache stops reading")
            self.index, self.looked = Index(), True  # nothing is there, so nobody begins a reading
            self._end_readings()

    def _end_readings(self) -> None:
        while not self._closing.is_set():
            reading = self._readings.get()
            if reading is not None:
                reading.finish()
                self._wake()

    def _read(self, reading: Reading) -> None:
        wanted: Wanted | None = reading.wanted
        self._reads = True
        try:
            if not reading.ended:
                self._refresh(monotonic())
                while wanted is not None:
                    wanted = self._read_chosen(reading, wanted)
        finally:
            self._reads = False
            reading.finish()
            self._wake()

    def _read_chosen(self, reading: Reading, wanted: Wanted) -> Wanted | None:
        """Reads the best records for a sequence.

        Returns what is still wanted after one that did not check, where others may do; else None.
        """
        choices = choose(wanted, self.index, self._discard)
        for choice in choices:
            try:
                record = self._read_one(choice, wanted.ids)
            except (BadRecord, OSError) as error:
                self._discard(choice.kind, choice.key, error)
                return wanted if wanted.stateful else None
            self._progress, self._awaits_room = monotonic(), True
            taken = reading.put(record)
            self._progress, self._awaits_room = monotonic(), False
            if not taken:
                return None
            self._wake()
            if choice.kind is Kind.TOKENS:
                wanted = replace(wanted, matched=max(wanted.matched, choice.end))
        return None

    def _discard(self, kind: Kind, key: bytes, error: Exception) -> None:
        self.counters.bad += 1
        self.index.discard(kind, key)
        log.warning("a record of the prefix cache is bad", extra={"why": str(error)})

    def _read_one(self, choice: Choice, ids: Sequence[int]) -> ReadRecord:
        segment = choice.place.segment
        header, arrays = segment.read(choice.place)
        require_chosen(header, choice, ids)
        segment.note_use(monotonic())
        self.counters.read_bytes += arrays.nbytes
        return ReadRecord(header, arrays, choice.end)

    def _refresh(self, now: float) -> None:
        """Finds the segments and records that were added, and forgets those that were deleted.

        Where the folder cannot be read, what is known stays, until the next time. While sequences
        run and none waits for it, the thread rests between files and between records.
        """
        if now - self._refreshed < REFRESH_INTERVAL / 10 and self._segments:
            return
        self._refreshed, pace = now, self._look_pace
        pace.begin()
        unseen = list(self._unseen.items())  # before the look, which takes a while
        try:
            files = list(pace.between(self._folder.each()))
        except OSError as error:
            text = "the folder of the prefix cache cannot be read"
            self._read_fault = _logged(error, self._read_fault, text)
            return
        self._read_fault = None
        there = {one.path.name: one.path for one in files if one.path.parent == self._path}
        for name in self._segments.keys() - there.keys():
            segment = self._segments.pop(name)
            if segment is not None:
                self.index.remove(segment)
                segment.close()
        for name in sorted(there):
            if name not in self._segments:
                self._open(there[name])
            segment = self._segments.get(name)
            if segment is not None:
                self._scan(segment)
            pace.rest()
        for (kind, key), path in unseen:
            if self.index.has(kind, key) or path.name not in there:
                self._unseen.pop((kind, key), None)
        self.counters.bytes = sum(one.size for one in files)

    def _open(self, path: Path) -> None:
        try:
            self._segments[path.name] = Segment(path, self._digest)
        except FileNotFoundError:
            pass  # deleted meanwhile
        except (BadRecord, OSError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                self._segment_fault = _logged(error, self._segment_fault, UNREAD)
            elif not _is_new(path):  # else its writer may be writing its header
                self._segments[path.name] = None
                self.counters.bad += 1
                log.warning("a segment of the prefix cache is bad", extra={"why": str(error)})

    def _scan(self, segment: Segment) -> None:
        try:
            for header, place in self._look_pace.between(segment.scan()):
                self.index.add(header, place)
            self._progress = monotonic()
        except OSError as error:  # the next look tries it again
            self._segment_fault = _logged(error, self._segment_fault, UNREAD)
        if segment.broken and not segment.reported:
            segment.reported = True
            self.counters.bad += 1

    # ---- the thread that writes ------------------------------------------------------------------

    def _writes_at_once(self) -> bool:
        """Whether the writing thread does not rest: nothing runs, or the tier ends."""
        return not self.busy or self._closing.is_set()

    def _write_all(self) -> None:
        while (holder := self._writes.get()) is not None:
            self._pace.begin()
            self._write_unless_there(holder[0], monotonic())
            self._written.append(holder)
            self._wake()
            self._pace.rest()
            if self._writes.empty():
                self._buffer = None
        if self._writer is not None:
            self._writer.close()

    def _write_unless_there(self, record: NewRecord, now: float) -> None:
        try:
            if not self.has(record.kind, record.key):  # another worker may have been here
                self._write(record, now)
        except Exception:
            self.count_dropped()
            log.exception("a record of the prefix cache could not be written")

    def _write(self, record: NewRecord, now: float) -> None:
        if now < self._paused_until:
            self.count_dropped()
            return
        places = places_of([(one.name, one.dtype, one.shape) for one in record.arrays])
        size = payload_bytes(places)
        if self._buffer is None or self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.uint8)
        payload = payload_of(record, places, self._buffer[:size], self._pace).data
        pieces = self._pace.between(pieces_of(payload, lambda: self._pace.piece))
        header = records.encode_header(
            self._digest,
            record.kind,
            record.start,
            record.parent,
            packed(record.ids),
            places,
            checksum_of(self._digest, pieces),
        )
        size = len(header) + len(payload) + records.ALIGNMENT
        self._pace.rest()
        try:
            self._folder.prepare(self._digest)  # `mlxpool prefix rm` may have deleted it
            self._pace.rest()
            with self._folder.locked():
                path = self._append(header, payload, size)
        except (Locked, FileNotFoundError):
            # Others write, or have deleted the folder since it was made: the disk is in order.
            self.count_dropped()
            return
        except OSError as error:
            self._paused_until = now + ERROR_PAUSE
            self.count_dropped()
            self._fault = _logged(error, self._fault, UNWRITTEN, self._folder.advice)
            return
        self._fault = None
        self._unseen[record.kind, record.key] = path
        self.counters.written_bytes += size

    def _append(self, header: bytes, payload: memoryview, size: int) -> Path:
        """Appends a record to the segment of this worker, or to a new one, and returns its path.

        Raises OSError.
        """
        writer = self._writer
        if writer is not None and (
            writer.size + size > max(size, self._budget // SEGMENTS) or not writer.linked
        ):
            writer.close()
            writer = self._writer = None
        spare = None if writer is None else writer.path
        if not self._folder.make_room(size + records.MAX_SEGMENT_HEADER, spare):
            raise OSError(
                f"a record of {size} bytes does not fit into prefix_disk, {self._budget} bytes"
            )
        self._pace.rest(MAX_APPEND_REST / 10)
        if writer is None:
            self._folder.prepare(self._digest)  # of which `make_room` deletes the last segment
            writer = self._writer = SegmentWriter(self._path, self._digest, self._about)
        try:
            writer.append(header, payload, self._pace)
        except OSError:
            writer.close()
            self._writer = None
            raise
        return writer.path


def _logged(error: OSError, last: Fault | None, message: str, advice: str = "") -> Fault:
    """Logs an error unless it is of the kind of the last one; returns its kind."""
    fault = type(error), error.errno
    if fault != last:
        log.warning(message, extra={"why": str(error), **({"do": advice} if advice else {})})
    return fault


def _is_new(path: Path) -> bool:
    """Whether a file was written in the last seconds."""
    try:
        return time.time() - path.stat().st_mtime < NEW_SECONDS
    except OSError:
        return True
