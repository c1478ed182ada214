"""The broker's own key, the allow-list and the ZAP handler: what the sockets are made with."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from mlxpool.broker.security.keyring import Keyring
from mlxpool.broker.security.zap import ZapHandler
from mlxpool.broker.transport.peers import Authorize
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.transport import keys

log = logging.getLogger("mlxpool.broker")

ROLES = {"front": "client", "back": "worker", "admin": "admin"}  # by socket


class AccessControl:
    """Without a secret key it checks nothing: sockets are on ipc and the loopback alone."""

    def __init__(
        self,
        config: PoolConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        on_refusal: Callable[[], None],
    ) -> None:
        """Raises BadKey. Make it before any socket is bound."""
        self.key = keys.read(config.secret_key, "server") if config.secret_key else None
        self.keyring = Keyring(config.keys)
        if config.keys and self.key is None:
            log.warning("keys are listed, but without secret_key nobody is asked for one")
        self.zap = ZapHandler(context, self.keyring, on_refusal) if self.key else None

    def domain(self, socket: str) -> str:
        """The ZAP domain of one of the pool's sockets; "": its peers are not authenticated."""
        return ROLES[socket] if self.key else ""

    def authorize(self, socket: str) -> Authorize | None:
        """Finds the owner of a message's sender; None when every connection is allowed."""
        return self.keyring.authorize(ROLES[socket]) if self.key else None

    def close(self) -> None:
        if self.zap is not None:
            self.zap.close()
