"""Checksums of what is stored of a job, so that a bit which the disk has changed is never served.

Each is a CRC-32, which any change of up to 32 bits in a row alters. The record, the request, the
end and each chunk of output of a job have one of their own: damage to one never costs another.
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


def of_record(id: bytes, record: bytes) -> int:
    """The CRC-32 of the packed record of a job."""
    return _crc(id, record)


def of_end(id: bytes, state: str, end: bytes) -> int:
    """The checksum of how a job ended."""
    return _crc(id, state, end)


def _crc(*parts: Part) -> int:
    """Of the parts with their lengths, so that no byte can move from one to the next."""
    crc = 0
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
        crc = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "big"), crc))
    return crc
