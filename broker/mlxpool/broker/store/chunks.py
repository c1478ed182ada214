"""Converts chunks of output to their stored form, and cuts them at borders of steps."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import chain

import msgpack

from mlxpool.broker.store.records import Chunk
from mlxpool.common.protocol.token_ids import ID_WIDTH

Borders = tuple[tuple[int, int], ...]


def pack_borders(borders: Borders) -> bytes:
    """Packs pairs as little-endian u32, one after the other."""
    packed = array("I", chain.from_iterable(borders))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_borders(packed: bytes) -> Borders:
    """Undoes `pack_borders`."""
    numbers = array("I", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    flat = numbers.tolist()
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def pack_text(text: str) -> bytes:
    """Encodes as UTF-8. Lone surrogates, which a model can produce, are kept."""
    return text.encode(errors="surrogatepass")


def unpack_text(packed: bytes) -> str:
    """Undoes `pack_text`."""
    return packed.decode(errors="surrogatepass")


def stored_size(chunk: Chunk) -> int:
    """Returns the number of bytes that a chunk needs in its columns."""
    return (
        len(chunk.ids)
        + len(pack_text(chunk.text))
        + len(pack_borders(chunk.borders))
        + len(chunk.logprobs)
    )


def check(chunk: Chunk) -> None:
    """Raises ValueError if the parts of a chunk contradict each other."""
    if not chunk.borders or len(chunk.ids) % ID_WIDTH:
        raise ValueError(f"a chunk of {len(chunk.ids)} bytes of ids, {len(chunk.borders)} steps")
    before = (0, 0)
    for border in chunk.borders:
        if border[0] <= before[0] or border[1] < before[1]:
            raise ValueError(f"the border {border} of a chunk comes after {before}")
        before = border
    if before != (chunk.count, len(chunk.text)):
        raise ValueError(
            f"the last border of a chunk is {before}, it has {chunk.count} ids"
            f" and {len(chunk.text)} characters"
        )


def cut_from(chunk: Chunk, pos: int) -> Chunk:
    """Returns the part of a chunk that begins at the last border at or before `pos`.

    Returns the whole chunk if all its borders are after `pos`.
    """
    keep = 0  # number of dropped steps
    while keep < len(chunk.borders) and chunk.pos + chunk.borders[keep][0] <= pos:
        keep += 1
    return _part(chunk, keep, len(chunk.borders))


def cut_to(chunk: Chunk, max_bytes: int) -> Chunk:
    """Returns the first steps of a chunk that fit in `max_bytes`, but at least one step."""
    if chunk.size <= max_bytes or len(chunk.borders) == 1:
        return chunk
    share = chunk.size / len(chunk.borders)  # steps have about the same size
    steps = max(1, int(max_bytes / share))
    part = _part(chunk, 0, steps)
    while part.size > max_bytes and steps > 1:
        steps = max(1, steps * 3 // 4)
        part = _part(chunk, 0, steps)
    return part


def _part(chunk: Chunk, first: int, last: int) -> Chunk:
    """Returns the steps `first` to `last` - 1 of a chunk as a chunk."""
    if first == 0 and last == len(chunk.borders):
        return chunk
    from_id, from_text = chunk.borders[first - 1] if first else (0, 0)
    to_id, to_text = chunk.borders[last - 1] if last > first else (from_id, from_text)
    logprobs = b""
    if chunk.logprobs:
        logprobs = msgpack.packb(msgpack.unpackb(chunk.logprobs)[from_id:to_id])
    return Chunk(
        chunk.pos + from_id,
        chunk.ids[ID_WIDTH * from_id : ID_WIDTH * to_id],
        chunk.text[from_text:to_text],
        tuple((ids - from_id, text - from_text) for ids, text in chunk.borders[first:last]),
        logprobs,
    )


def without_gap(chunks: Iterable[tuple[int, bytes]]) -> bytes:
    """Joins the ids of chunks (pos, packed ids) in the order of `pos`, up to the first gap."""
    joined = bytearray()
    for pos, ids in chunks:
        if ID_WIDTH * pos != len(joined):
            break
        joined += ids
    return bytes(joined)
