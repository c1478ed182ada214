"""What the core remembers: requests, links, ended ids, queues, timers; and how it speaks.

The lowest of six layers: Books, Delivery, Intake, Losses, Taking, Core. Each uses only those
below it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.broker.core.timers import Timers
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests.request import Request, State, Tombstone
from mlxpool.broker.security.quotas import Rates
from mlxpool.broker.telemetry.stats import Counters
from mlxpool.broker.workers.pool import Fleet
from mlxpool.broker.workers.worker import Model, Question
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol import deltas, kinds
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header

TOMBSTONES = 10_000
TOMBSTONE_LIFE = 600.0  # seconds
POISONED = 1_000
NO_LIMIT = 1 << 62


@dataclass(eq=False, slots=True)
class Link:
    """A client's connection, as long as it has live streams or was heard of lately."""

    heard_at: float
    ids: set[bytes] = field(default_factory=set)
    lost: bool = False


class Books:
    """Owns every request. `boot` is the random number of this broker process."""

    def __init__(
        self,
        config: PoolConfig,
        boot: int,
        needs: Mapping[str, int] | None = None,
        memory: int = NO_LIMIT,
        places: Mapping[str, str] | None = None,
    ) -> None:
        """`needs` is what one worker of a model takes, `memory` what all may take, in bytes.

        `places` says where the files of a model are; names with one place may share workers.
        """
        self.config = config
        self.boot = boot
        self.timers = Timers()
        self.fleet = Fleet(config, boot, self.timers, memory)
        for name, spec in config.models.items():
            self.fleet.add(name, spec, (places or {}).get(name, ""), (needs or {}).get(name, 0))
        self.requests: dict[bytes, Request] = {}
        self.tombstones: OrderedDict[bytes, Tombstone] = OrderedDict()
        self.links: dict[int, Link] = {}
        self.owned: Counter[str] = Counter()  # owner -> live requests
        self.cancels = Rates()
        self.poisoned: OrderedDict[bytes, float] = OrderedDict()  # digest -> until
        self.asked: dict[bytes, tuple[Question, int]] = {}  # id -> the call, its worker's epoch
        self.counters = Counters()
        self.stopping = False  # takes no new requests
        self.drained = False  # StopPool follows the last request
        self.out: list[ev.Action] = []
        self.runs = 0  # runs given to workers so far
        self.arrivals = 0  # requests accepted so far
        self.grouped: dict[int, list[Delta]] = {}  # link -> deltas of the event in hand

    def fate(self, request_id: bytes, owner: str | None = None) -> dict[str, Any]:
        """Where an id stands, as far as this owner may know; `owner` None may know everything."""
        live, tomb = self.requests.get(request_id), self.tombstones.get(request_id)
        if live is not None and owner in (None, live.owner):
            return {"state": live.state.value, "pos": live.sent}
        if tomb is not None and owner in (None, tomb.owner):
            return {"state": tomb.state.value, "pos": tomb.pos}
        return {"state": "unknown", "pos": 0}

    def _bury(self, request: Request, now: float) -> None:
        self.tombstones[request.id] = Tombstone(
            request.owner,
            request.digest,
            request.attempt,
            request.state,
            request.sent,
            now + TOMBSTONE_LIFE,
        )
        self.timers.set("tombstones", next(iter(self.tombstones.values())).until)
        if len(self.tombstones) > TOMBSTONES:
            self.tombstones.popitem(last=False)

    def _forget(self, now: float) -> None:
        while self.tombstones and next(iter(self.tombstones.values())).until <= now:
            self.tombstones.popitem(last=False)
        if self.tombstones:
            self.timers.set("tombstones", next(iter(self.tombstones.values())).until)

    def _quarantine(self, digest: bytes, now: float) -> None:
        self.poisoned.pop(digest, None)
        self.poisoned[digest] = now + self.config.poison_life
        self.timers.set("poisoned", next(iter(self.poisoned.values())))
        if len(self.poisoned) > POISONED:
            self.poisoned.popitem(last=False)

    def _forgive(self, now: float) -> None:
        while self.poisoned and next(iter(self.poisoned.values())) <= now:
            self.poisoned.popitem(last=False)
        if self.poisoned:
            self.timers.set("poisoned", next(iter(self.poisoned.values())))

    def _heard(self, link: int, now: float) -> None:
        known = self.links.get(link)
        if known is None:
            self.links[link] = Link(now)
            self._watch_link(link, now)
        else:
            known.heard_at = now

    def _watch_link(self, link: int, now: float) -> None:
        self.timers.set(("link", link), now + self.config.client_grace)

    def _position(self, request: Request) -> int:
        if request.state is not State.QUEUED:
            return 0
        return self._model_of(request).queue.before(request)

    def _model_of(self, request: Request) -> Model:
        return self.fleet.models[request.model]

    def _unqueue(self, request: Request) -> None:
        if request.state is State.QUEUED:
            self._model_of(request).queue.drop(request)

    def _leave_worker(self, request: Request) -> None:
        """Stop the run, if a worker still has one; its place stays taken until confirmed."""
        worker = self.fleet.worker(request.worker)
        if worker is not None and (request.id, request.run) in worker.places:
            self.fleet.tell(worker, kinds.CANCEL, {}, id=request.id, attempt=request.run)

    def _set_timer(self, request: Request) -> None:
        at = min(request.deadline, request.queue_deadline, request.first_deadline)
        if request.shut_since:
            at = min(at, request.shut_since + self.config.ack_grace)
        self.timers.set(request.id, at)

    def _emit(
        self, link: int, header: Header, body: Mapping[str, Any], blobs: tuple[bytes, ...] = ()
    ) -> None:
        """Send; what was grouped for this link before goes first."""
        if link in self.grouped:
            self._send_group(link)
        known = self.links.get(link)
        if known is None or not known.lost:
            self.out.append(ev.ToClient(link, header, body, blobs))

    def _send_group(self, link: int) -> None:
        """The deltas of one step for a client that asked for `batch`."""
        for rows in deltas.batches(self.grouped.pop(link)):
            body, blob = deltas.pack_deltas(rows)
            self._emit(link, Header(kinds.DELTAS, None, self.boot), body, (blob,))

    def _complain(self, link: int, error: PoolError, about: bytes | None) -> None:
        """An error that ends no stream."""
        self._emit(link, Header(kinds.ERROR, None, self.boot), {**error.body(), "about": about})

    def _send(self, request: Request, kind: str, body: Mapping[str, Any], pos: int = 0) -> None:
        self._emit(request.link, Header(kind, request.id, self.boot, request.attempt, pos), body)

    def _reply(
        self,
        link: int,
        kind: str,
        id: bytes,
        attempt: int,
        body: Mapping[str, Any],
        blobs: tuple[bytes, ...] = (),
    ) -> None:
        self._emit(link, Header(kind, id, self.boot, attempt), body, blobs)

    def _answer(self, event: ev.Generate | ev.Ask, kind: str, body: Mapping[str, Any]) -> None:
        self._reply(event.link, kind, event.id, event.attempt, body)
