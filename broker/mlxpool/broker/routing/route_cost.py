"""The cost of running a request on a worker, in milliseconds.

It includes the time by which the request delays other requests. The unit is not tokens, because
replicas differ in speed: on a replica that is four times slower a prompt takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct, field

from mlxpool.broker.routing.prefix_index import PrefixIndex, PromptPieces
from mlxpool.broker.routing.worker_speed import WorkerSpeed, prompt_ms_of, step_ms_of

# Weight of a prompt token that the request has to read, relative to a token that the worker still
# has to read for other requests. If two workers let a request wait equally long, the worker that
# computes less for it is chosen. In simulations, weights of 1.1 and more delayed the first tokens
# of a prompt that many requests have.
READ_WEIGHT = 1.02
MAX_OUTPUT = 200  # most output tokens that count in a cost: the true number is unknown
TRUST_WEIGHT = 0.1  # weight of the newest request in `trust`
MAX_SESSIONS = 512  # most sessions remembered of a worker
MAX_GROUPS = 512  # most groups remembered of a worker


class Demand(Struct, frozen=True):
    """The resources that a request needs on a worker.

    `session` is empty if the request has none.
    """

    pieces: PromptPieces
    output_tokens: int
    session: tuple[str, str] = ("", "")  # owner and name


class Route(Struct, eq=False):
    """The broker's data about a worker, used to compute the cost of a request on this worker."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)
    trust: float = 1.0  # ratio of cached to predicted tokens, averaged over requests
    sessions: dict[tuple[str, str], int] = field(default_factory=dict)  # -> newest prompt's tokens
    groups: dict[tuple[str, str], None] = field(default_factory=dict)  # (owner, group of choices)
    predicted: dict[int, int] = field(default_factory=dict)  # run -> predicted cached tokens
    unread: dict[int, int] = field(default_factory=dict)  # run -> prompt tokens still to read
    evicted: int = 0  # tokens evicted from the worker's cache, as of the newest heartbeat

    def found(self, demand: Demand) -> int:
        """Returns the number of a prompt's leading tokens that were sent to the worker before."""
        tokens = self.index.found(demand.pieces)
        if demand.session[1]:
            tokens = max(tokens, min(self.sessions.get(demand.session, 0), demand.pieces.tokens))
        return tokens

    def sent(self, run: int, demand: Demand) -> None:
        """Records that a request was sent to the worker, as the run with the number `run`."""
        cached = self.found(demand)
        self.predicted[run] = cached
        self.unread[run] = max(1, demand.pieces.tokens - round(cached * self.trust))
        self.index.add(demand.pieces)
        if demand.session[1]:
            self.sessions.pop(demand.session, None)
            self.sessions[demand.session] = demand.pieces.tokens
            if len(self.sessions) > MAX_SESSIONS:
                del self.sessions[next(iter(self.sessions))]

    def has_group(self, group: tuple[str, str]) -> None:
        """Records that the worker has a choice of this group.

        The worker then also gets the other choices of the group.
        """
        self.groups.pop(group, None)
        self.groups[group] = None
        if len(self.groups) > MAX_GROUPS:
            del self.groups[next(iter(self.groups))]

    def has_read(self, run: int) -> None:
        """Records that the worker has read the prompt of a run."""
        self.unread.pop(run, None)

    def ended(self, run: int, cached: int | None = None) -> None:
        """Records the end of a run.

        `cached`: the number of its prompt's tokens that were in the cache, or None if unknown.
        """
        self.unread.pop(run, None)
        predicted = self.predicted.pop(run, 0)
        if cached is not None and predicted > 0:
            ratio = min(1.5, cached / predicted)
            self.trust += TRUST_WEIGHT * (ratio - self.trust)

    def drop_runs(self) -> None:
        """Forgets all runs, because the worker has lost them."""
        self.unread.clear()
        self.predicted.clear()

    def dropped(self, evicted: int) -> None:
        """Updates the index after evictions.

        `evicted`: the number of tokens that the worker's cache has evicted since the worker's
        start.
        """
        if evicted > self.evicted:
            self.index.shrink(evicted - self.evicted)
            self.evicted = evicted


class Crowd(Struct, frozen=True):
    """The requests that wait behind a request, and the tokens that may be read a second time.

    `cached`: an estimate of the most tokens of the request's prompt that any worker has cached.
    Every other worker has to read these tokens again, which delays the waiting requests. `behind`:
    the number of waiting requests per worker.
    """

    cached: float = 0.0
    behind: float = 0.0


ALONE = Crowd()


def crowd_of(
    demand: Demand, routes: Sequence[Route], waiting: int, first: Sequence[Demand]
) -> Crowd:
    """Returns the Crowd of a request: its cached tokens, and the requests that wait behind it.

    `waiting`: the number of other requests that wait for these workers. Requests whose prompts
    begin like this request's prompt do not count as waiting: they gain if a second worker caches
    this beginning. The number of such requests is estimated from `first`, the requests that may be
    assigned next.
    """
    if not waiting:
        return ALONE
    begin = demand.pieces.keys[:1]
    others = sum(other.pieces.keys[:1] != begin for other in first) / max(1, len(first) - 1)
    cached = max(route.trust * route.found(demand) for route in routes)
    return Crowd(cached, others * waiting / len(routes))


def cost_ms(
    demand: Demand, route: Route, rows: int, model: WorkerSpeed, crowd: Crowd = ALONE
) -> float:
    """Returns the cost in milliseconds of a request on a worker that runs `rows` other requests.

    It is the sum of three times:
    - the prefill of prompts that the worker has not read yet, and of those tokens of this request's
      prompt that the worker has not cached;
    - the decode steps of the answer, in batches of 1 + `rows` / 2 requests: on average half of the
      other requests are still running;
    - the delay of the requests that wait behind this request: the prefill of tokens that only other
      workers have cached, times the number of waiting requests per worker.

    `model` is the speed of all workers of the model, for a worker with few measurements.
    """
    cached = route.trust * route.found(demand)
    unread, again = max(0.0, demand.pieces.tokens - cached), max(0.0, crowd.cached - cached)
    waiting = sum(route.unread.values())
    step_ms = step_ms_of(route.speed, model, 1 + rows / 2)
    return (
        prompt_ms_of(route.speed, model) * (READ_WEIGHT * unread + crowd.behind * again + waiting)
        + min(MAX_OUTPUT, demand.output_tokens) * step_ms
    )


# ---- choice of a pair ----------------------------------------------------------------------------
#
# The requests are the first requests of the owner that is next. A later request overtakes an
# earlier request if its loss (see Pair) is lower. A request is overtaken at most MAX_PASSED times.
# No request waits while a worker is free: in simulations a wait of up to 50 ms for a cheaper worker
# made no first token earlier.


R = TypeVar("R")
W = TypeVar("W")

MAX_REQUESTS = 16  # most requests of an owner among which the choice is made
MAX_PASSED = 32  # most later requests that may overtake a request


class Pair(Struct, Generic[R, W], frozen=True):
    """A request and a worker for it.

    `loss`: the cost of the pair in milliseconds above the cost of the request's cheapest worker.
    """

    request: R
    worker: W
    loss: float


def cheapest_pair(
    waiting: Sequence[R],
    workers: Sequence[W],
    cost: Callable[[R, W], float],
    free: Callable[[R, W], bool],
) -> Pair[R, W] | None:
    """Returns the pair with the lowest loss; None if no worker is free.

    `free` returns whether a worker may get a request now. `cost` returns the cost of a request on a
    worker. Among pairs of equal loss the earlier request is chosen, among workers of equal cost the
    earlier worker.
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
