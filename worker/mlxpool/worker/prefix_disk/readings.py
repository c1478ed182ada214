"""What one sequence reads from the disk: chosen from the index, then record by record.

The compute thread begins and ends a Reading, the thread of the tier fills it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, field

from mlxpool.worker.prefix_disk.index import Index
from mlxpool.worker.prefix_disk.keys import BLOCK_TOKENS, block_key, chain
from mlxpool.worker.prefix_disk.records import BadRecord, Kind, RecordHeader
from mlxpool.worker.prefix_disk.segments import Bytes, Place, same_ids

MAX_CANDIDATES = 8  # records behind one block whose inputs are compared, the newest ones
MIN_GAIN = 64  # tokens more than the memory has; fewer are computed

Unreadable = Callable[[Kind, bytes, Exception], None]  # of a record, by kind and key


class Wanted(Struct, frozen=True):
    """What a sequence can use: of its inputs `ids` at most the first `most`.

    The memory has the first `matched`, and can begin a row with `restorable` of them. `stateful`: a
    row can only begin where there is a snapshot.
    """

    root: bytes  # the key of no inputs, see keys.root_key
    ids: tuple[int, ...]
    most: int
    matched: int
    restorable: int
    stateful: bool


class Choice(Struct, frozen=True):
    """One record to read: inputs [start, end), or the snapshot behind `end` inputs."""

    kind: Kind
    key: bytes
    place: Place
    start: int
    end: int


class ReadRecord(Struct, frozen=True):
    """A record that was read and checked. Of its inputs those up to `end` are wanted."""

    header: RecordHeader
    arrays: Bytes
    end: int


def choose(wanted: Wanted, index: Index, unreadable: Unreadable) -> list[Choice]:
    """Returns the records to read, in order; none if they would not save MIN_GAIN tokens.

    Calls `unreadable` for each record whose header cannot be read, and leaves it out.
    """
    ids = wanted.ids[: wanted.most]
    keys = chain(wanted.root, ids)
    first = wanted.matched // BLOCK_TOKENS
    blocks = [
        Choice(Kind.TOKENS, key, place, number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
        for number, key in _run(keys, first, index)
        if (place := index.tokens(key)) is not None
    ]
    keys = keys[: first + len(blocks)]
    if wanted.stateful:
        return _with_state(wanted, index, unreadable, keys, blocks)
    at = len(keys) * BLOCK_TOKENS
    parts = _parts(ids[at : at + BLOCK_TOKENS], at, [wanted.root, *keys][-1], index, unreadable)
    blocks += sorted((part for part, _ in parts), key=lambda part: part.end)[-1:]
    gain = blocks[-1].end - wanted.matched if blocks else 0
    return blocks if gain >= MIN_GAIN else []


def _run(keys: Sequence[bytes], first: int, index: Index) -> Iterator[tuple[int, bytes]]:
    """Yields the keys from number `first` on up to the first without a record."""
    for number in range(first, len(keys)):
        if index.tokens(keys[number]) is None:
            return
        yield number, keys[number]


def _parts(
    ids: Sequence[int],
    at: int,
    before: bytes,
    index: Index,
    unreadable: Unreadable,
    *,
    with_state: bool = False,
) -> Iterator[tuple[Choice, bool]]:
    """Yields the records behind `before` that begin as `ids` do, and whether all of each is used.

    `at`: the number of their first input. `with_state`: only those that have a snapshot at the end.
    """
    keys = [key for key in index.behind(before) if not with_state or index.state(key)]
    for key in keys[-MAX_CANDIDATES:]:
        place = index.tokens(key)
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
    """Returns the records for the last position that has a snapshot; none if there is none.

    `blocks` are those of `keys` that the memory lacks.
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
        state = index.state(before)
        if state is not None:
            found = [*needed, Choice(Kind.STATE, before, state, at, at)]
            return found if at - wanted.restorable >= MIN_GAIN else []
    return []


def require_chosen(header: RecordHeader, choice: Choice, ids: Sequence[int]) -> None:
    """Raises BadRecord unless a record that was read is the chosen one, of the inputs `ids`.

    Its key is the hash of its own inputs and of the key before it, so all before it is compared.
    """
    own = ids[header.start : choice.end]
    at_place = (
        header.start == choice.start if header.kind is Kind.TOKENS else header.end == choice.end
    )
    key = block_key(header.parent, header.ids)
    if header.kind is not choice.kind or not header.key == key == choice.key:
        raise BadRecord("a record is not where the index has it")
    if not at_place or same_ids(header, own) < len(own):
        raise BadRecord("a record has other inputs than its key says")


class Room:
    """Bytes of records that wait to be taken, of all readings together: at most `limit`, or one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.changed = threading.Condition()  # guards all of it, and the readings

    def has(self, size: int) -> bool:
        """Whether a record of so many bytes may be added."""
        return not self.used or self.used + size <= self.limit


class Reading(Struct, eq=False):
    """The records that the disk has for one sequence, as far as they were read.

    The tier's thread calls `put` and `finish`, the compute thread all else. `room` is that of all
    readings.
    """

    wanted: Wanted
    room: Room
    _records: deque[ReadRecord] = field(default_factory=deque)
    _finished: bool = False
    _ended: bool = False  # by the compute thread

    def put(self, record: ReadRecord) -> bool:
        """Adds a record when there is room; returns False once nobody wants it."""
        size = record.arrays.nbytes
        with self.room.changed:
            self.room.changed.wait_for(lambda: self._ended or self.room.has(size))
            if self._ended:
                return False
            self._records.append(record)
            self.room.used += size
            return True

    def finish(self) -> None:
        """No record will follow."""
        with self.room.changed:
            self._finished = True

    @property
    def finished(self) -> bool:
        """Whether all records were taken, and none will follow."""
        with self.room.changed:
            return self._finished and not self._records

    def take(self) -> ReadRecord | None:
        """Returns the next record; None if none waits."""
        with self.room.changed:
            if not self._records:
                return None
            record = self._records.popleft()
            self.room.used -= record.arrays.nbytes
            self.room.changed.notify_all()
            return record

    def end(self) -> None:
        """Nothing more is wanted."""
        with self.room.changed:
            self._ended = True
            self.room.used -= sum(record.arrays.nbytes for record in self._records)
            self._records.clear()
            self.room.changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether nothing more is wanted."""
        return self._ended
