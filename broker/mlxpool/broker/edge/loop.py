"""Sockets, child processes and timers around the core: the broker's one thread.

`from_clients` and `from_workers` make events of what comes, `actions` does what the core decides.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket as sockets_of_the_system
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from mlxpool.broker.admin.commands import Admin
from mlxpool.broker.admin.reload import Reloader
from mlxpool.broker.admin.systemd import Notify
from mlxpool.broker.catalogue.catalogue_news import Library
from mlxpool.broker.core.core import Core
from mlxpool.broker.edge.client_ingress import FromClients
from mlxpool.broker.edge.executor import Actions
from mlxpool.broker.edge.listener import PERIOD, Door, backlog_of
from mlxpool.broker.edge.memory_guard import Guard, cut
from mlxpool.broker.edge.peers import Peer, Peers
from mlxpool.broker.edge.startup import (
    BUILTIN,
    footprints,
    lock,
    memory,
    places,
    raise_descriptor_limit,
    without_workers,
)
from mlxpool.broker.edge.worker_ingress import DRAIN, FromWorkers
from mlxpool.broker.interface import events as ev
from mlxpool.broker.processes.remote_workers import DialIn
from mlxpool.broker.processes.supervisor import TICK, Supervisor
from mlxpool.broker.security.entrance import Entrance
from mlxpool.broker.telemetry import broker_info, snapshot
from mlxpool.broker.telemetry.lag import Lag
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets

if TYPE_CHECKING:
    from mlxpool.broker.http.server import Web

log = logging.getLogger("mlxpool.broker")

FRONT_TURN = 0.001  # seconds for clients, then workers have theirs: a flood delays no stream
RETRY = 0.01  # seconds until a full peer is tried again
FORGET = 20.0  # seconds after which a silent connection without streams is forgotten
RELOADED = 255  # no signal's number: settings have been read anew
LATE = 1.0  # seconds that a turn may take before it counts as our own lateness


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
        self.core = Core(config, self.boot, footprints(config), memory(config), places(config))
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
        self.from_clients, self.from_workers = FromClients(self), FromWorkers(self)
        self.actions = Actions(self)
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
        # The end of a worker is told by others: its process, its connection's own end.
        return Peers(socket, self.entrance.gate(name), to_the_last=name == "back")

    def _refused(self) -> None:
        self.core.state.counters.auth_failures += 1

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
                self.perform(ev.Load(self.core.state.registry.model(name).name), time.monotonic())

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
            self._read(self.back, self.from_workers.take, now)
        if self.dial_in.remotes.monitor in readable:
            self.dial_in.somebody_left(now)
        for descriptor in readable.keys() & self.from_workers.watches.keys():
            self.from_workers.ended(int(descriptor), now)
        if self.front.socket in readable:
            self._read(self.front, self.from_clients.take, now, FRONT_TURN)
        self._hear_ours(readable.keys(), now)
        if self.core.next_wake() <= now:
            self.perform(ev.Wake(), now)
        if self.web is not None and self.web.desk.bell.fileno() in readable:
            self.web.desk.leave(
                snapshot.take(
                    self.core.state, broker_info.broker(self, now), self.lag.worst(now), now
                )
            )
        self._keep_house(now)
        self.notify.turned(partial(broker_info.status, self), now)
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
        self.guard.watch(self.core.state, now)
        self.back.retry()
        self.admin.tell(now)
        for number in self.front.retry():
            self.perform(ev.LinkLost(number), now)
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET / 4
            for peer in list(self.front.by_number.values()):
                if now - peer.heard_at > FORGET and peer.number not in self.core.state.links:
                    self.front.forget(peer.number)
            self.from_workers.sweep()

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
        self.from_workers.take_rows(now)

    def turn_away(self, peers: Peers, peer: Peer) -> None:
        """Its key counts no more: what it says is dropped, and the connection ended."""
        self.core.state.counters.auth_failures += 1
        self.turn_out(peers, peer)

    def turn_out(self, peers: Peers, peer: Peer) -> None:
        """Its connection ends, and with it whatever was not read of it."""
        peers.forget(peer.number)
        cut(peer.descriptor, peer.inode)

    def perform(self, event: ev.Event, now: float) -> None:
        """Let the core decide, then do what it decided, in order."""
        self.actions.perform(event, now)

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


def _web(address: str) -> Web:
    """Not imported above: without it a broker is back sooner after its death."""
    from mlxpool.broker.http.server import Web

    return Web(address)
