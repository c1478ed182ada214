"""A peer in plain pyzmq, which sends frames that the client never sends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import zmq

from mlxpool.common.closing import Closing
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.transport import sockets
from support.pool import PATIENCE


class RawPeer(Closing):
    """A DEALER socket connected to one of the pool's sockets."""

    def __init__(self, run_dir: Path, name: str = "front") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = sockets.dealer(self.context, sockets.ipc(run_dir, name))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()

    def send(self, parts: list[bytes]) -> None:
        self.socket.send_multipart(parts)

    def say(self, header: Header, body: Mapping[str, object] | None = None, *blobs: bytes) -> None:
        self.send(frames.encode(header, body or {}, blobs))

    def receive(self, patience: float = PATIENCE) -> Message:
        """Returns the next message; fails if none comes."""
        assert self.socket.poll(int(patience * 1000)), "no message came"
        return frames.decode(self.socket.recv_multipart())

    def receive_kind(self, kind: str) -> Message:
        """Returns the next message of a kind; skips other kinds."""
        while True:
            message = self.receive()
            if message.kind == kind:
                return message

    def quiet(self, seconds: float) -> bool:
        """Returns whether no message comes in this many seconds."""
        return not self.socket.poll(int(seconds * 1000))
