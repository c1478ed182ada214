"""Workers of other supervisors ("remote"): their admission, observation and end.

The broker has only the connection of a remote worker, not its process. If the connection ends, or
heartbeats and progress show a hang, the worker is fenced, and another worker resumes its streams. A
fenced worker connects again and is then treated as a new worker.
"""

from __future__ import annotations

import math
import os
import secrets
import struct
from collections.abc import Callable, Iterator

import zmq
from msgspec import Struct, field

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.core.state import State
from mlxpool.broker.processes.supervisor import OBSERVE_INTERVAL
from mlxpool.broker.security.keyring import KEY, UID
from mlxpool.broker.transport.listener import shut_down
from mlxpool.broker.transport.peers import Peer
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.liveness import Sample
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.config.model_names import fault_of_name
from mlxpool.common.errors import BadRequest, ModelUnavailable, Unauthorized
from mlxpool.common.progress import PHASES, ProgressReading
from mlxpool.common.protocol.frames import encoded
from mlxpool.common.protocol.from_worker import Beat, Hello, ProgressSample
from mlxpool.common.protocol.to_worker import Stop

MAX_REMOTE_WORKERS = 4096
MAX_MODELS = 10_000  # number of models from which on a worker may not add a new model


class RemoteSlot(Struct, eq=False):
    """The slot of a remote worker.

    The worker must send `token` when it next connects to the slot.
    """

    name: str
    model: str
    number: int  # the number of its connection
    token: str = field(default_factory=lambda: secrets.token_hex(16))


