"""Has runs give up their places for owners that wait, as requests/place_shares.py decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.state import State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests.place_shares import Held, Wanted, decide
from mlxpool.broker.requests.request import IDLE_RANK, Request
from mlxpool.broker.requests.request_states import RequestState
from mlxpool.broker.workers.placement import could_have
from mlxpool.broker.workers.worker import Worker

MAX_WANTED = 64  # waiting requests for which one decision is made


class PlaceSharing:
    """Where all owners of the pool are one, nothing is looked at."""

    def __init__(self, state: State, pool: WorkerPool, delivery: Delivery) -> None:
        self._state = state
        self._pool = pool
        self._delivery = delivery

    def share(self, model: Model, now: float) -> None:
        """Have runs give up their places for what waits for a model and got none."""
        key, timers = ("places", model.name), self._state.timers
        again = model.places.kept_until(now) if model.queue else math.inf
        if not model.queue or len(self._state.owned) < 2:
            timers.set(key, again)
            return
        serving = [worker for worker in model.workers if worker.serves]
        wanted = [*islice(self._wanted(model, serving), MAX_WANTED)]
        if wanted:
            held, coming = self._held(serving)
            decision = decide(held, wanted, model.places.held, coming, now)
            for request, taker in decision.gives:
                self._give(model, request, taker, now)
            again = min(again, decision.again)
        timers.set(key, again)

    def _wanted(self, model: Model, serving: list[Worker]) -> Iterator[Wanted]:
        """The waiting requests whose owners have fewer places than others, in their turns.

        An idle job takes no place from others, and one that needs a worker for itself waits for it.
        """
        counts = model.places.held
        most = max(counts.values(), default=0)
        for request in model.queue.first_of_owners(sum(counts.values())):
            own = counts[request.owner]
            if own and own + 2 > most:
                continue
            if request.rank == IDLE_RANK or request.run.batch_bound:
                continue
            workers = frozenset(
                worker.epoch for worker in serving if could_have(worker, request, model.workers)
            )
            if workers:
                yield Wanted(request, workers)

    def _held(self, serving: list[Worker]) -> tuple[list[Held], dict[int, int]]:
        """The runs of workers, and how many places of each are free or about to be."""
        held: list[Held] = []
        coming: dict[int, int] = {}
        for worker in serving:
            coming[worker.epoch] = worker.credit() + worker.ended
            for id, number in worker.leases:
                request = self._state.requests.get(id)
                if request is None or not request.run.leased_by(worker.epoch, number):
                    coming[worker.epoch] += 1  # it was told to end
                elif not request.run.batch_bound:
                    proven = request.state is RequestState.STREAMING
                    held.append(Held(request, worker.epoch, request.run.leased_at, proven))
        return held, coming

    def _give(self, model: Model, request: Request, taker: str, now: float) -> None:
        """End a run in its worker; the place is free when the worker confirms that."""
        self._pool.cancel_run(request)
        request.move("requeue")
        request.run.release(now)
        self._state.counters.preempt(request)
        model.places.give(request.owner, taker)
        model.queue.add_preempted(request)
        self._delivery.set_timer(request)
