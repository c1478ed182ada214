"""The simulator's world: a core, workers, clients and their connections, on a virtual clock.

A connection delivers frames in order and never twice. If it is lost, its frames in transit are
lost.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.core.sim_actors import DIGEST, PACE, Client, Worker
from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.workers.gpu_places import GpuPlaces
from mlxpool.client.retry import SilenceTimer
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header, Message
from support import core_events as make
from support import kinds

LOOK = 1.0  # seconds between two samples of the supervisor
GPUS = ("0", "1")  # one GPU for each worker of the model
CONFIG = PoolConfig(
    run_dir=Path("/nowhere"),
    client_grace=6.0,
    restart_delay=0.2,
    restart_delay_max=0.5,
    restart_limit=1000,
    stop_grace=1.0,
    beat_limit=2.0,
    load_limit=2.0,
    prefill_limit=2.0,
    step_limit=2.0,
    unread_bytes=1 << 20,
    models={"m": ModelConfig(path="builtin:counting", replicas=2, keep_alive=-1.0)},
)


@dataclass(eq=False)
class Conn:
    """A simulated connection. If it is lost, its frames in transit are lost, too.

    `number`: the broker's number (link) of the connection.
    """

    number: int = 0
    alive: bool = True
    lost_told: bool = False
    epoch: int = 0  # the epoch in the worker's welcome on this connection
    there: float = 0.0  # arrival of the newest frame, as in `back`: frames keep their order
    back: float = 0.0


class World:
    """The world of a seed. Every callback runs at its virtual time, in time order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 100.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.events = 0
        self.boot = 0
        self.core: Core | None = None
        self.core_frozen = 0.0
        self.up_at = self.now
        self.wake_at = 1e9
        self.numbers = itertools.count(1)
        self.links: dict[int, tuple[Client, Conn]] = {}
        self.workers: dict[str, Worker] = {}
        self.places = GpuPlaces()
        self.clients: list[Client] = []
        self.conns: dict[int, Conn] = {}
        self.works: Counter[bytes] = Counter()  # runs given to a worker since its newest id
        self.quiet = False
        self.start_broker()

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (when, next(self.order), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def delay(self) -> float:
        return 0.001 + 0.03 * self.rng.random() ** 4 + 0.4 * (self.rng.random() < 0.01)

    # ---- the broker --------------------------------------------------------------------------

    def start_broker(self) -> None:
        self.boot += 1
        self.core = Core(CONFIG, 1000 + self.boot)
        self.places = GpuPlaces()
        self.core_frozen, self.wake_at = 0.0, 1e9
        self.after(LOOK, self.look, self.boot)

    def kill_broker(self) -> None:
        """Ends the broker and its workers; all frames in transit are lost."""
        self.core = None
        for worker in self.workers.values():
            worker.alive = worker.conn.alive = False
        self.workers.clear()
        self.links.clear()
        self.up_at = self.now + 0.2 + self.rng.random()
        for client in self.clients:
            self.reconnect(client)
        self.at(self.up_at, self.start_broker)

    def do(self, event: ev.Event) -> None:
        core = self.core
        if core is None:
            return
        for action in core.handle(event, self.now):
            ACTIONS[type(action)](self, action)
        due = core.next_wake()
        if due < self.wake_at:
            self.wake_at = due
            self.at(max(due, self.now), self.wake, self.boot)

    def frozen(self, call: Callable[..., None], *args: Any) -> bool:
        """Returns whether the broker is frozen; if so, `call` is made after the freeze."""
        if self.now >= self.core_frozen:
            return False
        self.at(self.core_frozen, call, *args)
        return True

    def wake(self, boot: int) -> None:
        if boot == self.boot and not self.frozen(self.wake, boot):
            self.wake_at = 1e9
            self.do(ev.Wake())

    def look(self, boot: int) -> None:
        """Lets the supervisor sample every worker immediately, and then every LOOK seconds."""
        if boot != self.boot or self.core is None or self.frozen(self.look, boot):
            return
        for slot, worker in list(self.workers.items()):
            if worker.alive:
                self.do(ev.Looked(slot, worker.sample(self.now), LOOK))
        if self.workers:
            self.after(LOOK, self.look, boot)
        else:
            self.after(4 * LOOK, self.look, boot)

    # ---- the front ---------------------------------------------------------------------------

    def add_client(self, number: int) -> Client:
        client = Client(number, lambda *_: None, lambda: None, SilenceTimer(PACE, self.now))
        client.send = lambda header, body, blobs: self.from_client(client, header, body, blobs)
        client.replace = lambda: self.reconnect(client)
        self.clients.append(client)
        self.conns[number] = Conn()
        return client

    def reconnect(self, client: Client) -> None:
        """Replaces the connection; frames in transit in both directions are lost."""
        self.conns[client.number].alive = False
        self.conns[client.number] = Conn()

    def from_client(
        self, client: Client, header: Header, body: Mapping[str, Any], blobs: tuple[bytes, ...]
    ) -> None:
        conn = self.conns[client.number]
        conn.there = max(conn.there, self.now + self.delay(), self.up_at + 0.01)
        self.at(conn.there, self.at_broker, client, conn, header, body, blobs)

    def at_broker(
        self, client: Client, conn: Conn, header: Header, body: Any, blobs: tuple[bytes, ...]
    ) -> None:
        if not conn.alive or self.frozen(self.at_broker, client, conn, header, body, blobs):
            return
        if not conn.number:
            conn.number = next(self.numbers)
            self.links[conn.number] = (client, conn)
        entropy = self.rng.getrandbits(32) if header.kind == kinds.GENERATE else 0
        owner = f"uid:{client.number}"
        self.do(make.client(conn.number, owner, header, body, blobs, entropy))

    def to_client(self, action: act.ToClient) -> None:
        if action.link not in self.links:
            return
        client, conn = self.links[action.link]
        if not conn.alive:
            if not conn.lost_told and self.rng.random() < 0.5:
                conn.lost_told = True
                self.after(0.0, self.do, ev.LinkLost(action.link))
            return
        conn.back = max(conn.back, self.now + self.delay())
        message = Message(action.header, dict(action.message.body() or {}), action.message.blobs())
        self.at(conn.back, self.at_client, client, conn, message)

    def at_client(self, client: Client, conn: Conn, message: Message) -> None:
        if not conn.alive:
            return
        if self.now < client.frozen_until:
            self.at(client.frozen_until, self.at_client, client, conn, message)
            return
        client.received(message, self.now)

    def tick(self, client: Client) -> None:
        if not client.streams:
            client.ticking = False
        elif self.now < client.frozen_until:
            self.at(client.frozen_until + 1e-6, self.tick, client)
        else:
            client.tick(self.now)
            self.after(PACE.tick, self.tick, client)

    def forget_link(self, action: act.ForgetLink) -> None:
        link = self.links.pop(action.link, None)
        if link is not None:
            link[1].number = 0

    # ---- the back ----------------------------------------------------------------------------

    def start_worker(self, action: act.StartWorker) -> None:
        worker = Worker(action.slot, lambda *_: None, self.rng.randint(1, 4))
        worker.send = lambda kind, body: self.from_worker(worker, kind, body)
        worker.conn = Conn()
        self.workers[action.slot] = worker
        gpus = self.places.take(action.slot, GPUS, 1)
        assert self.places.held().keys() == self.workers.keys()
        assert len(set(self.places.held().values())) == len(self.workers), "a GPU was free"
        self.do(ev.Spawned(action.slot, 1, gpus))
        self.after(0.05 + 0.2 * self.rng.random(), self.hello, worker)

    def hello(self, worker: Worker) -> None:
        if self.runs(worker, self.hello):
            worker.send("hello", {"context": 1000, "digest": DIGEST})
            self.after(LOOK, self.beat, worker)

    def runs(self, worker: Worker, call: Callable[..., None]) -> bool:
        """Returns whether a worker's thread can run `call` now; a frozen thread runs it later."""
        if worker.alive and self.now < worker.frozen_until:
            self.at(worker.frozen_until + 1e-6, call, worker)
            return False
        return worker.alive and not worker.mute

    def beat(self, worker: Worker) -> None:
        if self.runs(worker, self.beat) and not (self.quiet and not worker.runs):
            worker.edge += 1
            worker.send("beat", {})
            self.after(LOOK, self.beat, worker)

    def from_worker(self, worker: Worker, kind: str, body: Any) -> None:
        conn = worker.conn
        conn.there = max(conn.there, self.now + self.delay())
        self.at(conn.there, self.at_back, worker, conn, kind, body)

    def at_back(self, worker: Worker, conn: Conn, kind: str, body: Any) -> None:
        """Passes a worker's frame to the core. A `hello` starts or replaces its session.

        Other frames need a connection on which the broker has sent `welcome`. On another connection
        the broker answers `who`.
        """
        if not conn.alive or self.core is None:
            return
        if self.frozen(self.at_back, worker, conn, kind, body):
            return
        if kind == "hello":
            if self.workers.get(worker.slot) is worker:
                self.do(make.hello(worker.slot, body))
        elif not conn.epoch:
            self.reply(worker, conn, Header(kinds.WHO), {}, ())
        else:
            if kind == "deltas":
                self.count_tokens(conn.epoch, body)
            self.do(BACK[kind](conn.epoch, body))

    def count_tokens(self, epoch: int, rows: list[Delta]) -> None:
        assert self.core is not None
        for row in rows:
            live = self.core.state.requests.get(row.id)
            if row.n and live is not None and live.run.leased_by(epoch, row.attempt):
                self.works[row.id] = 0

    def to_worker(self, action: act.ToWorker) -> None:
        worker = self.workers.get(action.slot)
        if worker is None:
            return
        if action.header.kind == kinds.WORK:
            self.works[action.header.id or b""] += 1
        if action.header.kind == kinds.WELCOME:
            worker.conn.epoch = action.header.epoch
        if worker.conn.epoch == action.header.epoch:
            body, blobs = action.message.body(), action.message.blobs()
            self.reply(worker, worker.conn, action.header, body, blobs)

    def reply(
        self, worker: Worker, conn: Conn, header: Header, body: Any, blobs: tuple[bytes, ...]
    ) -> None:
        conn.back = max(conn.back, self.now + self.delay())
        self.at(conn.back, self.at_worker, worker, conn, header, body, blobs)

    def at_worker(
        self, worker: Worker, conn: Conn, header: Header, body: Any, blobs: tuple[bytes, ...]
    ) -> None:
        if not conn.alive or not worker.alive or worker.mute:
            return
        if self.now < worker.frozen_until:
            self.at(worker.frozen_until, self.at_worker, worker, conn, header, body, blobs)
        elif header.kind == kinds.WHO:
            if worker.conn is conn and worker.epoch >= 0:
                worker.begin_again(-1)
                worker.send("hello", {"context": 1000, "digest": DIGEST})
        elif header.kind == kinds.WELCOME:
            worker.begin_again(header.epoch)
            self.after(0.0 if worker.ready else 0.1, self.loaded, worker)
        else:
            worker.told(header, body, blobs, self.now)
            self.stir(worker)

    def loaded(self, worker: Worker) -> None:
        if self.runs(worker, self.loaded) and not worker.hung:
            worker.ready = True
            worker.count += 1
            worker.credit()

    def stir(self, worker: Worker) -> None:
        if not worker.stepping and (worker.runs or worker.over):
            worker.stepping = True
            self.after(0.05, self.step, worker)

    def step(self, worker: Worker) -> None:
        if worker.hung or not self.runs(worker, self.step):
            return
        worker.stepping = False
        if worker.step(self.rng.randint(1, 5), self.now):
            worker.credit()
        if worker.runs or worker.over:
            worker.stepping = True
            self.after(0.1 + 0.3 * self.rng.random(), self.step, worker)

    # ---- ends of workers ---------------------------------------------------------------------

    def stop_worker(self, action: act.StopWorker) -> None:
        worker = self.workers.get(action.slot)
        if worker is not None:
            stuck = worker.hung or worker.mute or self.now < worker.frozen_until
            self.after(CONFIG.stop_grace if stuck else 0.05, self.die, worker, "stopped", False)

    def die(self, worker: Worker, cause: str, own: bool) -> None:
        """Ends a worker. Its frames in transit reach the broker before the event of its exit."""
        if not worker.alive:
            return
        worker.alive = False
        prefill = worker.prefilling(self.now)
        moment = max(self.now, worker.conn.there) + 0.001
        self.at(moment, self.exited, worker, ev.WorkerExited(worker.slot, cause, own, prefill))

    def exited(self, worker: Worker, event: ev.WorkerExited) -> None:
        if self.workers.get(worker.slot) is not worker or self.core is None:
            return
        if not self.frozen(self.exited, worker, event):
            worker.conn.alive = False
            del self.workers[worker.slot]
            self.places.release(worker.slot)
            self.do(event)


def _nothing(world: World, action: Any) -> None:
    """Does nothing: actions such as log notes and stack dumps are only for users."""


ACTIONS: dict[type, Callable[[World, Any], None]] = {
    act.ToClient: World.to_client,
    act.ToWorker: World.to_worker,
    act.StartWorker: World.start_worker,
    act.StopWorker: World.stop_worker,
    act.ForgetLink: World.forget_link,
    act.DumpStacks: _nothing,
    act.StopPool: _nothing,
    act.Note: _nothing,
}
BACK: dict[str, Callable[[int, Any], ev.Event]] = {
    "deltas": ev.WorkerDeltas,
    "beat": make.beat,
    "credit": make.credit,
    "yield": lambda epoch, runs: make.handed_back(epoch, runs),
}
