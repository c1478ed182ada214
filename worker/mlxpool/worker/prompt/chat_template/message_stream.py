"""Messages between a worker and its renderer process: msgpack maps, one after the other.

Unpacking a message runs no code of the sender: a template is untrusted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

BIG_INT = 1  # the msgpack extension type of an integer beyond 64 bits, which JSON may have
READ_BYTES = 2**20  # of one system call


def pack(message: Mapping[str, Any]) -> bytes:
    """One message. Lone surrogates and integers of any size survive the transport."""
    data: bytes = msgpack.packb(message, default=_pack_big_int, unicode_errors="surrogatepass")
    return data


def receive(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages as they arrive, until the peer closes the connection."""
    unpacker = msgpack.Unpacker(ext_hook=_unpack_big_int, unicode_errors="surrogatepass")
    while data := connection.recv(READ_BYTES):
        unpacker.feed(data)
        yield from unpacker


def _pack_big_int(value: object) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a chat cannot hold {type(value).__name__}")
    return msgpack.ExtType(BIG_INT, str(value).encode())


def _unpack_big_int(code: int, data: bytes) -> int:
    return int(data)
