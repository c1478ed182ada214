"""The notify socket of a service manager, such as systemd."""

from __future__ import annotations

import os
import socket

from mlxpool.common.closing import Closing


class NotifySocket(Closing):
    """The socket. `address` is the value of NOTIFY_SOCKET: a path, or "@" and an abstract name."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        """Returns the datagrams since the last call."""
        datagrams: list[str] = []
        while True:
            try:
                datagrams.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return datagrams

    def close(self) -> None:
        self._socket.close()
        if not self.address.startswith("@") and os.path.exists(self.address):
            os.unlink(self.address)
