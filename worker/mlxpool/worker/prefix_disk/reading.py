"""Finds the records that a sequence needs by the index, then reads them from the disk.

The compute thread begins and ends a Reading, which has the records for one sequence. The reading
thread fills it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.worker.prefix_disk.index import FolderIndex, Index
from mlxpool.worker.prefix_disk.records import (
    BLOCK_TOKENS,
    BadRecord,
    Kind,
    RecordHeader,
    block_key,
    chain,
)
from mlxpool.worker.prefix_disk.segments import Bytes, Place, same_ids
from mlxpool.worker.prefix_disk.state import TierState

log = logging.getLogger("mlxpool.worker")

REFRESH_INTERVAL = 1.0  # seconds between two searches for other workers' writes and deletions
MAX_CANDIDATES = 8  # the most records after a block that are compared, the newest first
MIN_GAIN = 64  # the fewest tokens to add to those in memory; fewer tokens are computed instead

Unreadable = Callable[[Kind, bytes, Exception], None]  # called with kind, key and error of a record


class Wanted(Struct, frozen=True):
    """The inputs that a sequence can use: at most the first `most` of `ids`.

    The prefix cache in memory has the first `matched` inputs, and can restore `restorable` of them.
    `stateful`: only positions with a snapshot can be restored.
    """

    root: bytes  # the key before the first input, see root_key
    ids: tuple[int, ...]
    most: int
    matched: int
    restorable: int
    stateful: bool


class Choice(Struct, frozen=True):
    """A record to read: the contents of inputs [start, end), or the snapshot after `end` inputs."""

    kind: Kind
    key: bytes
    place: Place
    start: int
    end: int


class ReadRecord(Struct, frozen=True):
    """A record that was read and checked; the sequence needs the record's inputs up to `end`."""

    header: RecordHeader
    arrays: Bytes
    end: int


def choose(wanted: Wanted, index: Index, unreadable: Unreadable) -> list[Choice]:
    """Returns the records to read, in order; empty if they save fewer than MIN_GAIN tokens.

    Calls `unreadable` for each record with an unreadable header, and omits the record.
    """
    ids = wanted.ids[: wanted.most]
    keys = chain(wanted.root, ids)
    first = wanted.matched // BLOCK_TOKENS
    blocks: list[Choice] = []
    for number, key in enumerate(keys[first:], first):
        place = index.place(Kind.TOKENS, key)
        if place is None:
            break
        start = number * BLOCK_TOKENS
        blocks.append(Choice(Kind.TOKENS, key, place, start, start + BLOCK_TOKENS))
    keys = keys[: first + len(blocks)]
    if wanted.stateful:
        return _with_state(wanted, index, unreadable, keys, blocks)
    at = len(keys) * BLOCK_TOKENS
    parts = _parts(ids[at : at + BLOCK_TOKENS], at, [wanted.root, *keys][-1], index, unreadable)
    blocks += sorted((part for part, _ in parts), key=lambda part: part.end)[-1:]
    gain = blocks[-1].end - wanted.matched if blocks else 0
    return blocks if gain >= MIN_GAIN else []


def _parts(
    ids: Sequence[int],
    at: int,
    before: bytes,
    index: Index,
    unreadable: Unreadable,
    *,
    with_state: bool = False,
) -> Iterator[tuple[Choice, bool]]:
    """Yields the records that follow the key `before` and whose first inputs match `ids`.

    With each record, yields whether all its inputs match. `at`: the index of the record's first
    input. `with_state`: yields only records with a snapshot at their end.
    """
    keys = [key for key in index.behind(before) if not with_state or index.place(Kind.STATE, key)]
    for key in keys[-MAX_CANDIDATES:]:
        place = index.place(Kind.TOKENS, key)
        if place is None:
            continue
        try:
            header = place.segment.header(place)
        except (BadRecord, OSError) as error:
            unreadable(Kind.TOKENS, key, error)
            continue
        common = same_ids(header, ids)
        if common:
            choice = Choice(Kind.TOKENS, key, place, at, at + common)
            yield choice, common == header.tokens


