"""Writes records to the disk: encodes new records, and appends them in a separate thread.

The compute thread enqueues records and frees written records; it never waits for the disk.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from msgspec import Struct

from mlxpool.worker.prefix_disk import records
from mlxpool.worker.prefix_disk.folder import UNWRITTEN, Locked
from mlxpool.worker.prefix_disk.index import FolderIndex
from mlxpool.worker.prefix_disk.pacing import PIECE, Pace
from mlxpool.worker.prefix_disk.records import (
    ArrayPlace,
    Kind,
    checksum_of,
    packed,
    payload_bytes,
    pieces_of,
    places_of,
)
from mlxpool.worker.prefix_disk.segments import MAX_APPEND_REST, Bytes, SegmentWriter
from mlxpool.worker.prefix_disk.state import RepeatedError, TierState

log = logging.getLogger("mlxpool.worker")

SEGMENTS = 8  # segments that fit into the budget; the least recently used segment is deleted whole
ERROR_PAUSE = 30.0  # seconds without writes after the disk was full or failed


class NamedArray(Struct, frozen=True):
    """An array of a record, in parts that are joined along `axis`.

    `dtype` is MLX's name. Items of bfloat16 are uint16 here, because NumPy lacks bfloat16.
    """

    name: str
    dtype: str
    parts: tuple[np.ndarray[Any, Any], ...]
    axis: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all parts together."""
        shape = list(self.parts[0].shape)
        if shape:
            shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)


