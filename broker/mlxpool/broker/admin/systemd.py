"""What a service manager is told: systemd's notify protocol, over a datagram socket it names.

The broker's loop calls `turned` in each turn, and nobody else does: a loop that hangs sends no
watchdog, whatever other threads still do.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from mlxpool.common.closing import Closing

log = logging.getLogger("mlxpool.broker")

SOCKET, WATCHDOG, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
STATUS_EVERY = 10.0  # seconds, for a status that has changed


class Notify(Closing):
    """Says nothing, and costs nothing, where nobody asked for it."""

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        """`address`: a path, or "@" and a name without a file. `watchdog`: seconds; 0: none."""
        self._socket: socket.socket | None = None
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if address:
            kind = socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)
            self._socket = socket.socket(socket.AF_UNIX, kind)
            self._socket.setblocking(False)
        # Half of the time leaves room for one turn that is late.
        self._every = watchdog / 2 if watchdog and address else math.inf
        self._ping_at = self._status_at = 0.0  # at once
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> Notify:
        """As the service manager asked, and the variables are gone: workers are not its service."""
        given = os.environ if environment is None else environment
        address = given.pop(SOCKET, "")
        microseconds, pid = given.pop(WATCHDOG, ""), given.pop(WATCHDOG_PID, "")
        if address and address[0] not in "/@":
            log.warning("no such service manager", extra={"socket": address})
            return cls()
        ours = not pid or pid == str(os.getpid())
        asked = ours and microseconds.isascii() and microseconds.isdecimal()
        return cls(address, int(microseconds) / 1e6 if asked else 0.0)

    def ready(self) -> None:
        """It serves; or it has read its settings anew."""
        self._send("READY=1")

    def reloading(self) -> None:
        """It reads its settings; `ready` follows, whatever comes of it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def turned(self, status: Callable[[], str], now: float) -> None:
        """The loop is at this point; `status` is asked for when it is time for one."""
        if now >= self._ping_at and self._every < math.inf:
            self._ping_at = now + self._every
            self._send("WATCHDOG=1")
        if now >= self._status_at and self._socket is not None:
            self._status_at = now + STATUS_EVERY
            if (said := status()) != self._status:
                self._status = said
                self._send(f"STATUS={said}")

    def next_wake(self) -> float:
        """When `turned` has something to say at the latest; infinity without a watchdog."""
        return self._ping_at if self._every < math.inf else math.inf

    def _send(self, text: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:  # it is not there, or has not read: the next time is soon
            log.debug("service manager not told", extra={"what": text, "why": str(error)})

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