def _with_state(
    wanted: Wanted,
    index: Index,
    unreadable: Unreadable,
    keys: Sequence[bytes],
    blocks: Sequence[Choice],
) -> list[Choice]:
    """Returns the records for the last position with a snapshot; empty if there is none.

    `blocks` are the blocks of `keys` that the prefix cache in memory lacks.
    """
    ids = wanted.ids[: wanted.most]
    for count in range(len(keys), -1, -1):
        before, at = keys[count - 1] if count else wanted.root, count * BLOCK_TOKENS
        if at + BLOCK_TOKENS - wanted.restorable < MIN_GAIN:
            break
        needed = [block for block in blocks if block.end <= at]
        parts = _parts(ids[at : at + BLOCK_TOKENS], at, before, index, unreadable, with_state=True)
        whole = [part for part, complete in parts if complete]
        if whole:
            last = max(whole, key=lambda part: part.end)
            needed += [last] * (last.end > wanted.matched)
            before, at = last.key, last.end
        state = index.place(Kind.STATE, before)
        if state is not None:
            choices = [*needed, Choice(Kind.STATE, before, state, at, at)]
            return choices if at - wanted.restorable >= MIN_GAIN else []
    return []


def require_chosen(header: RecordHeader, choice: Choice, ids: Sequence[int]) -> None:
    """Raises BadRecord unless a read record is the chosen record of the inputs `ids`.

    A record's key is the hash of its inputs and of the previous key, so the key covers all earlier
    inputs.
    """
    own = ids[header.start : choice.end]
    at_place = (
        header.start == choice.start if header.kind is Kind.TOKENS else header.end == choice.end
    )
    key = block_key(header.parent, header.ids)
    if header.kind is not choice.kind or not header.key == key == choice.key:
        raise BadRecord("a record is not where the index has it")
    if not at_place or same_ids(header, own) < len(own):
        raise BadRecord("a record has other inputs than its key")


