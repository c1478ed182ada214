"""The admin socket: an answer for each command, and updates for subscribers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlxpool.broker.admin.commands import Commands
from mlxpool.broker.admin.subscriptions import Subscriptions
from mlxpool.broker.core.events import AnswerLater
from mlxpool.broker.metrics import Counters
from mlxpool.broker.transport.peers import Peers
from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol import admin, frames, from_client
from mlxpool.common.protocol.frames import Content, Header, Message, encoded
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.to_client import Failed

log = logging.getLogger("mlxpool.broker")

AskJobs = Callable[[str, Mapping[str, Any], Callable[[Content], None], float], None]
MAX_PER_TURN = 64  # most messages answered before other sockets are read


class AdminServer:
    """Answers each command with a message of the same kind, or with `error`.

    A client that sent `watch` gets an update every second.
    """

    def __init__(
        self,
        peers: Peers,
        commands: Commands,
        figures: Callable[[float], Mapping[str, Any]],
        after_scan: AnswerLater,
        after_reload: AnswerLater,
        ask_jobs: AskJobs,
        counters: Counters,
    ) -> None:
        """`after_scan` calls its argument once the models on the disk are known.

        `after_reload` reloads the settings and calls its argument once they are applied. `ask_jobs`
        performs an operation on jobs; it raises JobsOff if the broker keeps no jobs.
        """
        self.peers = peers
        self.subscriptions = Subscriptions(peers, figures)
        self._commands = commands
        self._after_scan = after_scan
        self._after_reload = after_reload
        self._ask_jobs = ask_jobs
        self._counters = counters

    def serve(self, now: float) -> None:
        """Answers at most MAX_PER_TURN of the messages that wait on the socket."""
        for _ in range(MAX_PER_TURN):
            received = self.peers.receive(now)
            if received is None:
                return
            peer, parts = received
            if peer.admitted:
                self._on_message(peer.number, parts, now)
            else:
                self._counters.auth_failures += 1
                self.peers.disconnect(peer)

    def _on_message(self, number: int, parts: list[bytes], now: float) -> None:
        try:
            message = frames.decode(parts)
        except frames.Garbage as garbage:
            self._send(number, encoded(Failed.of(garbage.error)))
            return
        if message.kind == admin.WATCH and self.subscriptions.accepts(number):
            self._guarded(partial(self.subscriptions.renew, number, message.header.id), now)
        elif message.kind == from_client.ListModels.kind:
            self._after_scan(partial(self._answer, number, message), now)
        elif message.kind == admin.RELOAD:
            self._after_reload(partial(self._answer, number, message), now)
        elif message.kind in job_operations.KINDS:
            self._about_jobs(number, message, now)
        else:
            self._answer(number, message, now)

    def _about_jobs(self, number: int, message: Message, now: float) -> None:
        """Starts an operator's command about jobs.

        Its answer is sent once the store has a result.
        """
        kind, id = message.kind, message.header.id

        def answer(content: Content) -> None:
            shown = kind if not isinstance(content, Failed) else content.kind
            try:
                header = Header(shown, id)
                self._send(number, frames.encode(header, content.body(), max_body=frames.MAX_FRAME))
            except PoolError as error:
                self._send(number, encoded(Failed.of(error), id))

        try:
            if kind in job_operations.CHANGING:
                log.info("operator", extra={"command": kind, **_named(message.body)})
            self._ask_jobs(kind, message.body, answer, now)
        except PoolError as refused:
            self._send(number, encoded(Failed.of(refused), id))

    def _answer(self, number: int, message: Message, now: float) -> None:
        id = message.header.id
        try:
            body = self._commands.handle(message, now)
            parts = frames.encode(Header(message.kind, id), body, max_body=frames.MAX_BLOB)
        except PoolError as refused:
            parts = encoded(Failed.of(refused), id)
        except Exception as bug:  # a bug in a command must not end the pool
            self._counters.internal_errors += 1
            parts = encoded(Failed.of(Internal(f"the admin command failed: {bug!r:.200}")), id)
        self._send(number, parts)

    def _send(self, number: int, parts: list[bytes]) -> None:
        self.peers.send(number, parts)
        if number not in self.subscriptions:
            self.peers.forget(number)

    def send_updates(self, now: float) -> None:
        """Sends updates to subscribers, if any is due."""
        self._guarded(self.subscriptions.send_due, now)

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except Exception:  # a bug in the figures must not end the pool
            self._counters.internal_errors += 1
            log.exception("a picture failed")


def _named(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns the id or key of the job that a command names, for the log."""
    id = body.get("job")
    return {"job": id.hex() if isinstance(id, bytes) else repr(body.get("key"))[:80]}