class RemoteSlots:
    """The slots of remote workers. Owned by the broker's thread."""

    def __init__(self, back: zmq.Socket[bytes]) -> None:
        self.by_name: dict[str, RemoteSlot] = {}
        self._observe_at = 0.0
        self._back = back
        self.monitor: zmq.Socket[bytes] = back.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def find(self, number: int, token: str) -> RemoteSlot | None:
        """Returns the slot of a worker that sends `hello` again; None for a new worker.

        The worker is recognised by its connection `number`, or by the newest token of the slot.
        """
        for slot in self.by_name.values():
            if slot.number == number or secrets.compare_digest(slot.token.encode(), token.encode()):
                return slot
        return None

    def fill(self, name: str, model: str, number: int) -> RemoteSlot:
        """Creates the slot `name`, with the worker of `model` on connection `number`."""
        self.by_name[name] = slot = RemoteSlot(name, model, number)
        return slot

    def disconnected(self) -> set[int]:
        """Returns the broker's descriptors of connections that ended since the last call."""
        ended = set()
        try:
            while True:
                _, descriptor = struct.unpack("=hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                ended.add(descriptor)
        except zmq.Again:
            return ended

    def due(self, now: float) -> Iterator[RemoteSlot]:
        """Yields all slots if an observation is due, else nothing."""
        if self.by_name and now >= self._observe_at:
            self._observe_at = now + OBSERVE_INTERVAL
            yield from list(self.by_name.values())

    def next_wake(self) -> float:
        return self._observe_at if self.by_name else math.inf

    def close(self) -> None:
        """Closes the monitor, before the back socket is closed."""
        self._back.disable_monitor()
        self.monitor.close()


def model_of(hello: Hello) -> str | None:
    """Returns the model that a worker of another supervisor wants to serve, by its `hello`.

    Returns None if the `hello` names a slot, no model, or a model with an invalid name.
    """
    name = hello.model
    return None if hello.slot or name is None or fault_of_name(name) is not None else name


def sample_of(beat: Beat) -> Sample:
    """Returns a sample made from a heartbeat. Pure.

    If the heartbeat has no phase, the worker is loading.
    """
    phase = "load" if beat.phase is None else beat.phase
    if phase not in PHASES:
        return Sample(ProgressReading("decode"))
    step = beat.look or ProgressSample()
    look = ProgressReading(
        phase, 0, beat.progress, step.tokens, step.fresh, step.usual_token_ns, step.usual_step_ns
    )
    return Sample(look)


class RemoteWorkers:
    """Admits, observes and stops remote workers. Owned by the broker's thread."""

    def __init__(
        self,
        sessions: WorkerSessions,
        state: State,
        perform: Perform,
        *,
        read_pending: Callable[[float], None],
        stopping: Callable[[], bool],
        local_workers: bool,
    ) -> None:
        """`read_pending` handles waiting messages of the back socket.

        `stopping` returns whether the broker ends. `local_workers`: this broker starts workers
        itself.
        """
        self.slots = RemoteSlots(sessions.peers.socket)
        self._sessions = sessions
        self._state = state
        self._perform = perform
        self._read_pending = read_pending
        self._stopping = stopping
        self._local_workers = local_workers

    def admit(self, peer: Peer, hello: Hello, now: float) -> None:
        """Admits a worker whose `hello` names no local slot.

        Raises PoolError to refuse the worker.
        """
        model = model_of(hello)
        if model is None:
            raise Unauthorized("no slot of this broker has this token")
        self._check_authorized(peer)
        self._check_limits(model)
        known = self.slots.find(peer.number, hello.token)
        if known is not None and known.model != model:
            raise BadRequest(f"this connection serves {known.model!r} already; use another")
        if known is not None:
            name = known.name
            token = self.slots.fill(name, model, peer.number).token
            event: ev.Event = ev.WorkerHello(name, hello, token)
        else:
            name = self._state.registry.remote_slot_name(model)
            token = self.slots.fill(name, model, peer.number).token
            event = ev.WorkerDialled(name, model, hello, token)
        self._sessions.open(name, peer.number)
        self._perform(event, now)
        worker = self._state.worker_in(name)
        if worker is None:
            self.slots.by_name.pop(name, None)
            self._sessions.release(name)
        else:
            self._sessions.welcome(peer.number, worker.epoch)

    def _check_authorized(self, peer: Peer) -> None:
        """Raises Unauthorized if the peer has no worker's key.

        On ipc the broker's own user needs no key, unless this broker starts workers itself.
        """
        if peer.user.startswith(KEY) and peer.admitted:
            return
        if self._local_workers:
            raise Unauthorized(
                "this broker starts its own workers and takes no other without a key: dial a tcp"
                " endpoint of `back` with a worker's key, or run `mlxpool broker` in its place"
            )
        if peer.owner != f"{UID}{os.getuid()}":
            raise Unauthorized(
                f"over ipc workers must be of the broker's own user {os.getuid()}, this one is"
                f" {peer.owner}; dial a tcp endpoint of `back` with a worker's key"
            )

    def _check_limits(self, model: str) -> None:
        if len(self.slots.by_name) >= MAX_REMOTE_WORKERS:
            raise ModelUnavailable(
                f"{MAX_REMOTE_WORKERS} workers have dialled in, which is the maximum"
            )
        known = self._state.registry.names.known
        if model not in known and len(known) >= MAX_MODELS:
            raise ModelUnavailable(f"there are {MAX_MODELS} models, which is the maximum")

    # ---- ends ----------------------------------------------------------------------------------

    def stop(self, slot: str, now: float) -> bool:
        """Sends `Stop` to a remote worker and fences it. Returns False if the worker is not remote.

        If the worker is to be replaced, or was condemned for a fault, the `Stop` asks it to connect
        again. While the broker ends, no `Stop` is sent, because the worker waits for the next
        broker.
        """
        if slot not in self.slots.by_name:
            return False
        worker = self._state.worker_in(slot)
        if worker is not None and not self._stopping():
            again = worker.replace or worker.state is not WorkerState.STOPPING
            self._sessions.send(slot, encoded(Stop(again=again), epoch=worker.epoch))
        self._end(slot, exit_causes.STOPPED, now)
        return True

    def _end(self, slot: str, cause: str, now: float, *, disconnect: bool = False) -> None:
        if self.slots.by_name.pop(slot, None) is None:
            return
        peer = self._sessions.close(slot)
        if disconnect and peer is not None:
            shut_down(peer.descriptor, peer.inode)
        self._perform(ev.WorkerExited(slot, cause), now)

    def on_disconnected(self, now: float) -> None:
        """Handles ended connections: reads their last messages, then reports the lost workers."""
        ended = self.slots.disconnected()
        peers = self._sessions.peers.by_number
        for slot in list(self.slots.by_name.values()):
            peer = peers.get(slot.number)
            if peer is None or peer.gone or peer.descriptor in ended:
                self._read_pending(now)
                self._end(slot.name, exit_causes.CONNECTION_ENDED, now)

    def revoke(self, user: str, now: float) -> None:
        """Disconnects the workers whose handshake had this user id."""
        for slot in list(self.slots.by_name.values()):
            peer = self._sessions.peers.by_number.get(slot.number)
            if peer is not None and peer.user == user:
                self._end(slot.name, exit_causes.KEY_REVOKED, now, disconnect=True)

    # ---- observation ---------------------------------------------------------------------------

    def observe(self, now: float) -> None:
        """Makes the core judge the workers by their heartbeats."""
        for slot in self.slots.due(now):
            worker = self._state.worker_in(slot.name)
            if worker is not None:
                sample = sample_of(worker.beat)
                self._perform(ev.Looked(slot.name, sample, OBSERVE_INTERVAL), now)
