"""The broker's three sockets and their access control: front (clients), back (workers), admin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import zmq

from mlxpool.broker.security.access import AccessControl
from mlxpool.broker.transport.listener import Listener, backlog_of
from mlxpool.broker.transport.peers import MAX_BACKLOGS, Peers
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.transport import sockets

NAMES = ("front", "back", "admin")  # names of the ipc files in the run directory
IDLE_TIME = 20.0  # seconds after which a silent client without streams is forgotten
SWEEP_INTERVAL = IDLE_TIME / 4


class Endpoints(Closing):
    """The three bound sockets.

    Raises OSError with the name of an endpoint that cannot be bound, and BadKey for unusable keys.
    """

    def __init__(
        self, config: PoolConfig, descriptors: int, on_refusal: Callable[[], None]
    ) -> None:
        """`descriptors`: the most file descriptors that this process may open."""
        self._run_dir = config.run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.access = AccessControl(config, self._context, on_refusal)
        self._unlink()
        self.bound: dict[str, list[str]] = {}  # further endpoints of the back and admin sockets
        # A worker's exit is reported by its process or the end of its connection, not by a send.
        self.back = self._peers("back", config.back, sockets.BACKLOG, keep_gone=True)
        self.admin = self._peers("admin", config.admin, sockets.BACKLOG)
        self.front = self._peers("front", (), backlog_of(descriptors), max_backlogs=MAX_BACKLOGS)
        self.listener = Listener(self.front.socket, self.ipc("front"), descriptors, self.access.key)
        for endpoint in config.front:
            self.listener.bind(endpoint)

    @property
    def sockets(self) -> dict[str, zmq.Socket[bytes]]:
        """The sockets with a file in the run directory, by the name of the file."""
        named = zip(NAMES, (self.front, self.back, self.admin), strict=True)
        return {name: peers.socket for name, peers in named}

    def ipc(self, name: str) -> str:
        """Returns the ipc endpoint of a socket in the run directory."""
        return sockets.ipc(self._run_dir, name)

    def _peers(
        self,
        name: str,
        further: tuple[str, ...],
        backlog: int,
        *,
        keep_gone: bool = False,
        max_backlogs: float = math.inf,
    ) -> Peers:
        domain = self.access.domain(name)
        socket = sockets.router(self._context, self.ipc(name), backlog=backlog, domain=domain)
        self.bound[name] = [sockets.bind(socket, each, self.access.key) for each in further]
        authorize = self.access.authorize(name)
        return Peers(socket, authorize, keep_gone=keep_gone, max_backlogs=max_backlogs)

    def disconnect_user(self, user: str) -> None:
        """Ends every connection whose handshake had this user id."""
        for peers in (self.front, self.back, self.admin):
            peers.disconnect_user(user)

    def _unlink(self) -> None:
        for name in NAMES:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self._run_dir / f"{name}.ipc").unlink()

    def close(self) -> None:
        self.listener.close()
        for peers in (self.front, self.back, self.admin):
            peers.socket.close()
        self.access.close()
        self._context.term()
        self._unlink()


class IdlePeers:
    """Forgets idle connections, so that their memory is freed.

    Owned by the broker's thread. `has_link` returns whether the core knows a client's connection.
    """

    def __init__(
        self, front: Peers, sessions: WorkerSessions, has_link: Callable[[int], bool]
    ) -> None:
        self._front = front
        self._sessions = sessions
        self._has_link = has_link
        self._sweep_at = 0.0

    def next_wake(self) -> float:
        return self._sweep_at

    def sweep(self, now: float) -> None:
        """Forgets idle connections, if a sweep is due."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_INTERVAL
        for peer in list(self._front.by_number.values()):
            if now - peer.heard_at > IDLE_TIME and not self._has_link(peer.number):
                self._front.forget(peer.number)
        self._sessions.sweep()
