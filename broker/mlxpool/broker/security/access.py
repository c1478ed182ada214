"""Access control of the sockets: the broker's own key, the allow-list and the ZAP handler."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from mlxpool.broker.security.keyring import KEY, UID, Keyring
from mlxpool.broker.transport.peers import Authorize
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.transport import keys

ADDRESS = "inproc://zeromq.zap.01"
MAX_PER_TURN = 64  # most requests answered before other sockets are read
LOG_INTERVAL = 1.0  # seconds between two log lines about refusals: a flood must not fill the disk
VERSION = b"1.0"
MIN_FIELDS = 6  # least number of fields of a request


class ZapHandler:
    """Answers libzmq's requests about new connections (ZAP, RFC 27). It never blocks.

    The handler must be bound before any endpoint. The domain of a request is the role of its
    endpoint. Owned by the broker's thread.
    """

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
        self._quiet_until = 0.0
        self._not_logged = 0

    def serve(self, now: float) -> None:
        """Answers the waiting requests."""
        for _ in range(MAX_PER_TURN):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number = request[1] if len(request) > 1 else b""
            user = self.user_id(request, now) if len(request) >= MIN_FIELDS else ""
            verdict = (b"200", b"OK") if user else (b"400", b"refused")
            self.socket.send_multipart([VERSION, number, *verdict, user.encode(), b""])

    def user_id(self, request: list[bytes], now: float) -> str:
        """Returns the user id for all messages of the connection; "" refuses the connection."""
        version, _, domain, address, _, mechanism, *credentials = request
        if version != VERSION:
            return ""
        if mechanism == b"NULL":
            # There is a secret key, so every tcp endpoint uses CURVE. This is an ipc connection;
            # its socket is in a folder of this user. The address is localhost:UID:GID:PID if the
            # kernel gives credentials.
            uid = address.decode("latin-1").split(":")[1:2]
            return f"{UID}{uid[0] if uid else 'unknown'}"
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        role = domain.decode("latin-1")
        if public and self.keyring.name(public, role) is not None:
            return f"{KEY}{public}"
        self._log_refusal(public, role, address.decode("latin-1"), now)
        return ""

    def _log_refusal(self, public: str, role: str, address: str, now: float) -> None:
        self.on_refusal()
        if now < self._quiet_until:
            self._not_logged += 1
            return
        self._quiet_until = now + LOG_INTERVAL
        fields = {"key": public, "as": role, "address": address, "untold": self._not_logged}
        log.warning("connection refused: its key is not in the allow-list", extra=fields)
        self._not_logged = 0

    def close(self) -> None:
        """Closes the handler. The sockets that use it must be closed before."""
        self.socket.close()


log = logging.getLogger("mlxpool.broker")

ROLES = {"front": "client", "back": "worker", "admin": "admin"}  # socket -> role of its peers


class AccessControl:
    """The access control of the broker's sockets.

    Without a secret key all clients may connect, but the sockets are local only.
    """

    def __init__(
        self,
        config: PoolConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        on_refusal: Callable[[], None],
    ) -> None:
        """Raises BadKey if the secret key cannot be read.

        Must be constructed before any socket is bound.
        """
        self.key = keys.read(config.secret_key, "server") if config.secret_key else None
        self.keyring = Keyring(config.keys)
        if config.keys and self.key is None:
            log.warning("keys are listed, but without secret_key nobody is asked for one")
        self.zap = ZapHandler(context, self.keyring, on_refusal) if self.key else None

    def domain(self, socket: str) -> str:
        """Returns the ZAP domain of a socket; "" if its connections are not authenticated."""
        return ROLES[socket] if self.key else ""

    def authorize(self, socket: str) -> Authorize | None:
        """Returns a function that maps user ids to owners of messages; None if all may send."""
        return self.keyring.authorize(ROLES[socket]) if self.key else None

    def close(self) -> None:
        if self.zap is not None:
            self.zap.close()
