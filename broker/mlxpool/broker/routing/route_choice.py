"""Chooses a pair of a waiting request and a worker. Pure.

The requests are the first ones of the owner whose turn it is. A request is passed by a later one
that loses less on a free worker, MAX_PASSED times at most. No request waits for a worker while
another one is free: to wait up to 50 ms for a cheaper one was simulated, and made no first token
earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

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
