"""Checksums of the stored parts of a job, so that a bit changed by the disk is never sent.

Each is a CRC-32, which detects any change within 32 consecutive bits. The record, the request, the
end and each chunk of output have a checksum each, so damage to one part leaves the others readable.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

Part = bytes | str | int


def of_chunk(seq: int, gen: int, pos: int, columns: Iterable[bytes]) -> int:
    """Returns the checksum of a chunk.

    `columns` are the chunk's packed ids, text, borders and log-probabilities.
    """
    return _crc(seq, gen, pos, *columns)


def of_request(
    id: bytes, digest: bytes, kind: str, model: str, seed: int, request: bytes, notify: str
) -> int:
    """Returns the checksum of a client's submission, which no operation changes."""
    return _crc(id, digest, kind, model, seed, request, notify)


def of_record(id: bytes, record: bytes) -> int:
    """Returns the checksum of the packed record of a job."""
    return _crc(id, record)


def of_end(id: bytes, state: str, end: bytes) -> int:
    """Returns the checksum of the end of a job."""
    return _crc(id, state, end)


def _crc(*parts: Part) -> int:
    """Returns the CRC-32 of the parts and of their lengths.

    The lengths distinguish the same bytes if they are divided into other parts.
    """
    crc = 0
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
        crc = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "big"), crc))
    return crc
