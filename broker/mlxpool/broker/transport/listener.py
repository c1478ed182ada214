"""A reserve of free file descriptors: without one for an ipc client, libzmq aborts the process.

libzmq's thread also accepts connections while the broker's thread waits for a CPU. A crowd of
clients that exhausts the descriptors in that time still ends the broker.

If descriptors become scarce, the broker closes connections without live streams, the newest first.
If that does not suffice, it unbinds the front's endpoints until enough descriptors are free again.
Then libzmq closes all connections of these endpoints, and clients reconnect and retry.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import KeyPair

log = logging.getLogger("mlxpool.broker")

UNBIND_ABOVE = 0.8  # share of all descriptors: above it the endpoints are unbound
END_IDLE_ABOVE = 0.65  # above this share idle connections end; kept BURST below UNBIND_ABOVE
END_IDLE_SHARE = 0.1  # share of all descriptors that is freed in addition to the excess
BURST = 128  # connections that libzmq may accept before the next count
MAX_EVENTS = 256  # most events of the monitor per iteration of the loop
BIND_BELOW = 0.6
RECOUNT_AFTER = 0.02  # new connections, as a share of all descriptors, that cause a count
COUNT_INTERVAL = 1.0  # least seconds between two counts, unless RECOUNT_AFTER applies


def backlog_of(limit: int) -> int:
    """Returns the listen backlog of the sockets: 1 % of the descriptors, within bounds.

    libzmq's thread may accept the whole backlog each time it runs. It runs several times while the
    broker's thread waits for a CPU.
    """
    return max(3, min(sockets.BACKLOG, limit // 100))


class Listener:
    """The endpoints of the front socket, and the guard of its descriptors.

    Owned by the broker's thread, like the socket.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], first: str, limit: int, key: KeyPair | None = None
    ) -> None:
        """`first`: the endpoint that is already bound. `limit`: the most open descriptors.

        With a `key` tcp uses CURVE.
        """
        self.socket = socket
        self.key = key
        self.endpoints = [first]
        self.limit = limit
        self.unbound = False
        self.times_unbound = 0
        self._end_idle_above = min(END_IDLE_ABOVE * limit, UNBIND_ABOVE * limit - BURST)
        self.busy: Callable[[], set[int]] = set  # descriptors of connections with live streams
        self.on_ended: Callable[[int, float], None] = lambda descriptor, now: None
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connected: dict[int, None] = {}  # descriptors in the order of acceptance
        self._accepted = 0  # connections accepted since the last count
        self._count_at = 0.0

    def bind(self, endpoint: str) -> None:
        """Adds an endpoint to the front socket. Raises OSError with the name of the endpoint."""
        self.endpoints.append(sockets.bind(self.socket, endpoint, self.key))

    def on_accepted(self, now: float) -> None:
        """Handles the events of the socket's monitor: accepted and ended connections."""
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_EVENTS):
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
                self._connected.pop(event["value"], None)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._connected[event["value"]] = None
                    self._accepted += 1
                else:
                    self.on_ended(event["value"], now)
        self.check(now)

    def check(self, now: float) -> None:
        """Counts the open descriptors, if a count is due, and frees some if they are scarce.

        To free descriptors, it closes idle connections or unbinds the endpoints. It binds the
        endpoints again once enough descriptors are free.
        """
        if self._accepted <= RECOUNT_AFTER * self.limit and now < self._count_at:
            return
        self._accepted, self._count_at = 0, now + COUNT_INTERVAL
        used = count_open()
        if not self.unbound and used > UNBIND_ABOVE * self.limit:
            self._unbind()
            log.warning("front shut: descriptors are short", extra={"used": used, "of": self.limit})
        elif not self.unbound and used > self._end_idle_above:
            self._end_idle(math.ceil(used - self._end_idle_above + END_IDLE_SHARE * self.limit))
        elif self.unbound and used < BIND_BELOW * self.limit:
            self._bind()
            log.info("front open again", extra={"used": used, "of": self.limit})

    def next_wake(self) -> float:
        """Returns the time of the next `check`; infinity while the endpoints are bound.

        While they are bound, `on_accepted` calls `check`.
        """
        return self._count_at if self.unbound else math.inf

    def unbind_now(self, now: float) -> None:
        """Unbinds the endpoints for COUNT_INTERVAL seconds, even if enough descriptors are free."""
        self._count_at = now + COUNT_INTERVAL
        if not self.unbound:
            self._unbind()

    def _end_idle(self, wanted: int) -> None:
        """Closes `wanted` connections without live streams, the newest first."""
        busy, endpoints = self.busy(), set(self.endpoints)
        newest = [
            descriptor_ for descriptor_ in reversed(self._connected) if descriptor_ not in busy
        ][:wanted]
        for descriptor in newest:
            end_accepted(descriptor, endpoints)
            del self._connected[descriptor]
        log.warning(
            "descriptors are short: idle connections ended",
            extra={"ended": len(newest), "busy": len(busy), "of": self.limit},
        )

    def _unbind(self) -> None:
        for endpoint in self.endpoints:
            self.socket.unbind(endpoint)
        self._connected.clear()  # libzmq closes accepted connections together with the endpoint
        self.unbound = True
        self.times_unbound += 1

    def _bind(self) -> None:
        for endpoint in self.endpoints:
            sockets.bind(self.socket, endpoint, self.key)
        self.unbound = False

    def close(self) -> None:
        """Closes the monitor. The owner of the socket closes the socket."""
        self.socket.disable_monitor()
        self.monitor.close()


