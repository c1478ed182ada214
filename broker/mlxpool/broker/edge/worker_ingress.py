"""What workers send, and their ends: who they are, which epoch counts, rows gathered for the core.

Invariant: frames of workers are read before the end of a worker is reported, so nothing that a dead
worker managed to send is lost.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

from mlxpool.broker.edge.peers import Peer
from mlxpool.broker.interface import events as ev
from mlxpool.broker.processes.supervisor import Child
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol import deltas, frames, kinds, to_broker
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

log = logging.getLogger("mlxpool.broker")

DRAIN = 256  # messages read from one socket before the others get their turn
DRY = 0.25  # seconds for which other workers, or a last word, may keep a death from being told
GATHER = 512  # rows after which the core has them


class FromWorkers:
    """Part of the edge: owned by the broker's one thread."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.peers: dict[str, int] = {}  # slot -> number of its welcomed connection
        self.epochs: dict[int, int] = {}  # number of a welcomed connection -> its epoch
        self.watches: dict[int, Child] = {}  # descriptors that tell a worker's death
        self._noticed: dict[int, float] = {}  # descriptors of dead workers -> since when
        self._rows: list[Delta] = []  # taken from the socket, not yet by the core
        self._rows_of = 0  # the epoch of their worker

    def take(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self.broker.turn_away(self.broker.back, peer)
            return
        try:
            message = frames.decode(parts, max_body=frames.MAX_BACK_BODY)
            if message.kind == kinds.HELLO:
                self.take_rows(now)
                self._hello(peer, message, now)
                return
            event = self._event(peer, message)
        except (PoolError, TypeError, ValueError) as error:
            self.broker.core.state.counters.bad_frames += 1
            log.warning("bad frame from a worker", extra={"peer": peer.owner, "why": str(error)})
            return
        if event is None:
            self.broker.core.state.counters.fenced += 1
        elif isinstance(event, ev.WorkerDeltas):
            self._gather(event, now)
        else:
            self.take_rows(now)
            self.broker.perform(event, now)

    def _gather(self, event: ev.WorkerDeltas, now: float) -> None:
        """Rows wait for the next frame of the same worker, so that its clients get fewer frames."""
        if event.epoch != self._rows_of:
            self.take_rows(now)
        self._rows_of = event.epoch
        self._rows += event.rows
        if len(self._rows) >= GATHER:
            self.take_rows(now)

    def _event(self, peer: Peer, message: Message) -> ev.Event | None:
        epoch = self.epochs.get(peer.number)
        if epoch is None:
            self.broker.back.send(peer.number, frames.encode(Header(kinds.WHO)))
        if epoch is None or epoch != message.header.epoch:
            return None
        body, request_id = message.body, message.header.id or b""
        if message.kind == kinds.DELTAS:
            return ev.WorkerDeltas(epoch, deltas.unpack_deltas(message))
        if message.kind == kinds.BEAT:
            return ev.WorkerBeat(epoch, to_broker.Beat.parse(body))
        if message.kind == kinds.CREDIT:
            return ev.WorkerCredit(epoch, to_broker.Credit.parse(body))
        if message.kind == kinds.TOKENS:
            answer = to_broker.TokenizerAnswer(body, message.blobs)
            return ev.WorkerTokens(epoch, request_id, answer)
        if message.kind == kinds.YIELD:
            return ev.WorkerYield(epoch, to_broker.Yield.parse(body))
        if message.kind == kinds.BYE:
            return ev.WorkerBye(epoch, to_broker.Bye.parse(body))
        raise BadRequest(f"a worker cannot send the kind {message.kind!r:.40}")

    def _hello(self, peer: Peer, message: Message, now: float) -> None:
        slot = str(message.body.get("slot"))
        child = self.broker.supervisor.children.get(slot)
        token = str(message.body.get("token"))
        if child is None or not child.opens(token):
            try:
                self.broker.dial_in.hello(peer, message, now)
            except PoolError as error:
                self._refuse(peer, slot, error)
            return
        child.renew(token)
        before = self.peers.get(slot)
        if before is not None and before != peer.number:
            self.epochs.pop(before, None)
            self.broker.back.forget(before)
        self.peers[slot] = peer.number
        hello = to_broker.Hello.parse(message.body)
        self.broker.perform(ev.WorkerHello(slot, hello, child.token), now)
        worker = self.broker.core.state.registry.slots[slot].worker
        if worker is not None:
            self.epochs[peer.number] = worker.epoch

    def _refuse(self, peer: Peer, slot: str, error: PoolError) -> None:
        """Tell it why, so that it ends at once and need not wait for a broker that takes it."""
        self.broker.core.state.counters.auth_failures += 1
        about = {"slot": slot, "peer": peer.owner, "why": error.message}
        log.warning("hello refused", extra=about)
        parts = frames.encode(Header(kinds.STOP), {"error": error.body()})
        self.broker.back.send(peer.number, parts)

    def watch(self, child: Child) -> None:
        """Notice when it ends."""
        self.watches[child.watch] = child
        self.broker.poller.register(child.watch, zmq.POLLIN)

    def ended(self, descriptor: int, now: float) -> None:
        noticed = self._noticed.setdefault(descriptor, now)
        dry = self._read_dry(now)
        if now - noticed < DRY and not (dry and self._has_said_all(self.watches[descriptor].slot)):
            return  # it stays readable: the next turn goes on
        del self._noticed[descriptor]
        child = self.watches.pop(descriptor)
        self.broker.poller.unregister(descriptor)
        end = self.broker.supervisor.reap(child.slot)
        number = self.peers.pop(child.slot, None)
        if number is not None:
            self.epochs.pop(number, None)
            self.broker.back.forget(number)
        self.broker.perform(ev.WorkerExited(child.slot, end.cause, end.own, end.prefill), now)

    def _has_said_all(self, slot: str) -> bool:
        """A worker that leaves by itself says why; its death may be seen before its last word."""
        epoch = self.epochs.get(self.peers.get(slot, -1))
        worker = None if epoch is None else self.broker.core.state.workers.get(epoch)
        if worker is None or worker.said_bye or worker.error is not None:
            return True
        return not self.broker.supervisor.left_by_itself(slot)

    def sweep(self) -> None:
        """Forget connections that have ended and were no worker's, or no longer."""
        welcomed = set(self.peers.values())
        for peer in list(self.broker.back.by_number.values()):
            if peer.gone and peer.number not in welcomed:
                self.broker.back.forget(peer.number)

    def read_all(self, turns: int, now: float) -> None:
        """What workers have sent until now, within bounds."""
        for _ in range(turns):
            if self._read_dry(now):
                return

    def _read_dry(self, now: float) -> bool:
        """What a dead worker managed to send is read before its death is told, within bounds."""
        for _ in range(DRAIN):
            received = self.broker.back.receive(now)
            if received is None:
                break
            self.take(*received, now)
        self.take_rows(now)
        return received is None

    def take_rows(self, now: float) -> None:
        """Let the core have the rows that were read: those of many frames at once."""
        if self._rows:
            rows, self._rows = self._rows, []
            self.broker.perform(ev.WorkerDeltas(self._rows_of, rows), now)
