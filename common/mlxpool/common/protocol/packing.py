"""Values as bytes that are stored and read again: msgpack, as in messages."""

from __future__ import annotations

from typing import Any

import msgpack


def pack(value: Any) -> bytes:
    """A value of maps, lists, texts, bytes and numbers as bytes."""
    return bytes(msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass"))


def unpack(data: bytes) -> Any:
    """Undo `pack`. Raises ValueError for anything else."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
