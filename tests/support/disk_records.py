"""Records of the disk tier of the prefix cache, with arrays that are computed from the inputs.

A test can therefore detect an array that belongs to other inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlxpool.worker.prefix_disk.folder import ModelFolder
from mlxpool.worker.prefix_disk.reading import Reading, ReadRecord, Wanted
from mlxpool.worker.prefix_disk.records import (
    BLOCK_TOKENS,
    Kind,
    block_key,
    checksum_of,
    decode_header,
    encode_header,
    packed,
    places_of,
    root_key,
)
from mlxpool.worker.prefix_disk.state import TierState
from mlxpool.worker.prefix_disk.tier import DiskTier
from mlxpool.worker.prefix_disk.writing import NamedArray, NewRecord, payload_of
from support.pool import until

DIGEST = bytes(range(32))
ABOUT = {"weights": "some", "layout": "rows"}
ROOM = 2**20
HEADS, SIZE = 2, 3


def cells(ids: Sequence[int], start: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Returns an array [HEADS, tokens, SIZE] that encodes the inputs and their positions."""
    numbers = np.array(
        [(token * 7 + start + at) % 65_521 for at, token in enumerate(ids)], np.uint16
    )
    return np.broadcast_to(numbers[None, :, None], (HEADS, len(ids), SIZE)).copy()


def records_of(
    ids: Sequence[int], scope: str = "", *, states: Sequence[int] = ()
) -> list[NewRecord]:
    """Returns the records of a sequence: its blocks, a partial last block, and snapshots."""
    records, key = [], root_key(scope)
    for start in range(0, len(ids), BLOCK_TOKENS):
        part = tuple(ids[start : start + BLOCK_TOKENS])
        records += record_of(part, start, key, states=states)
        key = block_key(key, packed(part))
    return records


def record_of(
    part: tuple[int, ...], start: int, parent: bytes, *, states: Sequence[int] = ()
) -> list[NewRecord]:
    """Returns the record of a block that follows the block with the key `parent`.

    `part` are the block's inputs, `start` is the position of the first. `states` are positions of
    snapshots, whose records are added. If a snapshot is inside the block, a shorter record is added
    before the snapshot's record, with the block's inputs up to the snapshot.
    """
    key = block_key(parent, packed(part))
    arrays = (NamedArray("0.0", "bfloat16", (cells(part, start),)),)
    records = [NewRecord(Kind.TOKENS, start, parent, key, part, arrays)]
    for end in states:
        if end == start + len(part):
            state = NamedArray("1.0", "float32", (np.array([end], np.float32),), 0)
            records.append(NewRecord(Kind.STATE, start, parent, key, part, (state,)))
        elif start < end < start + len(part):
            records += record_of(part[: end - start], start, parent, states=[end])
    return records


@contextmanager
def tier_at(
    path: Path,
    *,
    digest: bytes = DIGEST,
    budget: int = 2**26,
    model: str = "m",
    records: int = 0,
) -> Iterator[DiskTier]:
    """Runs a disk tier in a folder; waits until it has found at least `records` records."""
    folder = ModelFolder(path, model, budget)
    folder.prepare(digest)
    tier = DiskTier(TierState(folder, digest, ABOUT, ROOM, True, lambda: None))
    tier.start()
    try:
        until(lambda: len(tier.index.records) >= records, "the records are found")
        yield tier
    finally:
        tier.close()
        tier.join()


def write_all(tier: DiskTier, records: Sequence[NewRecord]) -> None:
    """Writes records, and waits until they are written."""
    for record in records:
        tier.writes.put(record)
    until(lambda: tier.writes.pending == 0, "all is written")


def write_until_killed(path: Path, number: int) -> None:
    """Writes records until the process is killed.

    The records belong to sequences of 700 consecutive inputs. The first sequence begins with the
    input `number * 1,000,000`, and each later one 1,000 higher.
    """
    with tier_at(path, budget=2**32) as tier:  # a large budget, so that no record is deleted
        for count in range(10_000):
            base = number * 1_000_000 + count * 1000
            write_all(tier, records_of(tuple(range(base, base + 700)), states=[700]))


def wanted(
    ids: Sequence[int],
    *,
    matched: int = 0,
    restorable: int | None = None,
    stateful: bool = False,
    scope: str = "",
    most: int | None = None,
) -> Wanted:
    """Returns the description of the records that a prompt can use, which a tier then looks for."""
    least = matched if restorable is None else restorable
    most = len(ids) - 1 if most is None else most
    return Wanted(root_key(scope), tuple(ids), most, matched, least, stateful)


def read_all(tier: DiskTier, what: Wanted) -> list[ReadRecord]:
    """Reads all records that the disk has for a prompt."""
    reading = tier.reader.begin(what)
    records: list[ReadRecord] = []
    until(lambda: _take(reading, records), "all is read")
    return records


def _take(reading: Reading, records: list[ReadRecord]) -> bool:
    while (record := reading.take()) is not None:
        records.append(record)
    return reading.finished


def array_of(record: ReadRecord, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """Returns an array of a record; bfloat16 as uint16."""
    (place,) = (candidate for candidate in record.header.arrays if candidate.name == name)
    kind = {"bfloat16": "uint16"}.get(place.dtype, place.dtype)
    data = record.arrays[place.offset : place.offset + place.nbytes]
    return data.view(kind).reshape(place.shape)


def encoded(record: NewRecord, digest: bytes = DIGEST) -> tuple[bytes, memoryview]:
    """Returns the header and the arrays of a record."""
    places = places_of([(array.name, array.dtype, array.shape) for array in record.arrays])
    payload = payload_of(record, places).data
    fields = record.kind, record.start, record.parent, packed(record.ids)
    return encode_header(digest, *fields, places, checksum_of(digest, [payload])), payload


def record_from(arrays: Sequence[NamedArray], start: int, tokens: int) -> ReadRecord:
    """Returns the record of these arrays as a tier would read it."""
    ids, parent = tuple(range(tokens)), root_key("")
    header, payload = encoded(NewRecord(Kind.TOKENS, start, parent, b"", ids, tuple(arrays)))
    array = np.frombuffer(payload, np.uint8)
    return ReadRecord(decode_header(DIGEST, header), array, start + tokens)


def check_tokens(records: Sequence[ReadRecord], ids: Sequence[int], matched: int = 0) -> int:
    """Asserts that records belong to the inputs; returns the end of the last record."""
    end = matched
    for record in records:
        header = record.header
        if header.kind is Kind.STATE:
            assert array_of(record, "1.0").tolist() == [header.end]
            continue
        assert header.start <= end < record.end <= header.end
        own = array_of(record, "0.0")[:, : record.end - header.start]
        assert (own == cells(ids[header.start : record.end], header.start)).all()
        end = record.end
    return end
