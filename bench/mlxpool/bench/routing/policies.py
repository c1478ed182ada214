"""Routing policies: choose which waiting request a simulated worker gets next."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from msgspec import Struct

from mlxpool.bench.measurement import OURS
from mlxpool.bench.routing.loads import Call, Segment
from mlxpool.bench.routing.simulated_worker import Row, SimulatedWorker
from mlxpool.broker.routing.prefix_index import BYTES_PER_TOKEN, PromptPieces, pieces_of
from mlxpool.broker.routing.route_cost import (
    MAX_OUTPUT,
    MAX_PASSED,
    MAX_REQUESTS,
    Crowd,
    Demand,
    Route,
    cheapest_pair,
    cost_ms,
    crowd_of,
)
from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.common.protocol.prompts import ChatPrompt


class Waiting(Struct, frozen=True):
    """A request that has no worker yet."""

    number: int
    call: Call
    came: float  # seconds


class Policy(Protocol):
    """A routing policy for one model: it chooses a worker, and is informed of later events.

    `workers` are all workers of the model, also those without a free slot.
    """

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None: ...

    def sent(self, request: Waiting, worker: SimulatedWorker) -> None: ...

    def read(self, row: Row, worker: SimulatedWorker) -> None: ...

    def ended(self, row: Row, worker: SimulatedWorker) -> None: ...

    def stepped(self, worker: SimulatedWorker, rows: int, chunk: int, ms: float) -> None: ...


class _Plain:
    """The base of policies that keep no state about workers."""

    def sent(self, request: Waiting, worker: SimulatedWorker) -> None: ...

    def read(self, row: Row, worker: SimulatedWorker) -> None: ...

    def ended(self, row: Row, worker: SimulatedWorker) -> None: ...

    def stepped(self, worker: SimulatedWorker, rows: int, chunk: int, ms: float) -> None: ...


class RoundRobin(_Plain):
    """Chooses the next worker that has a free slot."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None:
        for _ in workers:
            worker = workers[next(self._turns) % len(workers)]
            if worker.credit > 0:
                return waiting[0], worker
        return None


class LeastLoaded(_Plain):
    """Chooses the worker with the most free slots."""

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None:
        worker = max(workers, key=lambda candidate: candidate.credit)
        return (waiting[0], worker) if worker.credit > 0 else None


class SessionOnly(LeastLoaded):
    """Chooses the worker of the session's last request, or the least loaded worker."""

    def __init__(self) -> None:
        self._last: dict[str, SimulatedWorker] = {}

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None:
        known = self._last.get(waiting[0].call.session)
        if known is not None and known.credit > 0:
            return waiting[0], known
        return super().choose(waiting, workers)

    def sent(self, request: Waiting, worker: SimulatedWorker) -> None:
        if request.call.session:
            self._last[request.call.session] = worker


class _Cheapest(_Plain):
    """Chooses the cheapest pair of a waiting request and a worker, by a cost in milliseconds."""

    def __init__(self) -> None:
        self._passed: Counter[int] = Counter()  # request's number -> times that others overtook it

    def cost(self, request: Waiting, worker: SimulatedWorker) -> float:
        raise NotImplementedError

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None:
        first = waiting[:MAX_REQUESTS]
        often_passed = [request for request in first if self._passed[request.number] >= MAX_PASSED]
        pair = cheapest_pair(
            often_passed[:1] or first, workers, self.cost, lambda _, worker: worker.credit > 0
        )
        if pair is None:
            return None
        for request in itertools.takewhile(lambda request: request is not pair.request, first):
            self._passed[request.number] += 1
        return pair.request, pair.worker


class Oracle(_Cheapest):
    """The policy that knows each worker's cache, speed and remaining work."""

    def cost(self, request: Waiting, worker: SimulatedWorker) -> float:
        machine = worker.machine
        unread = request.call.tokens - worker.will_find(request.call.prompt)
        step = machine.step_ms + machine.row_ms * (1 + len(worker.rows) / 2)
        output = min(MAX_OUTPUT, request.call.output)
        return machine.prompt_ms * (unread + worker.unread) + output * step


class Ours(_Cheapest):
    """The broker's policy, which knows only its own decisions and the workers' heartbeats."""

    def __init__(self) -> None:
        super().__init__()
        self._routes: dict[str, Route] = {}
        self._model = WorkerSpeed()
        self._output = float(MAX_OUTPUT)  # tokens of an answer, an average
        self._demands: dict[int, Demand] = {}
        self._crowds: dict[int, Crowd] = {}  # crowds of the present choice, by request number

    def choose(
        self, waiting: Sequence[Waiting], workers: Sequence[SimulatedWorker]
    ) -> tuple[Waiting, SimulatedWorker] | None:
        routes = [self._route(worker) for worker in workers]
        first = [self._demand(request) for request in waiting[:MAX_REQUESTS]]
        self._crowds = {
            request.number: crowd_of(demand, routes, len(waiting) - 1, first)
            for request, demand in zip(waiting, first, strict=False)
        }
        return super().choose(waiting, workers)

    def _route(self, worker: SimulatedWorker) -> Route:
        return self._routes.setdefault(worker.name, Route())

    def _demand(self, request: Waiting) -> Demand:
        if request.number not in self._demands:
            call = request.call
            session = ("", call.session)
            self._demands[request.number] = Demand(
                _pieces(call.prompt), round(self._output), session
            )
        return self._demands[request.number]

    def cost(self, request: Waiting, worker: SimulatedWorker) -> float:
        route = self._route(worker)
        demand, crowd = self._demand(request), self._crowds[request.number]
        return cost_ms(demand, route, len(worker.rows), self._model, crowd)

    def sent(self, request: Waiting, worker: SimulatedWorker) -> None:
        route = self._route(worker)
        route.sent(request.number, self._demand(request))
        route.index.bound(worker.machine.cache)

    def read(self, row: Row, worker: SimulatedWorker) -> None:
        self._route(worker).has_read(row.number)

    def ended(self, row: Row, worker: SimulatedWorker) -> None:
        route = self._route(worker)
        route.ended(row.number, row.cached)
        route.dropped(worker.cache.evicted)
        self._demands.pop(row.number, None)
        self._output += 0.05 * (row.call.output - self._output)

    def stepped(self, worker: SimulatedWorker, rows: int, chunk: int, ms: float) -> None:
        speed = self._route(worker).speed
        if chunk and not rows:
            speed.observe_prompt(ms / chunk)
            self._model.observe_prompt(ms / chunk)
        if rows and not chunk:
            speed.observe_step(rows, ms)
            self._model.observe_step(rows, ms)


POLICIES: dict[str, Callable[[], Policy]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "session": SessionOnly,
    OURS: Ours,
    "oracle": Oracle,
}


def _pieces(prompt: tuple[Segment, ...]) -> PromptPieces:
    return pieces_of(ChatPrompt([_message(segment) for segment in prompt]))


@cache
def _message(segment: Segment) -> dict[str, str]:
    """Returns a chat message for a segment; equal segments have equal messages.

    The broker's estimate of the message's tokens is the segment's number of tokens.
    """
    name, count = segment
    role = "assistant" if " answer " in name else "user"
    length = max(len(name) + 1, count * BYTES_PER_TOKEN - 26)  # 26 bytes: the map around the text
    return {"role": role, "content": f"{name} ".ljust(length, ".")}