class Room:
    """Bounds the memory of records that were read but not taken yet, in all readings.

    These records together have at most `limit` bytes; a single larger record is also allowed.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.changed = threading.Condition()  # guards this object and the readings

    def has(self, size: int) -> bool:
        """Returns whether the room has `size` bytes left for a record; True for an empty room."""
        return not self.used or self.used + size <= self.limit


class Reading(Struct, eq=False):
    """The records for one sequence that were read from the disk so far.

    The reading thread calls `put` and `finish`; the compute thread calls all other methods. All
    readings share `room`.
    """

    wanted: Wanted
    room: Room
    _records: deque[ReadRecord] = field(default_factory=deque)
    _finished: bool = False
    _ended: bool = False  # set by the compute thread

    def put(self, record: ReadRecord) -> bool:
        """Waits for room and adds a record; returns False if the reading has ended."""
        size = record.arrays.nbytes
        with self.room.changed:
            self.room.changed.wait_for(lambda: self._ended or self.room.has(size))
            if self._ended:
                return False
            self._records.append(record)
            self.room.used += size
            return True

    def finish(self) -> None:
        """Marks the end of the records."""
        with self.room.changed:
            self._finished = True

    @property
    def finished(self) -> bool:
        """Whether all records were taken and no more records will follow."""
        with self.room.changed:
            return self._finished and not self._records

    def take(self) -> ReadRecord | None:
        """Returns the next record; None if no record waits."""
        with self.room.changed:
            if not self._records:
                return None
            record = self._records.popleft()
            self.room.used -= record.arrays.nbytes
            self.room.changed.notify_all()
            return record

    def end(self) -> None:
        """Ends the reading and drops its records, because no sequence needs them."""
        with self.room.changed:
            self._ended = True
            self.room.used -= sum(record.arrays.nbytes for record in self._records)
            self._records.clear()
            self.room.changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended


class RecordReader:
    """The thread that reads records for sequences and refreshes the index of the folder."""

    def __init__(self, state: TierState) -> None:
        self.index = FolderIndex(state, state.pace(self._hurries))
        self.looked = False  # whether the first scan of the index has ended
        self.room = Room(state.room)
        self.thread = threading.Thread(target=self._run, name="prefix-reader", daemon=True)
        self._state = state
        self._asked: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._reads = False  # whether the thread reads for a sequence
        self._awaits_room = False  # whether the thread waits for the compute thread
        self._answered = 0.0  # time when a record was read or taken last, monotonic seconds

    # ---- the compute thread ----------------------------------------------------------------------

    def begin(self, wanted: Wanted) -> Reading:
        """Begins to read the records for a sequence; returns the Reading that gets them."""
        reading = Reading(wanted, self.room)
        self._asked.put(reading)
        return reading

    @property
    def last_progress(self) -> float:
        """The monotonic time at which the disk last returned data, for any sequence.

        While the thread waits for room for records, this is the current time: the wait is not the
        disk's fault.
        """
        return monotonic() if self._awaits_room else max(self._answered, self.index.answered)

    def end(self) -> None:
        """Makes the thread end after its current work; TierState.ending must be set before."""
        self._asked.put(None)

    # ---- the thread ------------------------------------------------------------------------------

    def _hurries(self) -> bool:
        """Returns whether a refresh of the index needs no pauses.

        It needs none if no sequence runs, or if a sequence waits for the refresh.
        """
        return self._state.hurries() or self._reads or not self._asked.empty()

    def _run(self) -> None:
        try:
            self.index.refresh(monotonic())
            self.looked = True
            while not self._state.ending:
                try:
                    reading = self._asked.get(timeout=REFRESH_INTERVAL)
                except queue.Empty:
                    self.index.refresh(monotonic())
                    continue
                if reading is not None:
                    self._read(reading)
        except Exception:
            log.exception("the disk tier of the prefix cache stops reading")
            # With an empty index no further reading begins.
            self.index.records, self.looked = Index(), True
            self._finish_all()

    def _finish_all(self) -> None:
        while not self._state.ending:
            reading = self._asked.get()
            if reading is not None:
                reading.finish()
                self._state.wake()

    def _read(self, reading: Reading) -> None:
        wanted: Wanted | None = reading.wanted
        self._reads = True
        try:
            if not reading.ended:
                self.index.refresh(monotonic())
                while wanted is not None:
                    wanted = self._read_chosen(reading, wanted)
        finally:
            self._reads = False
            reading.finish()
            self._state.wake()

    def _read_chosen(self, reading: Reading, wanted: Wanted) -> Wanted | None:
        """Reads the records that `choose` returns for a sequence, and puts them into `reading`.

        Stops at an invalid record. Then, if layers need a snapshot, returns the inputs for another
        attempt, because an earlier snapshot may be valid. In all other cases returns None.
        """
        for choice in choose(wanted, self.index.records, self.index.discard):
            try:
                record = self._read_one(choice, wanted.ids)
            except (BadRecord, OSError) as error:
                self.index.discard(choice.kind, choice.key, error)
                return wanted if wanted.stateful else None
            self._answered, self._awaits_room = monotonic(), True
            taken = reading.put(record)
            self._answered, self._awaits_room = monotonic(), False
            if not taken:
                return None
            self._state.wake()
            if choice.kind is Kind.TOKENS:
                wanted = replace(wanted, matched=max(wanted.matched, choice.end))
        return None

    def _read_one(self, choice: Choice, ids: Sequence[int]) -> ReadRecord:
        segment = choice.place.segment
        header, arrays = segment.read(choice.place)
        require_chosen(header, choice, ids)
        segment.note_use(monotonic())
        self._state.counters.read_bytes += arrays.nbytes
        return ReadRecord(header, arrays, choice.end)
