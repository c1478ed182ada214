"""A ZMTP 3.0 peer over a plain socket, which can send data that libzmq never sends."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Mapping

from mlxpool.common.closing import Closing
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
PATIENCE = 60.0  # seconds for one peer, less than a test waits; only a failure takes so long


def frame(body: bytes, flags: int = 0) -> bytes:
    """Returns a frame, with a length of one byte or eight."""
    if len(body) > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def message(parts: list[bytes]) -> bytes:
    """Returns the frames of a message."""
    *first, last = parts
    return b"".join(frame(part, MORE) for part in first) + frame(last)


def ready(kind: str, identity: bytes = b"") -> bytes:
    """Returns the READY command of the handshake with socket type and identity."""
    properties = {b"Socket-Type": kind.encode(), b"Identity": identity}
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in properties.items()
    )
    return frame(body, COMMAND)


class RawZmtp(Closing):
    """One connection to `ipc://PATH` or `tcp://HOST:PORT`; it sends nothing by itself."""

    def __init__(self, endpoint: str) -> None:
        scheme, _, where = endpoint.partition("://")
        if scheme == "ipc":
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(where)
            except OSError:
                self.socket.close()
                raise
        else:
            host, _, port = where.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(PATIENCE)

    def close(self) -> None:
        self.socket.close()

    def greet(self, kind: str = "DEALER", identity: bytes = b"") -> RawZmtp:
        """Sends the handshake, and reads the handshake of the other side."""
        self.socket.sendall(GREETING + ready(kind, identity))
        self.exactly(len(GREETING))
        flags, _ = self.frame()
        assert flags & COMMAND, "the other side began without READY"
        return self

    def send(self, data: bytes) -> bool:
        """Sends raw bytes; False if the other side has closed the connection."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        """Shuts the connection down, which unblocks a thread that reads from it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def say(self, header: Header, body: Mapping[str, object] | None = None) -> bool:
        """Sends a valid message."""
        return self.send(message(frames.encode(header, body or {})))

    def exactly(self, count: int) -> bytes:
        """Reads `count` bytes. Raises EOFError if the other side has closed the connection."""
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise EOFError("the other side has closed the connection")
            data += more
        return data

    def frame(self) -> tuple[int, bytes]:
        """Reads the next frame: its flags and its body."""
        (flags,) = self.exactly(1)
        size = struct.unpack(">Q", self.exactly(8))[0] if flags & LONG else self.exactly(1)[0]
        return flags, self.exactly(size)

    def receive(self) -> frames.Message:
        """Reads the next message; answers ZMTP heartbeats."""
        parts: list[bytes] = []
        while True:
            flags, body = self.frame()
            if flags & COMMAND:
                self.send(frame(b"\x04PONG" + body[7:], COMMAND))  # except PING and its lifetime
                continue
            parts.append(body)
            if not flags & MORE:
                return frames.decode(parts)

    def is_cut(self, patience: float = PATIENCE) -> bool:
        """Returns whether the other side closes the connection in time; discards its data."""
        end = time.monotonic() + patience
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.socket], [], [], left)[0]:
                return False
            with contextlib.suppress(OSError):
                if self.socket.recv(65536):
                    continue
            return True
        return False