class NewRecord(Struct, frozen=True):
    """A record to write: the cached contents of the inputs `ids`.

    `start`: the index of the first of these inputs in its sequence.
    """

    kind: Kind
    start: int
    parent: bytes
    key: bytes
    ids: tuple[int, ...]
    arrays: tuple[NamedArray, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the record's arrays."""
        return sum(part.nbytes for array in self.arrays for part in array.parts)


def payload_of(
    record: NewRecord,
    places: Sequence[ArrayPlace],
    into: Bytes | None = None,
    pace: Pace | None = None,
) -> Bytes:
    """Returns the arrays of a record as they are stored.

    The bytes are written to `into`, which has exactly their size, or to new memory. With `pace` the
    thread pauses between pieces of the copy.
    """
    whole = np.empty(payload_bytes(places), dtype=np.uint8) if into is None else into
    end = 0
    for array, place in zip(record.arrays, places, strict=True):
        whole[end : place.offset] = 0  # padding before the array
        end = place.offset + place.nbytes
        target = whole[place.offset : end]
        typed = target.view(array.parts[0].dtype).reshape(place.shape)
        for part, to in zip(array.parts, _split(typed, array), strict=True):
            most = PIECE if pace is None else pace.piece
            for area in areas(part.shape, part.itemsize, most):
                to[area] = part[area]
                if pace is not None:
                    pace.rest()
    whole[end:] = 0
    return whole


def _split(whole: np.ndarray[Any, Any], array: NamedArray) -> list[np.ndarray[Any, Any]]:
    """Returns views of a whole array, one view for each part."""
    if len(array.parts) == 1:
        return [whole]
    sizes = [part.shape[array.axis] for part in array.parts]
    return np.split(whole, np.cumsum(sizes[:-1]), axis=array.axis)


def areas(shape: Sequence[int], item: int, most: int) -> Iterator[tuple[slice, ...]]:
    """Yields areas (index tuples) that cover an array, each of at most `most` bytes.

    An area has at least one item. `item`: bytes of one item.
    """
    if not shape or math.prod(shape) * item <= most:
        yield ()
        return
    each = math.prod(shape[1:]) * item  # bytes per index of the first axis
    count = max(1, most // each)
    for start in range(0, shape[0], count):
        here = slice(start, start + count)
        if each <= most:
            yield (here,)
        else:
            yield from ((here, *rest) for rest in areas(shape[1:], item, most))


class WriteQueue:
    """The records that the compute thread enqueued and has not freed: at most `limit` bytes.

    `waiting` has the records to write, and then None, which ends the writing thread. `written` has
    the records to free. A record is passed on in a list with only this record. The compute thread
    alone takes the record out of its list, so that no other thread frees the record.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: queue.SimpleQueue[list[NewRecord] | None] = queue.SimpleQueue()
        self.written: deque[list[NewRecord]] = deque()
        self._pending = 0  # number of records
        self._bytes = 0  # bytes of the records' arrays

    def put(self, record: NewRecord) -> None:
        """Enqueues a record. Its arrays must not change until `free` drops the record."""
        self._pending += 1
        self._bytes += record.nbytes
        self.waiting.put([record])

    def free(self) -> None:
        """Drops the written records; called by the compute thread: only it may free MLX arrays."""
        while self.written:
            record = self.written.popleft().pop()
            self._pending -= 1
            self._bytes -= record.nbytes

    def takes(self, size: int) -> bool:
        """Returns whether a record of `size` bytes may be enqueued now; True for an empty queue."""
        self.free()
        return not self._pending or self._bytes + size <= self._limit

    @property
    def pending(self) -> int:
        """The number of enqueued records that are not written yet."""
        self.free()
        return self._pending


class RecordWriter:
    """The thread that appends records to this worker's segments, if no segment has them yet.

    Records that cannot be written are lost.
    """

    def __init__(self, state: TierState, index: FolderIndex) -> None:
        self.queue = WriteQueue(state.room)
        self.thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._state, self._index, self._pace = state, index, state.pace(state.hurries)
        self._segment: SegmentWriter | None = None
        self._buffer: Bytes | None = None  # a buffer for the arrays of records, while records wait
        self._paused_until = -math.inf
        self._error = RepeatedError(UNWRITTEN, state.folder.advice)

    def _run(self) -> None:
        while (holder := self.queue.waiting.get()) is not None:
            self._pace.begin()
            self._write_unless_there(holder[0], monotonic())
            self.queue.written.append(holder)
            self._state.wake()
            self._pace.rest()
            if self.queue.waiting.empty():
                self._buffer = None
        if self._segment is not None:
            self._segment.close()

    def _write_unless_there(self, record: NewRecord, now: float) -> None:
        try:
            if not self._index.has(record.kind, record.key):  # not written by another worker
                self._write(record, now)
        except Exception:
            self._state.counters.count_dropped()
            log.exception("a record of the prefix cache could not be written")

    def _write(self, record: NewRecord, now: float) -> None:
        if now < self._paused_until:
            self._state.counters.count_dropped()
            return
        header, payload = self._encoded(record)
        size, folder = len(header) + len(payload) + records.ALIGNMENT, self._state.folder
        self._pace.rest()
        try:
            folder.prepare(self._state.digest)  # `mlxpool prefix rm` may have deleted the folder
            self._pace.rest()
            with folder.locked():
                path = self._append(header, payload, size)
        except (Locked, FileNotFoundError):
            # Other processes write, or have deleted the folder: the disk itself works.
            self._state.counters.count_dropped()
            return
        except OSError as error:
            self._paused_until = now + ERROR_PAUSE
            self._state.counters.count_dropped()
            self._error.note(error)
            return
        self._error.clear()
        self._index.add_written(record.kind, record.key, path)
        self._state.counters.written_bytes += size

    def _encoded(self, record: NewRecord) -> tuple[bytes, memoryview]:
        """Returns the header and the arrays' bytes of a record; the bytes are in `_buffer`."""
        places = places_of([(array.name, array.dtype, array.shape) for array in record.arrays])
        size = payload_bytes(places)
        if self._buffer is None or self._buffer.size < size:
            self._buffer = np.empty(size, dtype=np.uint8)
        payload = payload_of(record, places, self._buffer[:size], self._pace).data
        pieces = self._pace.between(pieces_of(payload, lambda: self._pace.piece))
        header = records.encode_header(
            self._state.digest,
            record.kind,
            record.start,
            record.parent,
            packed(record.ids),
            places,
            checksum_of(self._state.digest, pieces),
        )
        return header, payload

    def _append(self, header: bytes, payload: memoryview, size: int) -> Path:
        """Appends a record to this worker's segment, or to a new one; returns the segment's path.

        Raises OSError.
        """
        segment, budget = self._segment, self._state.folder.budget
        if segment is not None and (
            segment.size + size > max(size, budget // SEGMENTS) or not segment.linked
        ):
            segment.close()
            segment = self._segment = None
        spare = None if segment is None else segment.path
        if not self._state.folder.make_room(size + records.MAX_SEGMENT_HEADER, spare):
            raise OSError(f"a record of {size} bytes does not fit into prefix_disk, {budget} bytes")
        self._pace.rest(MAX_APPEND_REST / 10)
        if segment is None:
            # `make_room` deletes the folder with its last segment.
            path = self._state.folder.prepare(self._state.digest)
            segment = self._segment = SegmentWriter(path, self._state.digest, self._state.about)
        try:
            segment.append(header, payload, self._pace)
        except OSError:
            segment.close()
            self._segment = None
            raise
        return segment.path
