"""Messages to a service manager by systemd's notify protocol, over its datagram socket.

Only the broker's loop calls `on_turn`, in each iteration. So a hung loop sends no watchdog message,
even if other threads still run.
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
STATUS_INTERVAL = 10.0  # seconds between two checks for a changed status


class ServiceNotifier(Closing):
    """Sends messages to a service manager. Does nothing without a service manager."""

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        """`address`: the path of the socket, or "@" and the name of an abstract socket.

        `watchdog`: the timeout of the manager's watchdog in seconds, or 0 if there is no watchdog.
        """
        self._socket: socket.socket | None = None
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if address:
            kind = socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)
            self._socket = socket.socket(socket.AF_UNIX, kind)
            self._socket.setblocking(False)
        # Half of the timeout, so that one late iteration does no harm.
        self._watchdog_interval = watchdog / 2 if watchdog and address else math.inf
        self._watchdog_at = self._status_at = 0.0  # 0: due immediately
        self._status = ""

    @classmethod
    def from_environment(
        cls, environment: MutableMapping[str, str] | None = None
    ) -> ServiceNotifier:
        """Creates a notifier from environment variables.

        Removes the variables, because workers must not inherit them.
        """
        variables = os.environ if environment is None else environment
        address = variables.pop(SOCKET, "")
        microseconds, pid = variables.pop(WATCHDOG, ""), variables.pop(WATCHDOG_PID, "")
        if address and address[0] not in "/@":
            log.warning("no such service manager", extra={"socket": address})
            return cls()
        ours = not pid or pid == str(os.getpid())
        has_watchdog = ours and microseconds.isascii() and microseconds.isdecimal()
        return cls(address, int(microseconds) / 1e6 if has_watchdog else 0.0)

    @property
    def enabled(self) -> bool:
        """True if there is a service manager."""
        return self._socket is not None

    def ready(self) -> None:
        """Reports to the service manager that the broker serves, or has reloaded its settings."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Reports to the service manager that the broker reloads its settings.

        A call of `ready` follows, also after a failed reload.
        """
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def on_turn(self, status: Callable[[], str], now: float) -> None:
        """Sends the messages that are due. `status` returns the text for a status message."""
        if now >= self._watchdog_at and self._watchdog_interval < math.inf:
            self._watchdog_at = now + self._watchdog_interval
            self._send("WATCHDOG=1")
        if now >= self._status_at and self._socket is not None:
            self._status_at = now + STATUS_INTERVAL
            if (text := status()) != self._status:
                self._status = text
                self._send(f"STATUS={text}")

    def next_wake(self) -> float:
        """Returns the time until which `on_turn` must be called; infinity without a watchdog."""
        return self._watchdog_at if self._watchdog_interval < math.inf else math.inf

    def _send(self, text: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:  # the manager's socket is closed or full; a message follows soon
            log.debug("service manager not told", extra={"what": text, "why": str(error)})

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
