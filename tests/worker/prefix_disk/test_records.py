"""The bytes of segments: written records are read, and damaged ones are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prefix_disk import records
from mlxpool.worker.prefix_disk.records import (
    ITEM_BYTES,
    BadRecord,
    Kind,
    block_key,
    chain,
    check_payload,
    decode_header,
    decode_segment_header,
    encode_segment_header,
    packed,
    places_of,
    root_key,
    unpacked,
)
from mlxpool.worker.prefix_disk.segments import Segment, SegmentWriter
from mlxpool.worker.prefix_disk.writing import NamedArray, NewRecord
from support.disk_records import ABOUT, DIGEST, encoded, records_of

OTHER = bytes(reversed(DIGEST))
IDS = tuple(range(1000, 1040))


def written(folder: Path, every: list[NewRecord]) -> Path:
    writer = SegmentWriter(folder, DIGEST, ABOUT)
    for record in every:
        writer.append(*encoded(record))
    writer.close()
    return writer.path


def readable(path: Path) -> list[tuple[tuple[int, ...], bytes]]:
    """Returns inputs and arrays of all valid records of a segment."""
    try:
        segment = Segment(path, DIGEST)
    except BadRecord:
        return []
    contents = []
    try:
        for header, place in segment.scan():
            try:
                again, arrays = segment.read(place)
            except BadRecord:
                continue
            assert again == header
            contents.append((unpacked(header.ids), arrays.tobytes()))
    finally:
        segment.close()
    return contents


@st.composite
def arrays(draw: st.DrawFn) -> NamedArray:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    raw = f"uint{8 * ITEM_BYTES[dtype]}"
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    parts: list[np.ndarray[Any, Any]] = []
    count = draw(st.integers(1, 3)) if len(shape) > 1 else 1
    for number in range(count):
        whole = np.arange(int(np.prod(shape, dtype=int)), dtype=np.uint64) + number
        parts.append(whole.astype(raw).reshape(shape))
    return NamedArray(draw(st.text(max_size=20)), dtype, tuple(parts), min(1, len(shape) - 1))


@given(
    st.lists(arrays(), max_size=5),
    st.lists(st.integers(0, 2**64 - 1), max_size=256),
    st.sampled_from(Kind),
    st.integers(0, 2**40),
)
def test_any_record_is_read_as_it_was_written(
    every: list[NamedArray], ids: list[int], kind: Kind, start: int
) -> None:
    parent = root_key("someone")
    key = block_key(parent, packed(ids))
    record = NewRecord(kind, start, parent, key, tuple(ids), tuple(every))
    data, payload = encoded(record)
    header = decode_header(DIGEST, data)
    check_payload(DIGEST, header, payload)
    assert (header.kind, header.start, header.parent, header.key) == (kind, start, parent, key)
    assert unpacked(header.ids) == tuple(ids) and header.end == start + len(ids)
    for place, array in zip(header.arrays, every, strict=True):
        assert (place.name, place.dtype, place.shape) == (array.name, array.dtype, array.shape)
        joined = np.concatenate(array.parts, axis=array.axis) if array.shape else array.parts[0]
        assert payload[place.offset : place.offset + place.nbytes] == joined.tobytes()


def test_a_dtype_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"array '0.1' has the dtype int4, which is not stored"):
        places_of([("0.1", "int4", (1,))])


def test_every_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    """Flips bits all over a segment: records that are still read are right, and in order."""
    ids = tuple(range(300))
    path = written(tmp_path, records_of(ids, states=[300]))
    sound, data = readable(path), bytearray(path.read_bytes())
    assert len(sound) == 3
    damaged = tmp_path / "damaged.seg"
    for at in range(0, len(data), 7):  # 7 does not divide a field's size, so each field is hit
        data[at] ^= 1 << (at % 8)
        damaged.write_bytes(data)
        data[at] ^= 1 << (at % 8)
        survivors = readable(damaged)
        assert len(survivors) <= len(sound)
        assert [record for record in sound if record in survivors] == survivors
    assert readable(path) == sound


def test_every_flipped_bit_of_a_header_is_found() -> None:
    header, payload = encoded(records_of(IDS)[0])
    for at in range(len(header)):
        for bit in range(8):
            flipped = bytearray(header)
            flipped[at] ^= 1 << bit
            with pytest.raises(BadRecord):
                check_payload(DIGEST, decode_header(DIGEST, bytes(flipped)), payload)


@given(st.data())
def test_flipped_bits_of_arrays_are_found(data: st.DataObject) -> None:
    header, payload = encoded(records_of(IDS)[0])
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    if changed != payload:
        with pytest.raises(BadRecord, match="the checksum of the arrays is wrong"):
            check_payload(DIGEST, decode_header(DIGEST, header), bytes(changed))


def test_a_segment_that_ends_anywhere_has_its_whole_records(tmp_path: Path) -> None:
    """A segment is cut anywhere, as by a full disk or a killed writer: whole records are read.

    Zeros may follow the cut.
    """
    path = written(tmp_path, records_of(IDS, states=[40]))
    sound, data = readable(path), path.read_bytes()
    ends, torn = [0], tmp_path / "torn.seg"
    for end in [*range(0, len(data), 3), len(data)]:  # 3 does not divide a field's size
        torn.write_bytes(data[:end])
        survivors = readable(torn)
        assert survivors == sound[: len(survivors)]
        ends.append(len(survivors))
        torn.write_bytes(data[:end].ljust(len(data), b"\0"))  # zeros, as after a loss of power
        filled = readable(torn)
        assert filled[: len(survivors)] == survivors and all(record in sound for record in filled)
    assert ends == sorted(ends) and ends[-1] == len(sound) == 2


@given(st.binary(max_size=400))
def test_any_bytes_are_no_record(data: bytes) -> None:
    for read in (lambda: decode_header(DIGEST, data), lambda: decode_segment_header(data)):
        with pytest.raises(BadRecord):
            read()


@given(st.binary(min_size=records.HEAD_BYTES, max_size=600))
def test_any_bytes_behind_the_magic_are_no_record(data: bytes) -> None:
    data = records.RECORD_MAGIC + data[4:]
    with pytest.raises(BadRecord):
        decode_header(DIGEST, data)


def test_a_record_belongs_to_its_digest() -> None:
    header, payload = encoded(records_of(IDS)[0], OTHER)
    with pytest.raises(BadRecord, match="the checksum of a header"):
        decode_header(DIGEST, header)
    with pytest.raises(BadRecord, match="the checksum of the arrays"):
        check_payload(DIGEST, decode_header(OTHER, header), payload)


def test_a_segment_of_another_digest_is_not_opened(tmp_path: Path) -> None:
    path = SegmentWriter(tmp_path, OTHER, ABOUT).path
    with pytest.raises(BadRecord, match=f"has the digest {OTHER.hex()}, not {DIGEST.hex()}"):
        Segment(path, DIGEST)


def test_a_segment_of_another_format_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FORMAT", 2)
    newer = encode_segment_header(DIGEST, ABOUT)
    monkeypatch.undo()
    with pytest.raises(BadRecord, match="has the format 2, this version reads 1"):
        decode_segment_header(newer)


def test_a_segment_is_no_link_and_of_this_user(tmp_path: Path) -> None:
    path = written(tmp_path, records_of(IDS))
    assert path.stat().st_mode & 0o777 == 0o600
    link = tmp_path / "link.seg"
    link.symlink_to(path)
    with pytest.raises(OSError):
        Segment(link, DIGEST)
    os.mkfifo(tmp_path / "fifo.seg")
    with pytest.raises(BadRecord, match="not a regular file"):
        Segment(tmp_path / "fifo.seg", DIGEST)


def test_a_write_that_fails_leaves_the_segment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(tmp_path, DIGEST, ABOUT)
    first, second = records_of(tuple(range(300)))
    writer.append(*encoded(first))
    size, calls = writer.path.stat().st_size, []

    def full(descriptor: int, parts: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return os.pwrite(descriptor, bytes(parts[0])[:100], at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(*encoded(second))
    assert len(calls) == 2 and writer.path.stat().st_size == size
    monkeypatch.undo()
    writer.append(*encoded(second))
    writer.close()
    assert [len(ids) for ids, _ in readable(writer.path)] == [256, 44]


def test_records_that_are_appended_are_found_by_the_next_scan(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, DIGEST, ABOUT)
    segment = Segment(writer.path, DIGEST)
    assert list(segment.scan()) == []
    first, second = records_of(tuple(range(300)))
    writer.append(*encoded(first))
    assert [header.tokens for header, _ in segment.scan()] == [256]
    assert list(segment.scan()) == []
    writer.append(*encoded(second))
    assert [header.tokens for header, _ in segment.scan()] == [44]
    writer.close()
    segment.close()


def test_keys_tell_scopes_and_places_apart() -> None:
    ids = list(range(600))
    keys = chain(root_key(""), ids)
    assert len(keys) == 2 and len({*keys, *chain(root_key("a"), ids)}) == 4
    assert chain(root_key(""), [1, *ids[1:]])[1] != keys[1]  # a key depends on earlier inputs
    assert chain(root_key(""), ids[:255]) == []
    assert unpacked(packed([0, 2**63, 2**64 - 1])) == (0, 2**63, 2**64 - 1)