# ---- descriptors of accepted connections ---------------------------------------------------------
#
# libzmq cannot close a single connection, so the broker shuts down the socket of the connection.


def inode_of(descriptor: int) -> int:
    """Returns a number that changes when the descriptor is reused; -1 if it is closed."""
    try:
        return os.fstat(descriptor).st_ino if descriptor >= 0 else -1
    except OSError:
        return -1


def has_ended(descriptor: int, inode: int) -> bool:
    """Returns whether the connection of a descriptor was closed, by the broker or its client."""
    if inode_of(descriptor) != inode:
        return True
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return True
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.detach()


def count_open() -> int:
    """Returns the number of open descriptors of this process."""
    return len(os.listdir("/dev/fd"))


def shut_down(descriptor: int, inode: int) -> None:
    """Shuts down the connection of a descriptor, if the descriptor still has this inode."""
    if descriptor < 0 or inode_of(descriptor) != inode:
        return
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        if _endpoints(connection):
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client closed it meanwhile
        pass
    finally:
        connection.detach()


def end_accepted(descriptor: int, endpoints: set[str]) -> None:
    """Shuts down the connection of a descriptor, if one of these endpoints accepted it."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # not a socket, or closed meanwhile
        return
    try:
        if _endpoints(connection) & endpoints:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the client closed it meanwhile
        pass
    finally:
        connection.detach()


def accepted(endpoints: set[str]) -> Iterator[tuple[int, socket.socket]]:
    """Yields (descriptor, socket) of each connection that was accepted on these endpoints."""
    for name in os.listdir("/dev/fd"):
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:  # not a socket, or closed meanwhile
            continue
        try:
            if _endpoints(connection) & endpoints:
                yield int(name), connection
        finally:
            connection.detach()


def _endpoints(connection: socket.socket) -> set[str]:
    """Returns the endpoints that may have accepted a connection, wildcard addresses included."""
    try:
        if connection.type != socket.SOCK_STREAM or _is_listening(connection):
            return set()
        own = connection.getsockname()
    except OSError:
        return set()
    if isinstance(own, tuple):
        host = f"[{own[0]}]" if ":" in own[0] else own[0]
        return {f"tcp://{name}:{own[1]}" for name in (host, "0.0.0.0", "[::]")}
    return {f"ipc://{own}"}


def _is_listening(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
