"""The end of a job as it is stored, and as its readers get it."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.common.protocol.packing import pack, unpack
from mlxpool.common.protocol.to_client import Done, Failed


def packed_end(terminal: Done | Failed) -> bytes:
    """The bytes that the store keeps beside the blobs of an answer."""
    return pack({"kind": terminal.kind, "body": terminal.body()})


def terminal_of(end: bytes | None, blobs: Sequence[bytes] = ()) -> Done | Failed:
    """Undo `packed_end`; `blobs` are those of the answer, if it has one.

    What cannot be read is an end without text or figures.
    """
    try:
        stored = unpack(end or b"")
        body = stored["body"]
        return Failed(body) if stored["kind"] == Failed.kind else Done.parse(body, blobs)
    except (ValueError, KeyError, TypeError):
        return Done("cancelled")
