"""The end of a job as it is stored, and as its readers get it."""

from __future__ import annotations

from mlxpool.common.protocol.packing import pack, unpack
from mlxpool.common.protocol.to_client import Done, Failed


def packed_end(terminal: Done | Failed) -> bytes:
    """The bytes that the store keeps."""
    return pack({"kind": terminal.kind, "body": terminal.body()})


def terminal_of(end: bytes | None) -> Done | Failed:
    """Undo `packed_end`. What cannot be read is an end without text or figures."""
    try:
        stored = unpack(end or b"")
        body = stored["body"]
        return Failed(body) if stored["kind"] == Failed.kind else Done.parse(body)
    except (ValueError, KeyError, TypeError):
        return Done("cancelled")
