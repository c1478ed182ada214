"""Chooses a waiting request and a worker for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.broker.requests.request import Request
from mlxpool.broker.routing.prefix_index import pieces_of
from mlxpool.broker.routing.route_cost import (
    MAX_OUTPUT,
    Crowd,
    Demand,
    cheapest_pair,
    cost_ms,
    crowd_of,
)
from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.worker import Worker, WorkerState
from mlxpool.common.checks import natural
from mlxpool.common.progress import ProgressReading


def fits_facts(worker: Worker, request: Request) -> bool:
    """Returns whether a worker can resume a request's stream, by the `facts` of the stream.

    The worker must have the same model, and a context that is at least as long.
    """
    facts = request.run.facts
    if facts is None:
        return True
    return facts.digest in (None, worker.digest) and (facts.context or 0) <= worker.context


def keeps_batch_bounds(worker: Worker, request: Request) -> bool:
    """Returns whether the worker's batch may grow by this request within all bounds on its size.

    A request that may have ended a worker has such a bound: the largest batch that may contain it.
    """
    bounds = [b for b in (*worker.batch_bounds.values(), request.run.batch_bound) if b]
    return len(worker.leases) + 1 <= min(bounds) if bounds else True


def has_image_place(worker: Worker, request: Request) -> bool:
    """Returns whether the worker may get the images of a request; True without images.

    A worker prepares images one after the other, and a request occupies a place of the batch during
    that time. So at most half of a worker's places, but at least one place, may have images in
    preparation.
    """
    if not request.message.prompt.images:
        return True
    return len(worker.reading) < max(1, (worker.credit() + len(worker.leases)) // 2)


def group_of(request: Request) -> tuple[str, str] | None:
    """Returns (owner, name) of a request's group; None if the request is not a choice.

    A group has the choices (completions) of one prompt.
    """
    choice = request.message.choice
    return None if choice is None else (request.owner, choice.group)


def is_bound_elsewhere(worker: Worker, request: Request, workers: Sequence[Worker]) -> bool:
    """Returns whether the request is a choice whose group is bound to another worker.

    A group has the choices (completions) of one prompt. A choice waits for room in the worker of
    its group. A choice that may have ended a worker may get any worker.
    """
    group = group_of(request)
    if group is None or request.run.batch_bound or group in worker.route.groups:
        return False
    return any(
        group in other.route.groups
        and other.state in (WorkerState.READY, WorkerState.SUSPECT)
        and fits_facts(other, request)
        for other in workers
    )


def may_have(worker: Worker, request: Request, workers: Sequence[Worker]) -> bool:
    """Returns whether the worker, one of the model's `workers`, may get the request now."""
    return (
        worker.credit() > 0
        and fits_facts(worker, request)
        and keeps_batch_bounds(worker, request)
        and has_image_place(worker, request)
        and not is_bound_elsewhere(worker, request, workers)
    )


def could_have(worker: Worker, request: Request, workers: Sequence[Worker]) -> bool:
    """Returns whether the worker, one of `workers`, may get the request once it has room.

    Returns False while the worker runs a request that limits the size of the batch. Then this
    limit, and not the room, decides which requests run at the same time.
    """
    return (
        not worker.batch_bounds
        and fits_facts(worker, request)
        and has_image_place(worker, request)
        and not is_bound_elsewhere(worker, request, workers)
    )


def demand_of(request: Request, answer_tokens: float) -> Demand:
    """Returns the work that a request needs: its prompt, its output length, and its session.

    `answer_tokens` is the mean number of tokens in the model's answers.
    """
    if request.pieces is None:
        request.pieces = pieces_of(request.message.prompt)
    most = request.message.options.max_tokens
    output = min(most, answer_tokens) if most > 0 else answer_tokens
    session = request.message.session
    return Demand(request.pieces, round(output), (request.owner if session else "", session))


def choose_pair(
    waiting: Sequence[Request],
    workers: Sequence[Worker],
    model: WorkerSpeed,
    answer_tokens: float = MAX_OUTPUT,
    *,
    cache_aware: bool = True,
    behind: int = 0,
) -> tuple[Request, Worker] | None:
    """Returns a request of `waiting` and the worker that gets it; None if no pair is allowed.

    `model` is the measured speed of the model's workers. `behind` is the number of waiting requests
    besides the request to assign. The pair with the lowest loss is chosen: its cost minus the cost
    of the request's cheapest worker. If `cache_aware` is False, costs are ignored. Among equal
    pairs the earliest request is chosen, then the worker that can take the most further requests,
    then the worker that has been ready for longest.
    """
    serving = [worker for worker in workers if worker.serves]
    serving.sort(key=lambda worker: (-worker.credit(), worker.ready_at))
    if not serving or not serving[0].credit():
        return None
    if len(serving) == 1 or not cache_aware:
        pairs = ((request, worker) for request in waiting for worker in serving)
        return next((pair for pair in pairs if may_have(pair[1], pair[0], workers)), None)

    routes, crowds = [worker.route for worker in serving], dict[bytes, Crowd]()
    first = [demand_of(request, answer_tokens) for request in waiting] if behind else []

    def cost(request: Request, worker: Worker) -> float:
        demand = demand_of(request, answer_tokens)
        crowd = crowds.get(request.id)
        if crowd is None:
            crowd = crowds[request.id] = crowd_of(demand, routes, behind, first)
        return cost_ms(demand, worker.route, len(worker.leases), model, crowd)

    pair = cheapest_pair(
        waiting, serving, cost, lambda request, worker: may_have(worker, request, workers)
    )
    return None if pair is None else (pair.request, pair.worker)


# ---- measures of a worker for the choice ---------------------------------------------------------


def observe_beat(worker: Worker, model: WorkerSpeed) -> None:
    """Updates step times and the index of prefixes from the worker's newest heartbeat."""
    beat, route = worker.beat, worker.route
    for speed in (route.speed, model):
        speed.observe_step(beat.running, beat.step_ms)
    if worker.idle:
        route.speed.rest()
    route.dropped(natural(beat.prefix.get("evicted_tokens")))
    if capacity := natural(beat.memory.get("capacity_tokens")):
        route.index.bound(capacity)


def observe_prefill(worker: Worker, look: ProgressReading, model: WorkerSpeed) -> None:
    """Updates the time of a prompt token from a worker that is reading a prompt."""
    if look.tokens > 0:
        for speed in (worker.route.speed, model):
            speed.observe_prompt(look.usual_token_ns / 1e6)
