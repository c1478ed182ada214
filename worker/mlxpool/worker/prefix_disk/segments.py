"""Segment files: one process appends to a segment, and every process of the user may read it.

Segments are read with `pread` into memory of the process: a mapped file that shrinks, or whose disk
fails, would end the process with SIGBUS. Nothing is synced to the disk: after a crash of the
machine the tail of a segment may be missing or zeros, and its records are then invalid.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.prefix_disk import records
from mlxpool.worker.prefix_disk.pacing import Pace
from mlxpool.worker.prefix_disk.records import BadRecord, RecordHeader, aligned, unpacked

SUFFIX = ".seg"
FILE_MODE = 0o600
MAX_PARTS = 512  # the most buffers of one system call; Linux allows 1,024
USE_INTERVAL = 60.0  # seconds between two notes of a segment's use
FIRST_READ = 16 * 1024  # bytes of the first read of a header of unknown size
# The most seconds of pauses during the append of a record: other processes wait for the lock.
MAX_APPEND_REST = 0.25

Bytes = npt.NDArray[np.uint8]


class Place(Struct, frozen=True):
    """The location of a record: `offset` in a segment, and the bytes of its header and arrays."""

    segment: Segment
    offset: int
    header: int
    payload: int


class Segment:
    """An open segment for reading. It stays readable even if the file `path` is deleted."""

    def __init__(self, path: Path, digest: bytes | None = None) -> None:
        """Opens a segment of this digest; None: of any digest.

        Raises OSError. Raises BadRecord if the file is not a segment, or has another digest or
        owner.
        """
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise BadRecord(f"{path} is not a regular file of this user")
            self.about, self.scanned = read_description(self._descriptor)
            self._digest = records.digest_of(self.about)
            if digest is not None and self._digest != digest:
                raise BadRecord(f"{path} has the digest {self._digest.hex()}, not {digest.hex()}")
        except BaseException:
            os.close(self._descriptor)
            raise
        self.broken = False  # whether the bytes after the scanned records are invalid
        self._used = 0.0  # time of the last call of `note_use` that wrote

    def scan(self) -> Iterator[tuple[RecordHeader, Place]]:
        """Yields the records that were appended since the last call. Raises OSError.

        The next call tries an incomplete record again. A record with an invalid header ends this
        scan and all later scans, because the beginning of the next record is not known.
        """
        size = os.fstat(self._descriptor).st_size
        while not self.broken and (offset := self.scanned) + records.HEAD_BYTES <= size:
            try:
                header = self._header_at(offset, size)
            except BadRecord:
                self.broken = True
                return
            if header is None or offset + aligned(header.record_bytes) > size:
                return  # the record is being written, or its writer has ended
            self.scanned = offset + aligned(header.record_bytes)
            yield header, Place(self, offset, header.size, header.payload)

    def _header_at(self, offset: int, size: int) -> RecordHeader | None:
        """Returns the header at an offset; None if the header ends after the file's `size` bytes.

        Raises BadRecord and OSError.
        """
        head = os.pread(self._descriptor, FIRST_READ, offset)
        length = records.header_size(head)
        if offset + length > size:
            return None
        if length > len(head):
            head = os.pread(self._descriptor, length, offset)
        return records.decode_header(self._digest, head[:length])

    def read(self, place: Place) -> tuple[RecordHeader, Bytes]:
        """Returns a record: its header, and its arrays as bytes.

        Raises BadRecord if the record is invalid, and OSError.
        """
        buffer = np.empty(place.header + place.payload, dtype=np.uint8)
        view, done = buffer.data, 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], place.offset + done)
            if not count:
                raise BadRecord(f"{self.path} ends inside the record at {place.offset}")
            done += count
        header = records.decode_header(self._digest, bytes(view[: place.header]))
        records.check_payload(self._digest, header, view[place.header :])
        return header, buffer[place.header :]

    def header(self, place: Place) -> RecordHeader:
        """Returns the header of a record. Raises BadRecord and OSError."""
        return records.decode_header(
            self._digest, os.pread(self._descriptor, place.header, place.offset)
        )

    def note_use(self, now: float) -> None:
        """Records a use of the segment; the least recently used segments are deleted first.

        `now`: monotonic seconds. Ignores errors: a use that cannot be recorded does not delay the
        deletion of the segment.
        """
        if now - self._used < USE_INTERVAL:
            return
        self._used = now
        try:
            os.utime(self._descriptor)
        except OSError:
            pass

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SegmentWriter:
    """A new segment. Only this process appends to it."""

    def __init__(self, folder: Path, digest: bytes, about: Mapping[str, Any]) -> None:
        """Creates the file. Raises OSError."""
        name = f"{time.time_ns():016x}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self.path = folder / name
        self._digest = digest
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, FILE_MODE)
        self.size = 0
        try:
            self._append([records.encode_segment_header(digest, about)])
        except BaseException:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    @property
    def linked(self) -> bool:
        """Whether the file still exists in its folder: another worker may have deleted it."""
        return os.fstat(self._descriptor).st_nlink > 0

    def append(self, header: bytes, payload: memoryview, pace: Pace | None = None) -> None:
        """Appends a record. After an OSError the segment is unchanged.

        With `pace` the record is written in pieces, with pauses between them.
        """
        self._append([header, payload], pace)

    def _append(self, parts: Sequence[bytes | memoryview], pace: Pace | None = None) -> None:
        whole = sum(map(len, parts))
        padding = aligned(whole) - whole
        views = [memoryview(part) for part in (*parts, bytes(padding)) if len(part)]
        at = self.size
        most = 0.0  # seconds of pauses that the written bytes allow
        try:
            while views:
                some = views[:MAX_PARTS] if pace is None else _first(views, pace.piece)
                count = os.pwritev(self._descriptor, some, at)
                at += count
                views = _without(views, count)
                if pace is not None:
                    most += MAX_APPEND_REST * count / max(aligned(whole), pace.piece)
                    most -= pace.rest(most)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size = at

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _first(views: list[memoryview], most: int) -> list[memoryview]:
    """Returns the first `most` bytes of the buffers, from at most MAX_PARTS of them."""
    first = []
    for view in views[:MAX_PARTS]:
        first.append(view[:most])
        most -= len(first[-1])
        if not most:
            break
    return first


def _without(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns the buffers without their first `count` bytes."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views and count else views


def read_description(descriptor: int) -> tuple[dict[str, Any], int]:
    """Returns the description in the header of an open segment, and the header's size.

    Raises BadRecord, OSError.
    """
    head = os.pread(descriptor, FIRST_READ, 0)
    size = records.segment_header_size(head)
    if size > len(head):
        head = os.pread(descriptor, size, 0)
    return records.decode_segment_header(head[:size]), size


def same_ids(header: RecordHeader, ids: Sequence[int]) -> int:
    """Returns how many first inputs of a record equal the first inputs of `ids`."""
    count = 0
    for own, other in zip(unpacked(header.ids), ids, strict=False):
        if own != other:
            break
        count += 1
    return count
