"""Sockets, child processes and timers around the core: the broker's one thread.

Invariant: frames of workers are read before the end of a worker is reported, so nothing that a dead
worker managed to send is lost.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket as sockets_of_the_system
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from mlxpool.broker import events as ev
from mlxpool.broker import record, snapshot, system
from mlxpool.broker.admin import Admin
from mlxpool.broker.core import Core
from mlxpool.broker.dial_in import DialIn
from mlxpool.broker.door import PERIOD, Door, backlog_of
from mlxpool.broker.guard import Guard, cut
from mlxpool.broker.lag import Lag
from mlxpool.broker.library import Library
from mlxpool.broker.notify import Notify
from mlxpool.broker.peers import Peer, Peers
from mlxpool.broker.premises import (
    BUILTIN,
    footprints,
    lock,
    places,
    raise_descriptor_limit,
    without_workers,
)
from mlxpool.broker.reload import Reloader
from mlxpool.broker.security.entrance import Entrance
from mlxpool.broker.security.keyring import KEY
from mlxpool.broker.security.quotas import Rates, milliseconds
from mlxpool.broker.supervisor import TICK, Child, Supervisor
from mlxpool.common import sockets, wire
from mlxpool.common.config import PoolConfig, check_run_dir
from mlxpool.common.errors import BadRequest, OverQuota, PoolError
from mlxpool.common.history import History
from mlxpool.common.wire import Delta, Header, Message

if TYPE_CHECKING:
    from mlxpool.broker.web import Web

log = logging.getLogger("mlxpool.broker")
requests_log = logging.getLogger("mlxpool.request")  # one line for each that ends

DRAIN = 256  # messages read from one socket before the others get their turn
FRONT_TURN = 0.001  # seconds for clients, then workers have theirs: a flood delays no stream
DRY = 0.25  # seconds for which other workers, or a last word, may keep a death from being told
GATHER = 512  # rows after which the core has them
RETRY = 0.01  # seconds until a full peer is tried again
FORGET = 20.0  # seconds after which a silent connection without streams is forgotten
SHARE = 0.8  # of the machine's memory, for all workers, when no limit is set
SMALL = 1024  # bytes of a message that only keeps streams going: ping, ack, cancel
RELOADED = 255  # no signal's number: settings have been read anew
LATE = 1.0  # seconds that a turn may take before it counts as our own lateness

SPOKEN_BY_CLIENTS = frozenset({wire.PING, wire.MODELS, wire.TOKENIZE, wire.DETOKENIZE})


class Broker:
    """Build it, `run` it; it ends at SIGTERM, SIGINT or the admin's `stop`."""

    def __init__(self, config: PoolConfig, reread: Callable[[], PoolConfig] | None = None) -> None:
        """`reread` makes the settings anew for a reload; without it they stay as they are."""
        check_run_dir(config.run_dir)
        self.notify = Notify.from_environment()
        if not config.local_workers:
            config = without_workers(config)
        self.descriptors = raise_descriptor_limit()
        self.config = config
        self.lock = lock(config.run_dir)
        self.web = _web(config.metrics) if config.metrics else None
        self.lag = Lag()
        self.boot = secrets.randbits(63) or 1
        memory = config.memory_limit or int(SHARE * system.memory_of_machine())
        self.core = Core(config, self.boot, footprints(config), memory, places(config))
        self.history = History("broker")
        self.started_at = time.monotonic()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.entrance = Entrance(config, self.context, self._refused)
        front, back, admin = (sockets.ipc(config.run_dir, n) for n in ("front", "back", "admin"))
        for name in ("front", "back", "admin"):
            (config.run_dir / f"{name}.ipc").unlink(missing_ok=True)
        self.endpoints: dict[str, list[str]] = {}  # beside those of the run directory
        self.back = self._peers("back", back, config.back)
        self.admin = Admin(self, self._peers("admin", admin, config.admin))
        self.front = self._peers("front", front, backlog=backlog_of(self.descriptors))
        self.door = Door(self.front.socket, front, self.descriptors, self.entrance.key)
        for endpoint in config.front:
            self.door.bind(endpoint)
        self.dial_in = DialIn(self)
        self.guard = Guard(self.door, self.front)
        self.supervisor = Supervisor(config, back)
        self.worker_peers: dict[str, int] = {}  # slot -> number of its welcomed connection
        self.epochs: dict[int, int] = {}  # number of a welcomed connection -> its epoch
        self.watches: dict[int, Child] = {}
        self.signals, self._signal_end = sockets_of_the_system.socketpair()
        self.signals.setblocking(False)
        self._signal_end.setblocking(False)
        # Models that others serve have no files here.
        self.library = Library(config if config.local_workers else replace(config, models={}))
        self.reloader = Reloader(self, reread, lambda: self._signal_end.send(bytes([RELOADED])))
        self.poller = zmq.Poller()
        for source in (
            self.back.socket,
            self.front.socket,
            self.admin.socket,
            self.door.monitor,
            self.dial_in.remotes.monitor,
            self.signals,
            self.library.news,
        ):
            self.poller.register(source, zmq.POLLIN)
        if self.web is not None:
            self.poller.register(self.web.desk.bell, zmq.POLLIN)
        if self.entrance.zap is not None:
            self.poller.register(self.entrance.zap.socket, zmq.POLLIN)
        self.bytes = Rates()  # that clients send
        self._rows: list[Delta] = []  # taken from the socket, not yet by the core
        self._noticed: dict[int, float] = {}  # descriptors of dead workers -> since when
        self._rows_of = 0  # the epoch of their worker
        self.stopping = False
        self._sweep_at = 0.0
        self._turned_at = time.monotonic()
        for pid in self.supervisor.sweep():
            log.warning("ended a worker of an earlier broker", extra={"pid": pid})

    def _peers(
        self,
        name: str,
        first: str,
        further: tuple[str, ...] = (),
        *,
        backlog: int = sockets.BACKLOG,
    ) -> Peers:
        domain = self.entrance.domain(name)
        socket = sockets.router(self.context, first, backlog=backlog, domain=domain)
        self.endpoints[name] = [sockets.bind(socket, e, self.entrance.key) for e in further]
        return Peers(socket, self.entrance.gate(name))

    def _refused(self) -> None:
        self.core.counters.auth_failures += 1

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until told to stop; `ready` is called once the sockets are bound."""
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {n: signal.signal(n, self._on_signal) for n in heard}
        # Workers inherit this: asked for its stacks before it can answer, one must not die of it.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            log.info("broker ready", extra={"run_dir": self.config.run_dir, "pid": os.getpid()})
            ready()
            self.notify.ready()
            self._open()
            while not (self.stopping and not self.supervisor.children):
                self.turn()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.close()

    def _open(self) -> None:
        """Start what has to be there without being asked for."""
        # The built-in models are looked at when somebody wants to know.
        own = (m for m in self.config.models.values() if not m.path.startswith(BUILTIN))
        self.library.open(look=self.config.local_workers and any(own))
        for name, model in self.config.models.items():
            if model.pin:
                self.perform(ev.Load(self.core.fleet.model(name).name), time.monotonic())

    def turn(self) -> None:
        """Wait for something and handle it: workers first, so that tokens beat new requests."""
        timeout = self._timeout_ms(time.monotonic())
        readable = dict(self.poller.poll(timeout))
        now = time.monotonic()
        late = now - self._turned_at - timeout / 1000
        self._turned_at = now
        if late > LATE:
            log.warning("the broker was late", extra={"seconds": round(late, 3)})
            self.lag.note(late, now)
            self.perform(ev.Late(late), now)
        if self.door.monitor in readable:
            self.door.somebody_came()
            self.door.watch(now)
        if self.back.socket in readable:
            self._read(self.back, self._from_worker, now)
        if self.dial_in.remotes.monitor in readable:
            self.dial_in.somebody_left(now)
        for descriptor in readable.keys() & self.watches.keys():
            self._worker_ended(int(descriptor), now)
        if self.front.socket in readable:
            self._read(self.front, self._from_client, now, FRONT_TURN)
        self._hear_ours(readable.keys(), now)
        if self.core.next_wake() <= now:
            self.perform(ev.Wake(), now)
        if self.web is not None and self.web.desk.bell.fileno() in readable:
            self.web.desk.leave(snapshot.take(self.core, self.about(now), self.lag.worst(now), now))
        self._keep_house(now)
        self.notify.turned(self._status, now)
        self.lag.note(time.monotonic() - now, now)

    def _hear_ours(self, readable: Collection[Any], now: float) -> None:
        """Operations, signals, the librarian, and whoever wants to come in."""
        if self.entrance.zap is not None and self.entrance.zap.socket in readable:
            self.entrance.zap.serve(now)
        if self.admin.socket in readable:
            self.admin.serve(now)
        if self.signals.fileno() in readable:
            self._hear_signals(now)
        if self.library.news.fileno() in readable:
            for event in self.library.take():
                self.perform(event, now)
        self.library.serve(now)

    def _timeout_ms(self, now: float) -> int:
        wake = min(self.core.next_wake(), self.supervisor.next_wake(), self._sweep_at)
        wake = min(wake, self.guard.look_at, self.library.next_wake())
        wake = min(wake, self.notify.next_wake(), self.admin.watchers.next_wake())
        wake = min(wake, self.dial_in.remotes.next_wake())
        if self.front.full or self.back.full:
            wake = min(wake, now + RETRY)
        if self.door.shut:
            wake = min(wake, now + PERIOD)
        return max(0, math.ceil((wake - now) * 1000))

    def _keep_house(self, now: float) -> None:
        self.supervisor.poll(now)
        if self.supervisor.due(now):
            for slot in list(self.supervisor.children):
                self.perform(ev.Looked(slot, self.supervisor.look(slot), TICK), now)
        self.dial_in.watch(now)
        self.door.watch(now)
        self.guard.watch(self.core, now)
        self.back.retry()
        self.admin.tell(now)
        for number in self.front.retry():
            self.perform(ev.LinkLost(number), now)
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET / 4
            for peer in list(self.front.by_number.values()):
                if now - peer.heard_at > FORGET and peer.number not in self.core.links:
                    self.front.forget(peer.number)

    def _read(
        self,
        peers: Peers,
        handle: Callable[[Peer, list[bytes], float], None],
        now: float,
        seconds: float = math.inf,
    ) -> None:
        """Handle what is there, at most DRAIN messages, at most for so long."""
        end = time.monotonic() + seconds
        for _ in range(DRAIN):
            received = peers.receive(now)
            if received is None:
                break
            handle(*received, now)
            if time.monotonic() >= end:
                break
        self._take_rows(now)

    def _take_rows(self, now: float) -> None:
        """Let the core have the rows that were read: those of many frames at once."""
        if self._rows:
            rows, self._rows = self._rows, []
            self.perform(ev.WorkerDeltas(self._rows_of, rows), now)

    # ---- clients -------------------------------------------------------------------------------

    def _from_client(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self._turn_away(self.front, peer)
            return
        if self.config.quota_bytes and not self._affords(peer, parts, now):
            return
        try:
            message = wire.decode(parts)
            event = self._client_event(peer, message)
        except wire.Garbage as garbage:
            self._refuse(peer, garbage.error, garbage.about, None, now)
        except PoolError as error:
            self._refuse(peer, error, message.header.id, message, now)
        else:
            if isinstance(event, ev.Ask) and event.kind == wire.MODELS:
                self.library.after_look(partial(self.perform, event), now)
            else:
                self.perform(event, now)

    def _affords(self, peer: Peer, parts: list[bytes], now: float) -> bool:
        """Whether it may send so many bytes; if not, that was answered. Nothing but the header of
        a message that is too much is decoded. What only keeps streams going passes for long.
        """
        limit, size = self.config.quota_bytes, sum(map(len, parts))
        wait, broke = (ask(peer.owner, limit, now) for ask in (self.bytes.wait, self.bytes.broke))
        self.bytes.spend(peer.owner, size, limit, now)
        if not wait or (size <= SMALL and not broke):
            return True
        if not broke:
            error = OverQuota(
                f"{peer.owner} sends more than {limit} bytes a second (quota_bytes), {size} more"
                " are too many now; send less, or wait",
                details={"owner": peer.owner, "value": size, "bound": limit},
                retry_after_ms=milliseconds(wait),
            )
            header = wire.header_of(parts)
            message = None if header is None else Message(header, {}, ())
            self.core.counters.rejected[error.code] += 1
            self._complain(peer, error, None if header is None else header.id, message, now)
        return False

    def _turn_away(self, peers: Peers, peer: Peer) -> None:
        """Its key counts no more: what it says is dropped, and the connection ended."""
        self.core.counters.auth_failures += 1
        peers.forget(peer.number)
        cut(peer.descriptor)

    def _client_event(self, peer: Peer, message: Message) -> ev.Event:
        header, kind = message.header, message.kind
        if kind == wire.ACK:
            return ev.Ack(peer.number, message.body.get("have"))
        if header.id is None and kind != wire.PING:
            raise BadRequest(f"{kind!r:.40} needs an id of {wire.ID_BYTES} bytes")
        request_id = header.id or bytes(wire.ID_BYTES)
        if kind == wire.GENERATE:
            return ev.Generate(
                peer.number,
                peer.owner,
                request_id,
                header.attempt,
                message.body,
                message.blobs,
                secrets.randbits(63),
            )
        if kind == wire.CANCEL:
            return ev.Cancel(peer.number, peer.owner, request_id)
        if kind in SPOKEN_BY_CLIENTS:
            return ev.Ask(
                peer.number, kind, request_id, header.attempt, message.body, message.blobs
            )
        raise BadRequest(f"a client cannot send the kind {kind!r:.40}")

    def _refuse(
        self,
        peer: Peer,
        error: PoolError,
        about: bytes | None,
        message: Message | None,
        now: float,
    ) -> None:
        """Answer what could not be read."""
        self.core.counters.bad_frames += 1
        self._complain(peer, error, about, message, now)

    def _complain(
        self,
        peer: Peer,
        error: PoolError,
        about: bytes | None,
        message: Message | None,
        now: float,
    ) -> None:
        """Say what is wrong; it ends no stream that is live."""
        self.perform(ev.Heard(peer.number), now)
        live = about is None or about in self.core.requests
        attempt = message.header.attempt if message is not None else 0
        header = Header(wire.ERROR, None if live else about, self.boot, attempt)
        body = {**error.body(), "about": about}
        self.front.send(peer.number, wire.encode(header, body))

    # ---- workers -------------------------------------------------------------------------------

    def _from_worker(self, peer: Peer, parts: list[bytes], now: float) -> None:
        if not peer.admitted:
            self._turn_away(self.back, peer)
            return
        try:
            message = wire.decode(parts, max_body=wire.MAX_BACK_BODY)
            if message.kind == wire.HELLO:
                self._take_rows(now)
                self._hello(peer, message, now)
                return
            event = self._worker_event(peer, message)
        except (PoolError, TypeError, ValueError) as error:
            self.core.counters.bad_frames += 1
            log.warning("bad frame from a worker", extra={"peer": peer.owner, "why": str(error)})
            return
        if event is None:
            self.core.counters.fenced += 1
        elif isinstance(event, ev.WorkerDeltas):
            self._gather(event, now)
        else:
            self._take_rows(now)
            self.perform(event, now)

    def _gather(self, event: ev.WorkerDeltas, now: float) -> None:
        """Rows wait for the next frame of the same worker, so that its clients get fewer frames."""
        if event.epoch != self._rows_of:
            self._take_rows(now)
        self._rows_of = event.epoch
        self._rows += event.rows
        if len(self._rows) >= GATHER:
            self._take_rows(now)

    def _worker_event(self, peer: Peer, message: Message) -> ev.Event | None:
        epoch = self.epochs.get(peer.number)
        if epoch is None:
            self.back.send(peer.number, wire.encode(Header(wire.WHO)))
        if epoch is None or epoch != message.header.epoch:
            return None
        body, request_id = message.body, message.header.id or b""
        if message.kind == wire.DELTAS:
            return ev.WorkerDeltas(epoch, wire.unpack_deltas(message))
        if message.kind == wire.BEAT:
            return ev.WorkerBeat(epoch, body)
        if message.kind == wire.CREDIT:
            return ev.WorkerCredit(epoch, body)
        if message.kind == wire.TOKENS:
            return ev.WorkerTokens(epoch, request_id, body, message.blobs)
        if message.kind == wire.YIELD:
            return ev.WorkerYield(epoch, body.get("runs"))
        if message.kind == wire.BYE:
            return ev.WorkerBye(epoch, body.get("error"))
        raise BadRequest(f"a worker cannot send the kind {message.kind!r:.40}")

    def _hello(self, peer: Peer, message: Message, now: float) -> None:
        slot = str(message.body.get("slot"))
        child = self.supervisor.children.get(slot)
        token = str(message.body.get("token"))
        if child is None or not child.opens(token):
            if self.dial_in.hello(peer, message, now):
                return
            self.core.counters.auth_failures += 1
            why = (
                "no slot has this token; over ipc only `mlxpool broker` takes workers that dial in"
            )
            log.warning("hello refused", extra={"slot": slot, "peer": peer.owner, "why": why})
            return
        child.renew(token)
        before = self.worker_peers.get(slot)
        if before is not None and before != peer.number:
            self.epochs.pop(before, None)
            self.back.forget(before)
        self.worker_peers[slot] = peer.number
        body = {k: v for k, v in message.body.items() if k != "token"}
        self.perform(ev.WorkerHello(slot, body, child.token), now)
        worker = self.core.fleet.slots[slot].worker
        if worker is not None:
            self.epochs[peer.number] = worker.epoch

    def _worker_ended(self, descriptor: int, now: float) -> None:
        noticed = self._noticed.setdefault(descriptor, now)
        dry = self._read_dry(now)
        if now - noticed < DRY and not (dry and self._has_said_all(self.watches[descriptor].slot)):
            return  # it stays readable: the next turn goes on
        del self._noticed[descriptor]
        child = self.watches.pop(descriptor)
        self.poller.unregister(descriptor)
        end = self.supervisor.reap(child.slot)
        number = self.worker_peers.pop(child.slot, None)
        if number is not None:
            self.epochs.pop(number, None)
            self.back.forget(number)
        self.perform(ev.WorkerExited(child.slot, end.cause, end.own, end.prefill), now)

    def _has_said_all(self, slot: str) -> bool:
        """A worker that leaves by itself says why; its death may be seen before its last word."""
        epoch = self.epochs.get(self.worker_peers.get(slot, -1))
        worker = None if epoch is None else self.core.fleet.worker(epoch)
        if worker is None or worker.said_bye or worker.error is not None:
            return True
        return not self.supervisor.left_by_itself(slot)

    def read_all(self, turns: int, now: float) -> None:
        """What workers have sent until now, within bounds."""
        for _ in range(turns):
            if self._read_dry(now):
                return

    def _read_dry(self, now: float) -> bool:
        """What a dead worker managed to send is read before its death is told, within bounds."""
        for _ in range(DRAIN):
            received = self.back.receive(now)
            if received is None:
                break
            self._from_worker(*received, now)
        self._take_rows(now)
        return received is None

    # ---- actions -------------------------------------------------------------------------------

    def perform(self, event: ev.Event, now: float) -> None:
        """Let the core decide, then do what it decided, in order."""
        if self.history.on:
            record.of_event(self.history, event)
        try:
            actions = self.core.handle(event, now)
        except Exception:  # a bug of ours costs one event, never the pool
            self.core.counters.internal_errors += 1
            log.exception("the core failed", extra={"on": type(event).__name__})
            actions = self.core.out  # what it had decided is in its books already
        for action in actions:
            if self.history.on:
                record.of_action(self.history, action)
            try:
                PERFORM[type(action)](self, action, now)
            except Exception:
                self.core.counters.internal_errors += 1
                log.exception("an action failed", extra={"action": type(action).__name__})

    def to_client(self, action: ev.ToClient, now: float) -> None:
        parts = wire.encode(action.header, action.body, action.blobs)
        if not self.front.send(action.link, parts):
            self.perform(ev.LinkLost(action.link), now)

    def to_worker(self, action: ev.ToWorker, now: float) -> None:
        number = self.worker_peers.get(action.slot)
        if number is not None:
            parts = wire.encode(
                action.header, action.body, action.blobs, max_body=wire.MAX_BACK_BODY
            )
            if not self.back.send(number, parts) and self.back.overflowed(number):
                self.stop_worker(ev.StopWorker(action.slot), now)  # it takes nothing any more
            # Else the connection is gone: the worker says hello again, or the judge notices.

    def start_worker(self, action: ev.StartWorker, now: float) -> None:
        try:
            model = self.core.fleet.models[action.model].config
            child = self.supervisor.start(action.slot, action.model, model)
        except OSError as error:
            why = f"cannot start the worker of {action.model!r}: {error}"
            log.error("worker not started", extra={"slot": action.slot, "why": str(error)})
            self.perform(ev.SpawnFailed(action.slot, why), now)
            return
        self.watches[child.watch] = child
        self.poller.register(child.watch, zmq.POLLIN)
        self.perform(ev.Spawned(action.slot, child.process.pid), now)

    def stop_worker(self, action: ev.StopWorker, now: float) -> None:
        if not self.dial_in.stop(action.slot, now):
            self.supervisor.stop(action.slot, now, at_once=action.at_once)

    def forget_link(self, action: ev.ForgetLink, now: float) -> None:
        self.front.forget(action.link)

    def dump_stacks(self, action: ev.DumpStacks, now: float) -> None:
        self.supervisor.dump(action.slot)

    def stop_pool(self, action: ev.StopPool, now: float) -> None:
        self.stop(now, final=False)

    def note(self, action: ev.Note, now: float) -> None:
        logger = requests_log if action.event == "request" else log
        logger.log(logging.getLevelName(action.level.upper()), action.event, extra=action.fields)

    # ---- the end -------------------------------------------------------------------------------

    def stop(self, now: float, *, final: bool) -> None:
        """End every stream, then the workers; the loop ends with the last of them."""
        if not self.stopping:
            self.stopping = True
            self.notify.stopping()
            self.perform(ev.Shutdown(final), now)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signal_end.send(bytes([number]))

    def _hear_signals(self, now: float) -> None:
        numbers = self.signals.recv(64)
        for number in set(numbers) - {RELOADED}:
            log.info("signal", extra={"number": number})
        if RELOADED in numbers:
            self.reloader.take(now)
        if signal.SIGHUP in numbers:
            self.reloader.begin()
        ends = [number for number in numbers if number in (signal.SIGTERM, signal.SIGINT)]
        if ends and (self.stopping or len(ends) > 1):  # asked twice: do not wait for anybody
            self.supervisor.close()
        if ends:
            self.stop(now, final=False)  # whoever sends signals may start the next one

    def use(self, config: PoolConfig, now: float) -> None:
        """Settings that were read anew, in all but models; keys that are no more are cut off."""
        self.config = self.supervisor.config = config
        memory = config.memory_limit or int(SHARE * system.memory_of_machine())
        self.perform(ev.Reload(config, memory), now)
        for public, name in self.entrance.keyring.replace(config.keys).items():
            self._revoke(public, name, now)

    def _revoke(self, public: str, name: str, now: float) -> None:
        log.warning("key revoked", extra={"key": name, "public": public})
        self.perform(ev.Revoked(f"{KEY}{name}"), now)
        self.dial_in.revoked(public, now)
        for peers in (self.front, self.back, self.admin.peers):
            for peer in list(peers.by_number.values()):
                if peer.user == f"{KEY}{public}":
                    peers.forget(peer.number)
                    cut(peer.descriptor)

    def close(self) -> None:
        """Free everything: children, sockets, the lock."""
        self.reloader.close()
        self.library.close()
        self.supervisor.close()
        if self.web is not None:
            self.web.close()
        self.door.close()
        self.dial_in.remotes.close()
        for source in (self.front.socket, self.back.socket, self.admin.socket):
            source.close()
        self.entrance.close()
        self.context.term()
        self.signals.close()
        self._signal_end.close()
        for name in ("front", "back", "admin"):
            (self.config.run_dir / f"{name}.ipc").unlink(missing_ok=True)
        os.close(self.lock)
        self.notify.close()
        log.info("broker stopped")

    def _state(self) -> str:
        if self.stopping:
            return "stopping"
        return "draining" if self.core.stopping else "ready"

    def _status(self) -> str:
        """A line for the service manager."""
        fleet = self.core.fleet
        busy = sum(bool(model.workers) for model in fleet.models.values())
        told = f"{self._state()}: workers {len(fleet.by_epoch)}, models with workers {busy}"
        return f"{told}, streams {len(self.core.requests)}"

    def about(self, now: float) -> Mapping[str, Any]:
        """The broker's own line in `ps`."""
        return {
            "pid": os.getpid(),
            "boot": self.boot,
            "state": self._state(),
            "uptime_s": round(now - self.started_at, 3),
            "run_dir": str(self.config.run_dir),
            "links": len(self.front.by_number),
            "front_shut": self.door.times_shut,
            "turned_out": self.guard.turned_out,
            "descriptors": self.descriptors,
            "endpoints": {**self.endpoints, "front": self.door.endpoints[1:]},
            "metrics": None if self.web is None else self.web.url,
        }


def _web(address: str) -> Web:
    """Not imported above: without it a broker is back sooner after its death."""
    from mlxpool.broker.web import Web

    return Web(address)


PERFORM: dict[type, Callable[[Broker, Any, float], None]] = {
    ev.ToClient: Broker.to_client,
    ev.ToWorker: Broker.to_worker,
    ev.StartWorker: Broker.start_worker,
    ev.StopWorker: Broker.stop_worker,
    ev.ForgetLink: Broker.forget_link,
    ev.DumpStacks: Broker.dump_stacks,
    ev.StopPool: Broker.stop_pool,
    ev.Note: Broker.note,
}
