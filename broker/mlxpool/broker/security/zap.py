"""Answers libzmq's question whether a connection may come in (ZAP, RFC 27). Never blocks.

It is bound before any endpoint is. The domain of a connection is the role that its endpoint takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from mlxpool.broker.security.keyring import KEY, UID, Keyring

log = logging.getLogger("mlxpool.broker")

ADDRESS = "inproc://zeromq.zap.01"
AT_ONCE = 64  # questions answered before streams get their turn
QUIET = 1.0  # seconds between two lines about refusals: a flood of them must not fill the disk
VERSION = b"1.0"
FIELDS = 6  # of a question at least


class Zap:
    """Owned by the broker's one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keyring: Keyring,
        on_refusal: Callable[[], None],
    ) -> None:
        self.keyring = keyring
        self.on_refusal = on_refusal
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ADDRESS)
        self._silent_until = 0.0
        self._untold = 0

    def serve(self, now: float) -> None:
        """Answer what waits."""
        for _ in range(AT_ONCE):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number = question[1] if len(question) > 1 else b""
            user = self.judge(question, now) if len(question) >= FIELDS else ""
            verdict = (b"200", b"OK") if user else (b"400", b"refused")
            self.socket.send_multipart([VERSION, number, *verdict, user.encode(), b""])

    def judge(self, question: list[bytes], now: float) -> str:
        """The id that its messages will carry; "": it may not come in."""
        version, _, domain, address, _, mechanism, *credentials = question
        if version != VERSION:
            return ""
        if mechanism == b"NULL":
            # With a secret key all tcp is CURVE: this came on ipc, in a folder that is ours alone;
            # the address is localhost:UID:GID:PID where the kernel tells.
            uid = address.decode("latin-1").split(":")[1:2]
            return f"{UID}{uid[0] if uid else 'unknown'}"
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        role = domain.decode("latin-1")
        if public and self.keyring.name(public, role) is not None:
            return f"{KEY}{public}"
        self._refused(public, role, address.decode("latin-1"), now)
        return ""

    def _refused(self, public: str, role: str, address: str, now: float) -> None:
        self.on_refusal()
        if now < self._silent_until:
            self._untold += 1
            return
        self._silent_until = now + QUIET
        what = {"key": public, "as": role, "address": address, "untold": self._untold}
        log.warning("connection refused: its key is not in the allow-list", extra=what)
        self._untold = 0

    def close(self) -> None:
        """After the sockets that ask it."""
        self.socket.close()
