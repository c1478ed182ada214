"""The index of a folder's records: by key, and by the key of the preceding inputs."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from mlxpool.worker.prefix_disk.pacing import Pace
from mlxpool.worker.prefix_disk.records import BadRecord, Kind, RecordHeader
from mlxpool.worker.prefix_disk.segments import Place, Segment
from mlxpool.worker.prefix_disk.state import RepeatedError, TierState

log = logging.getLogger("mlxpool.worker")

MIN_REFRESH_INTERVAL = 0.1  # seconds between two readings of the folder
NEW_SECONDS = 5.0  # a segment without a header is new for these seconds after its last change

# Errors that are not the file's fault: the file is opened again later.
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EINTR})


class Index:
    """The locations of all records. One thread changes the index; other threads may look up keys.

    If several records have the same kind and key, the first one is used while its segment exists.
    """

    def __init__(self) -> None:
        self._places: dict[Kind, dict[bytes, Place]] = {kind: {} for kind in Kind}
        self._behind: dict[bytes, list[bytes]] = {}  # key -> keys of the blocks after it
        self._held: dict[Segment, dict[tuple[Kind, bytes], bytes]] = {}  # record -> previous key

    def __len__(self) -> int:
        """Returns the number of records."""
        return sum(map(len, self._places.values()))

    def add(self, header: RecordHeader, place: Place) -> None:
        """Adds a record, unless the index has a record of this kind and key."""
        places = self._places[header.kind]
        if header.key in places:
            return
        places[header.key] = place
        self._held.setdefault(place.segment, {})[header.kind, header.key] = header.parent
        if header.kind is Kind.TOKENS:
            self._behind.setdefault(header.parent, []).append(header.key)

    def remove(self, segment: Segment) -> None:
        """Removes the records of a deleted segment."""
        for (kind, key), parent in self._held.pop(segment, {}).items():
            self._drop(kind, key, parent)

    def discard(self, kind: Kind, key: bytes) -> None:
        """Removes one invalid record."""
        place = self._places[kind].get(key)
        if place is not None:
            self._drop(kind, key, self._held[place.segment].pop((kind, key)))

    def place(self, kind: Kind, key: bytes) -> Place | None:
        """Returns the location of a record, or None; any thread may call it."""
        return self._places[kind].get(key)

    def behind(self, parent: bytes) -> Sequence[bytes]:
        """Returns the keys of the blocks after the block of the key `parent`, oldest first."""
        return self._behind.get(parent, ())

    def _drop(self, kind: Kind, key: bytes, parent: bytes) -> None:
        del self._places[kind][key]
        if kind is Kind.TOKENS:
            keys = self._behind[parent]
            keys.remove(key)
            if not keys:
                del self._behind[parent]


class FolderIndex:
    """The segments of one digest, and the index of their records.

    Only the reading thread changes the index; `pace` makes the pauses in this work. The writing
    thread calls `add_written`; any thread may call `has`.
    """

    def __init__(self, state: TierState, pace: Pace) -> None:
        self.records = Index()
        self.answered = 0.0  # time of the last scan of a segment, monotonic seconds
        self._state, self._pace = state, pace
        self._segments: dict[str, Segment | None] = {}  # by file name; None: unusable file
        # Records written by this worker that the index may lack, and the paths of their segments.
        self._written: dict[tuple[Kind, bytes], Path] = {}
        self._refreshed = 0.0
        self._folder_error = RepeatedError("the folder of the prefix cache cannot be read")
        self._segment_error = RepeatedError("a segment of the prefix cache cannot be read now")

    def has(self, kind: Kind, key: bytes) -> bool:
        """Returns whether the folder has a record of a kind and key."""
        return bool(self.records.place(kind, key)) or (kind, key) in self._written

    def add_written(self, kind: Kind, key: bytes, path: Path) -> None:
        """Adds a record that this worker wrote to a segment."""
        self._written[kind, key] = path

    def discard(self, kind: Kind, key: bytes, error: Exception) -> None:
        """Removes a record that is invalid or cannot be read, and counts it as bad."""
        self._state.counters.bad += 1
        self.records.discard(kind, key)
        log.warning("a record of the prefix cache is bad", extra={"why": str(error)})

    def refresh(self, now: float) -> None:
        """Finds new segments and records, and removes deleted segments and records.

        Does nothing within MIN_REFRESH_INTERVAL of the last refresh. Changes nothing if the
        folder cannot be read. `now`: monotonic seconds.
        """
        if now - self._refreshed < MIN_REFRESH_INTERVAL and self._segments:
            return
        self._refreshed = now
        self._pace.begin()
        # Before the scan: records that are written during the scan may be missing from `files`.
        written = list(self._written.items())
        try:
            files = list(self._pace.between(self._state.folder.each()))
        except OSError as error:
            self._folder_error.note(error)
            return
        self._folder_error.clear()
        own = self._state.folder.segments_of(self._state.digest)
        there = {file.path.name: file.path for file in files if file.path.parent == own}
        for name in self._segments.keys() - there.keys():
            segment = self._segments.pop(name)
            if segment is not None:
                self.records.remove(segment)
                segment.close()
        for name in self._pace.between(sorted(there)):
            if name not in self._segments:
                self._open(there[name])
            segment = self._segments.get(name)
            if segment is not None:
                self._scan(segment)
        for (kind, key), path in written:
            if self.records.place(kind, key) or path.name not in there:
                self._written.pop((kind, key), None)
        self._state.counters.bytes = sum(file.size for file in files)

    def close(self) -> None:
        """Closes the segments, after the end of the reading thread."""
        for segment in self._segments.values():
            if segment is not None:
                segment.close()

    def _open(self, path: Path) -> None:
        try:
            self._segments[path.name] = Segment(path, self._state.digest)
        except FileNotFoundError:
            pass  # another process has deleted the file
        except (BadRecord, OSError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                self._segment_error.note(error)
            elif not _is_new(path):  # the writer of a new file may still write its header
                self._segments[path.name] = None
                self._state.counters.bad += 1
                log.warning("a segment of the prefix cache is bad", extra={"why": str(error)})

    def _scan(self, segment: Segment) -> None:
        was_broken = segment.broken
        try:
            for header, place in self._pace.between(segment.scan()):
                self.records.add(header, place)
            self.answered = monotonic()
        except OSError as error:  # the next refresh tries the file again
            self._segment_error.note(error)
        self._state.counters.bad += segment.broken and not was_broken


def _is_new(path: Path) -> bool:
    """Returns whether a file was written within the last NEW_SECONDS."""
    try:
        return time.time() - path.stat().st_mtime < NEW_SECONDS
    except OSError:
        return True
