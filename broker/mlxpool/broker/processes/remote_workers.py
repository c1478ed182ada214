"""Lets workers of other supervisors in, looks at them, and notices when they are gone."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from mlxpool.broker.edge.memory_guard import cut
from mlxpool.broker.edge.peers import Peer
from mlxpool.broker.interface import events as ev
from mlxpool.broker.processes.remote_slots import MOST, TICK, Remotes, model_of, sample_of
from mlxpool.broker.security.keyring import KEY, UID
from mlxpool.broker.workers.worker_states import WorkerState
from mlxpool.common.errors import BadRequest, ModelUnavailable, Unauthorized
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.to_broker import Hello

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

log = logging.getLogger("mlxpool.broker")

NAMES = 10_000  # models that there may be before workers bring no more
DRY = 64  # turns of reading, at most, before a worker's end is told


class DialIn:
    """Part of the edge: owned by the broker's one thread."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.remotes = Remotes(broker.back.socket)

    def hello(self, peer: Peer, message: Message, now: float) -> None:
        """A worker without a slot of ours introduced itself. Raises PoolError when it may not."""
        broker, name = self.broker, model_of(message)
        if name is None:
            raise Unauthorized("no slot of this broker has this token")
        self._check_may(peer)
        self._check_room(name)
        known = self.remotes.known(peer.number, str(message.body.get("token")))
        if known is not None and known.model != name:
            raise BadRequest(f"this connection serves {known.model!r} already; use another")
        parsed = Hello.parse(message.body)
        if known is not None:
            self._lay_down(known.slot, peer.number)
            remote = self.remotes.add(known.slot, name, peer.number)
            event: ev.Event = ev.WorkerHello(remote.slot, parsed, remote.token)
        else:
            slot_name = broker.core.state.registry.remote_slot_name(name)
            remote = self.remotes.add(slot_name, name, peer.number)
            event = ev.WorkerDialled(remote.slot, name, parsed, remote.token)
        broker.from_workers.peers[remote.slot] = peer.number
        broker.perform(event, now)
        slot = broker.core.state.registry.slots.get(remote.slot)
        if slot is None or slot.worker is None:
            self.remotes.by_slot.pop(remote.slot, None)
            self._lay_down(remote.slot, peer.number)
        else:
            broker.from_workers.epochs[peer.number] = slot.worker.epoch

    def _check_may(self, peer: Peer) -> None:
        """A worker's key lets it in; on ipc our own user, if this broker starts none itself."""
        if peer.user.startswith(KEY) and peer.admitted:
            return
        if self.broker.config.local_workers:
            raise Unauthorized(
                "this broker starts its own workers and takes no other without a key: dial a tcp"
                " endpoint of `back` with a worker's key, or run `mlxpool broker` in its place"
            )
        if peer.owner != f"{UID}{os.getuid()}":
            raise Unauthorized(
                f"over ipc workers must be of the broker's own user {os.getuid()}, this one is"
                f" {peer.owner}; dial a tcp endpoint of `back` with a worker's key"
            )

    def _check_room(self, name: str) -> None:
        known = self.broker.core.state.registry.names.known
        if len(self.remotes.by_slot) >= MOST:
            raise ModelUnavailable(f"{MOST} workers have dialled in, as many as there may be")
        if name not in known and len(known) >= NAMES:
            raise ModelUnavailable(f"there are {NAMES} models, as many as there may be")

    def _lay_down(self, slot: str, fresh: int = 0) -> Peer | None:
        """The slot's connection counts no more; returns its peer, if it is another than `fresh`."""
        number = self.broker.from_workers.peers.pop(slot, 0)
        self.broker.from_workers.epochs.pop(number, None)
        peer = self.broker.back.by_number.get(number)
        if peer is None or number == fresh:
            return None
        self.broker.back.forget(number)
        return peer

    # ---- the end of one ------------------------------------------------------------------------

    def stop(self, slot: str, now: float) -> bool:
        """Ask it to go, and be done with it: it is fenced. False for a worker of ours.

        One that did not end its work is asked to come again. When the broker itself goes, nobody
        is asked: the workers wait for the next one.
        """
        if slot not in self.remotes.by_slot:
            return False
        worker = self.broker.core.state.registry.slots[slot].worker
        if worker is not None and not self.broker.stopping:
            again = worker.replace or worker.state is not WorkerState.STOPPING
            parts = frames.encode(Header(kinds.STOP, None, worker.epoch), {"again": again})
            self.broker.back.send(self.broker.from_workers.peers[slot], parts)
        self._ended(slot, "stopped", now)
        return True

    def _ended(self, slot: str, cause: str, now: float, *, hang_up: bool = False) -> None:
        if self.remotes.by_slot.pop(slot, None) is None:
            return
        peer = self._lay_down(slot)
        if hang_up and peer is not None:
            cut(peer.descriptor, peer.inode)
        self.broker.perform(ev.WorkerExited(slot, cause), now)

    def somebody_left(self, now: float) -> None:
        """Connections have ended: what came on them is read before their workers are lost."""
        ended = set(self.remotes.cut_off())
        here = self.broker.back.by_number
        for remote in list(self.remotes.by_slot.values()):
            peer = here.get(remote.number)
            if peer is None or peer.gone or peer.descriptor in ended:
                self.broker.from_workers.read_all(DRY, now)
                self._ended(remote.slot, "its connection ended", now)

    def revoked(self, public: str, now: float) -> None:
        """Workers with this key are cut off, at once."""
        for remote in list(self.remotes.by_slot.values()):
            peer = self.broker.back.by_number.get(remote.number)
            if peer is not None and peer.user == f"{KEY}{public}":
                self._ended(remote.slot, "its key was revoked", now, hang_up=True)

    # ---- between -------------------------------------------------------------------------------

    def watch(self, now: float) -> None:
        """Have the core judge them by their beats."""
        for remote in self.remotes.due(now):
            worker = self.broker.core.state.registry.slots[remote.slot].worker
            if worker is not None:
                self.broker.perform(ev.Looked(remote.slot, sample_of(worker.beat), TICK), now)
