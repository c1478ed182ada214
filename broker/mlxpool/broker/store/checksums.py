"""Checksums of what is stored of a job, so that a bit which the disk has changed is never served.

Each is a CRC-32, which any change of up to 32 bits in a row alters. None stands for a row that was
written before there were checksums: it is not checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

Part = bytes | str | int


def of_chunk(seq: int, gen: int, pos: int, columns: Iterable[bytes]) -> int:
    """Of output: `columns` are its packed ids, text, borders and log-probabilities."""
    return _crc(seq, gen, pos, *columns)


def of_request(
    id: bytes, digest: bytes, kind: str, model: str, seed: int, request: bytes, notify: str
) -> int:
    """The checksum of what a client has submitted, which no operation changes."""
    return _crc(id, digest, kind, model, seed, request, notify)


def of_facts(id: bytes, facts: bytes | None) -> int | None:
    """The checksum of the facts that the first worker of a generation told of its model."""
    return None if facts is None else _crc(id, facts)


def of_end(id: bytes, state: str, end: bytes | None) -> int | None:
    """The checksum of how a job ended."""
    return None if end is None else _crc(id, state, end)


def differs(stored: int | None, computed: int | None) -> bool:
    """Whether what was read is not what was written."""
    return stored is not None and stored != computed


def _crc(*parts: Part) -> int:
    """Of the parts with their lengths, so that no byte can move from one to the next."""
    pieces: list[bytes] = []
    for part in parts:
        data = str(part).encode(errors="surrogatepass") if isinstance(part, str | int) else part
        pieces += (len(data).to_bytes(8, "big"), data)
    return zlib.crc32(b"".join(pieces))
