"""Computes how many workers a model should have, given its load and the time. Pure.

The workers are started by the pool's own supervisor, or by a cluster (`mlxpool.cluster`), which
reads the number in the broker's figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.requests.fair_queue import cost
from mlxpool.broker.requests.request import Request
from mlxpool.common.config.schema import Scaling

HOLD = 2.0  # seconds of too high a load before workers are added
FULL = 0.75  # after a scale-down each worker runs at most this share of its sequences
MAX_COUNTED = 1024  # most requests of a queue whose tokens are counted; others count as the mean


class ReplicaLoad(Struct, frozen=True):
    """The present load of a model."""

    waiting: int  # waiting requests
    waiting_tokens: int  # tokens of their prompts and of their expected answers
    running: int  # requests in workers
    sequences: int  # sequences in a worker's batch
    workers: int = 0  # workers that serve


class ReplicaScale(Struct, frozen=True):
    """The wanted number of a model's workers, and since when the load needs more or fewer."""

    wanted: int = 0
    high_since: float | None = None  # time since when more workers are needed; None: not needed
    low_since: float | None = None  # time since when fewer workers are enough; None: not enough
    peak: int = 0  # most workers needed since `low_since`


def waiting_tokens(queue: Iterable[Request], count: int) -> int:
    """Returns an estimate of the tokens of `count` waiting requests.

    The estimate is `count` times the mean of the first MAX_COUNTED requests of the queue.
    """
    costs = [cost(request) for request in islice(queue, MAX_COUNTED)]
    return sum(costs) * count // len(costs) if costs else 0


def needed(load: ReplicaLoad, wanted: int, rules: Scaling) -> int:
    """Returns the number of workers that this load needs.

    `wanted`: the number of workers that the model should have so far, including those that are
    still starting.
    """
    by_waiting = math.ceil(load.waiting_tokens / rules.waiting_tokens)
    # Only one worker reads a long prompt, so each waiting request adds at most one worker.
    by_waiting = min(by_waiting, wanted + load.waiting)
    # More workers than wanted may serve, if they connect to a restarted broker.
    by_running = min(max(wanted, load.workers), math.ceil(load.running / (FULL * load.sequences)))
    return max(rules.min, min(rules.max, max(by_waiting, by_running)))


def next_scale(scale: ReplicaScale, load: ReplicaLoad, rules: Scaling, now: float) -> ReplicaScale:
    """Returns the number of workers that a model should have now.

    The number rises if more workers were needed for HOLD seconds; from 0 it rises immediately.
    Workers that are still starting are part of the number. The number falls if fewer workers were
    enough during the last `cool_down` seconds. It then falls to the largest number that was needed
    in this time.
    """
    wanted = max(rules.min, min(rules.max, scale.wanted))
    need = needed(load, wanted, rules)
    if need > wanted:
        since = now if scale.high_since is None else scale.high_since
        if wanted and now - since < HOLD:
            return ReplicaScale(wanted, high_since=since)
        return ReplicaScale(need)
    if need < wanted:
        since = now if scale.low_since is None else scale.low_since
        peak = max(need, scale.peak)
        if now - since < rules.cool_down:
            return replace(scale, wanted=wanted, high_since=None, low_since=since, peak=peak)
        return ReplicaScale(peak)
    return ReplicaScale(wanted)
