"""Turns workers' frames into events, and answers `hello`.

Deltas of one worker are gathered over several frames.
"""

from __future__ import annotations

import logging

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.core.state import State
from mlxpool.broker.metrics import Counters
from mlxpool.broker.processes.remote_workers import RemoteWorkers
from mlxpool.broker.processes.supervisor import Supervisor
from mlxpool.broker.transport.peers import Peer
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.deltas import Delta, Deltas, unpack_deltas
from mlxpool.common.protocol.frames import Message, encoded
from mlxpool.common.protocol.from_worker import Hello
from mlxpool.common.protocol.to_worker import Stop, Who

log = logging.getLogger("mlxpool.broker")

MAX_MESSAGES = 256  # most messages read before other sockets are read
MAX_ROWS = 512  # most deltas gathered before the core gets them


class WorkerIngress:
    """Reads the back socket (workers). Owned by the broker's thread."""

    def __init__(
        self,
        sessions: WorkerSessions,
        supervisor: Supervisor,
        remote: RemoteWorkers,
        state: State,
        perform: Perform,
        counters: Counters,
    ) -> None:
        """`supervisor` knows the tokens of its own workers; `remote` admits all other workers."""
        self._peers = sessions.peers
        self._sessions = sessions
        self._supervisor = supervisor
        self._remote = remote
        self._state = state
        self._perform = perform
        self._counters = counters
        self._rows: list[Delta] = []  # deltas read from the socket that the core has not handled
        self._rows_epoch = 0  # epoch of the worker that sent `_rows`

    def read(self, now: float) -> bool:
        """Handles at most MAX_MESSAGES messages. Returns whether none is left."""
        for _ in range(MAX_MESSAGES):
            received = self._peers.receive(now)
            if received is None:
                break
            self.on_message(*received, now)
        self.flush_rows(now)
        return received is None

    def read_all(self, max_rounds: int, now: float) -> None:
        """Handles all waiting frames of workers in at most `max_rounds` calls of `read`."""
        for _ in range(max_rounds):
            if self.read(now):
                return

    def on_message(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self._counters.auth_failures += 1
            self._peers.disconnect(peer)
            return
        try:
            message = frames.decode(parts, max_body=frames.MAX_BACK_BODY)
            if message.kind == Hello.kind:
                hello = Hello.parse(message.body)
                self.flush_rows(now)
                self._on_hello(peer, hello, now)
                return
            epoch, rows, event = self._current_epoch(peer, message), None, None
            if epoch is not None and message.kind == Deltas.kind:
                rows = unpack_deltas(message)
            elif epoch is not None:
                event = ev.of_worker(epoch, message)
        except (PoolError, TypeError, ValueError) as error:
            self._counters.bad_frames += 1
            log.warning("bad frame from a worker", extra={"peer": peer.owner, "why": str(error)})
            return
        if epoch is None:
            self._counters.fenced += 1
        elif rows is not None:
            self._gather(epoch, rows, now)
        elif event is not None:
            self.flush_rows(now)
            self._perform(event, now)

    def _gather(self, epoch: int, rows: list[Delta], now: float) -> None:
        """Gathers the deltas of a worker for a short time, so that clients get fewer frames."""
        if epoch != self._rows_epoch:
            self.flush_rows(now)
            self._rows_epoch = epoch
        self._rows += rows
        if len(self._rows) >= MAX_ROWS:
            self.flush_rows(now)

    def flush_rows(self, now: float) -> None:
        """Gives the gathered deltas to the core."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._perform(ev.WorkerDeltas(self._rows_epoch, rows), now)

    def _current_epoch(self, peer: Peer, message: Message) -> int | None:
        """Returns the epoch of a connection; None if the message has another epoch.

        Requests a `hello` from a connection without an epoch.
        """
        epoch = self._sessions.epoch(peer.number)
        if epoch is None:
            self._peers.send(peer.number, encoded(Who()))
        return epoch if epoch == message.header.epoch else None

    # ---- hello -------------------------------------------------------------------------------

    def _on_hello(self, peer: Peer, hello: Hello, now: float) -> None:
        """Welcomes a worker that this broker started, or admits a worker of another supervisor."""
        next_token = self._supervisor.accepts(hello.slot, hello.token)
        if next_token is None:
            try:
                self._remote.admit(peer, hello, now)
            except PoolError as error:
                self._refuse(peer, hello, error)
            return
        self._sessions.open(hello.slot, peer.number)
        self._perform(ev.WorkerHello(hello.slot, hello, next_token), now)
        worker = self._state.worker_in(hello.slot)
        if worker is not None:
            self._sessions.welcome(peer.number, worker.epoch)

    def _refuse(self, peer: Peer, hello: Hello, error: PoolError) -> None:
        """Refuses the `hello` of a worker, and sends the worker the reason.

        The worker then ends immediately, instead of waiting for another broker.
        """
        self._counters.auth_failures += 1
        fields = {"slot": hello.slot, "peer": peer.owner, "why": error.message}
        log.warning("hello refused", extra=fields)
        self._peers.send(peer.number, encoded(Stop(error=error.body())))
