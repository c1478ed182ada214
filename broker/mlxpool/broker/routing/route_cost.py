"""What a request costs on a worker, in milliseconds of it and of those that share it.

Tokens are the wrong unit where replicas differ in speed: the same prompt takes four times as long
on one that is four times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct, field

from mlxpool.broker.routing.prefix_index import PrefixIndex, PromptPieces
from mlxpool.broker.routing.worker_speed import WorkerSpeed, prompt_ms_of, step_ms_of

# Of a token that has to be read, beside one that others still read there: of two equal waits the
# one that computes less is taken. Simulated: 1.1 and more let first tokens of a hot prompt wait.
READ_WEIGHT = 1.02
MAX_OUTPUT = 200  # tokens of an answer that count: rows come and go, so later steps are not known
TRUST_WEIGHT = 0.1  # of the newest request in `trust`
MAX_SESSIONS = 512  # remembered of one worker
MAX_GROUPS = 512  # likewise


class Demand(Struct, frozen=True):
    """What a request asks of a worker. `session` is empty for a request without one."""

    pieces: PromptPieces
    output_tokens: int
    session: tuple[str, str] = ("", "")  # owner and name


class Route(Struct, eq=False):
    """What the broker knows of one incarnation of a worker for the choice among workers."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)
    trust: float = 1.0  # cached tokens over predicted ones, an average of requests
    sessions: dict[tuple[str, str], int] = field(default_factory=dict)  # -> tokens of the prompt
    groups: dict[tuple[str, str], None] = field(default_factory=dict)  # of choices, by owner
    predicted: dict[int, int] = field(default_factory=dict)  # run -> tokens taken to be cached
    unread: dict[int, int] = field(default_factory=dict)  # run without a first token -> tokens
    evicted: int = 0  # tokens that its cache has dropped, by the newest heartbeat

    def found(self, demand: Demand) -> int:
        """Returns how many tokens of a prompt the worker was sent before."""
        found = self.index.found(demand.pieces)
        if demand.session[1]:
            found = max(found, min(self.sessions.get(demand.session, 0), demand.pieces.tokens))
        return found

    def sent(self, run: int, demand: Demand) -> None:
        """The worker is given a request."""
        found = self.found(demand)
        self.predicted[run] = found
        self.unread[run] = max(1, demand.pieces.tokens - round(found * self.trust))
        self.index.add(demand.pieces)
        if demand.session[1]:
            self.sessions.pop(demand.session, None)
            self.sessions[demand.session] = demand.pieces.tokens
            if len(self.sessions) > MAX_SESSIONS:
                del self.sessions[next(iter(self.sessions))]

    def has_group(self, group: tuple[str, str]) -> None:
        """The worker is given a choice of this group: the others of it follow."""
        self.groups.pop(group, None)
        self.groups[group] = None
        if len(self.groups) > MAX_GROUPS:
            del self.groups[next(iter(self.groups))]

    def has_read(self, run: int) -> None:
        """The prompt of a run has been read."""
        self.unread.pop(run, None)

    def ended(self, run: int, cached: int | None = None) -> None:
        """A run has ended; `cached` tokens of its prompt were found, None: it was not said."""
        self.unread.pop(run, None)
        predicted = self.predicted.pop(run, 0)
        if cached is not None and predicted > 0:
            ratio = min(1.5, cached / predicted)
            self.trust += TRUST_WEIGHT * (ratio - self.trust)

    def drop_runs(self) -> None:
        """No run is in the worker any more."""
        self.unread.clear()
        self.predicted.clear()

    def dropped(self, evicted: int) -> None:
        """The worker's cache has dropped so many tokens since it started."""
        if evicted > self.evicted:
            self.index.shrink(evicted - self.evicted)
            self.evicted = evicted


class Crowd(Struct, frozen=True):
    """What the choice for one request takes account of beside each single worker.

    `cached` tokens of the prompt are taken to be in the cache that has most of them. To read them
    again elsewhere takes time from those that come behind: `behind` requests wait for each worker.
    """

    cached: float = 0.0
    behind: float = 0.0


ALONE = Crowd()


def crowd_of(
    demand: Demand, routes: Sequence[Route], waiting: int, first: Sequence[Demand]
) -> Crowd:
    """That of a request beside which `waiting` others wait for one of the workers.

    `first` are those whose turn it is. Those of them that begin alike do not lose by a second copy
    of that beginning: they are read there, too.
    """
    if not waiting:
        return ALONE
    begin = demand.pieces.keys[:1]
    others = sum(each.pieces.keys[:1] != begin for each in first) / max(1, len(first) - 1)
    cached = max(route.trust * route.found(demand) for route in routes)
    return Crowd(cached, others * waiting / len(routes))


def cost_ms(
    demand: Demand, route: Route, rows: int, model: WorkerSpeed, crowd: Crowd = ALONE
) -> float:
    """Returns the milliseconds that a request costs on a worker that runs `rows` others.

    They are the time to read what it has not cached, behind what it has still to read, and the
    decode steps of the answer. Of these, half the rows count that are there now: they end while the
    answer is made. What another worker has cached counts once more for each request that waits.
    `model` is the speed of the model's workers together.
    """
    found = route.trust * route.found(demand)
    unread, again = max(0.0, demand.pieces.tokens - found), max(0.0, crowd.cached - found)
    waiting = sum(route.unread.values())
    step_ms = step_ms_of(route.speed, model, 1 + rows / 2)
    return (
        prompt_ms_of(route.speed, model) * (READ_WEIGHT * unread + crowd.behind * again + waiting)
        + min(MAX_OUTPUT, demand.output_tokens) * step_ms
    )


# ---- choice of a pair ----------------------------------------------------------------------------
#
# The requests are the first ones of the owner whose turn it is. A request is passed by a later one
# that loses less on a free worker, MAX_PASSED times at most. No request waits for a worker while
# another one is free: to wait up to 50 ms for a cheaper one was simulated, and made no first token
# earlier.


R = TypeVar("R")
W = TypeVar("W")

MAX_REQUESTS = 16  # of an owner, among which the choice is made
MAX_PASSED = 32  # later requests that are given to a worker before one


class Pair(Struct, Generic[R, W], frozen=True):
    """A request and the worker that it is given to; `loss`: milliseconds above its cheapest."""

    request: R
    worker: W
    loss: float


def cheapest_pair(
    waiting: Sequence[R],
    workers: Sequence[W],
    cost: Callable[[R, W], float],
    free: Callable[[R, W], bool],
) -> Pair[R, W] | None:
    """Returns the pair that loses least beside the request's cheapest worker; None: none is free.

    `free` says whether a worker may be given a request now, `cost` what it costs there. Of equal
    losses the earlier request is taken, and of equal costs the earlier worker.
    """
    best: Pair[R, W] | None = None
    for request in waiting[:MAX_REQUESTS]:
        costs = [(cost(request, worker), worker) for worker in workers]
        open_ = [(ms, worker) for ms, worker in costs if free(request, worker)]
        if not open_:
            continue
        ms, worker = min(open_, key=lambda pair: pair[0])
        loss = ms - min(pair[0] for pair in costs)
        if best is None or loss < best.loss:
            best = Pair(request, worker, loss)
        if loss <= 0:
            break
    return best
