"""Answers the `hello` of a worker: one that this broker started, or one that dialled in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.metrics.counters import Counters
from mlxpool.broker.transport.peers import Peer
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.content import encoded
from mlxpool.common.protocol.to_broker import Hello
from mlxpool.common.protocol.to_worker import Stop

log = logging.getLogger("mlxpool.broker")


class LocalWorkers(Protocol):
    def accepts(self, slot: str, token: str) -> str | None:
        """The token for the worker's next connection, if `token` opens this one."""


class RemoteWorkers(Protocol):
    def admit(self, peer: Peer, hello: Hello, now: float) -> None:
        """Raises PoolError when the worker is refused."""


class WorkerHandshake:
    """Owned by the broker's thread."""

    def __init__(
        self,
        sessions: WorkerSessions,
        local: LocalWorkers,
        remote: RemoteWorkers,
        worker: Callable[[str], Worker | None],
        perform: Perform,
        counters: Counters,
    ) -> None:
        """`worker` finds the worker of a slot in the core."""
        self._sessions = sessions
        self._local = local
        self._remote = remote
        self._worker = worker
        self._perform = perform
        self._counters = counters

    def on_hello(self, peer: Peer, hello: Hello, now: float) -> None:
        next_token = self._local.accepts(hello.slot, hello.token)
        if next_token is None:
            try:
                self._remote.admit(peer, hello, now)
            except PoolError as error:
                self._refuse(peer, hello, error)
            return
        self._sessions.open(hello.slot, peer.number)
        self._perform(ev.WorkerHello(hello.slot, hello, next_token), now)
        worker = self._worker(hello.slot)
        if worker is not None:
            self._sessions.welcome(peer.number, worker.epoch)

    def _refuse(self, peer: Peer, hello: Hello, error: PoolError) -> None:
        """Say why, so that the worker ends at once instead of waiting for another broker."""
        self._counters.auth_failures += 1
        fields = {"slot": hello.slot, "peer": peer.owner, "why": error.message}
        log.warning("hello refused", extra=fields)
        self._sessions.peers.send(peer.number, encoded(Stop(error=error.body())))
