"""A service manager's notify socket, for tests."""

from __future__ import annotations

import os
import socket

from mlxpool.common.closing import Closing


class Manager(Closing):
    """`address` is what NOTIFY_SOCKET says: a path, or "@" and a name without a file."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Every datagram since the last call."""
        found: list[str] = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()
        if not self.address.startswith("@") and os.path.exists(self.address):
            os.unlink(self.address)
