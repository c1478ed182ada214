"""What a worker and the process of its templates send each other: msgpack, one after the other.

Neither side can make the other run anything by it: a template is foreign code.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

LARGE = 1  # the type of a whole number beyond 64 bits, which arguments in JSON may have
READ = 2**20  # bytes at a time


def packed(message: Mapping[str, Any]) -> bytes:
    """One message; lone surrogates and numbers of any length arrive as they are."""
    data: bytes = msgpack.packb(message, default=_large, unicode_errors="surrogatepass")
    return data


def received(end: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages that come, until the other side is gone."""
    unpacker = msgpack.Unpacker(ext_hook=_number, unicode_errors="surrogatepass")
    while data := end.recv(READ):
        unpacker.feed(data)
        yield from unpacker


def _large(value: object) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a chat cannot hold {type(value).__name__}")
    return msgpack.ExtType(LARGE, str(value).encode())


def _number(code: int, data: bytes) -> int:
    return int(data)
