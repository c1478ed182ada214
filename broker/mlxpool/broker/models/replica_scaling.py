"""How many workers a model should have, from what waits for it and from the time. Pure.

Who starts workers follows this number: the pool's own supervisor, or a cluster
(`mlxpool.cluster`), which reads it in the broker's figures.
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

HOLD = 2.0  # seconds for which too much must have waited before workers are added
FULL = 0.75  # share of its sequences that a worker may be asked to run when others are ended
MAX_COUNTED = 1024  # requests of a queue whose tokens are counted; the rest is taken to be alike


class ReplicaLoad(Struct, frozen=True):
    """What a model has to do now."""

    waiting: int  # requests
    waiting_tokens: int  # of their prompts, and of the answers that they ask for
    running: int  # requests that workers have
    sequences: int  # that one worker runs at once
    workers: int = 0  # that serve


class ReplicaScale(Struct, frozen=True):
    """The number of workers that a model should have, and since when it seems wrong."""

    wanted: int = 0
    high_since: float | None = None  # more have been needed since then; None: they are not
    low_since: float | None = None  # fewer have been enough since then; None: they are not
    peak: int = 0  # the most that were needed since `low_since`


def waiting_tokens(queue: Iterable[Request], count: int) -> int:
    """The tokens of `count` waiting requests, estimated from the first MAX_COUNTED."""
    costs = [cost(request) for request in islice(queue, MAX_COUNTED)]
    return sum(costs) * count // len(costs) if costs else 0


def needed(load: ReplicaLoad, wanted: int, rules: Scaling) -> int:
    """The workers that this load needs, where there are, or will be, `wanted` of them."""
    by_waiting = math.ceil(load.waiting_tokens / rules.waiting_tokens)
    # A single long prompt is read by one worker, however many there are.
    by_waiting = min(by_waiting, wanted + load.waiting)
    # Workers that serve may be more than are wanted: after its restart a broker finds them.
    by_running = min(max(wanted, load.workers), math.ceil(load.running / (FULL * load.sequences)))
    return max(rules.min, min(rules.max, max(by_waiting, by_running)))


def next_scale(scale: ReplicaScale, load: ReplicaLoad, rules: Scaling, now: float) -> ReplicaScale:
    """The number after a look at the load.

    It rises when more have been needed for HOLD, at once from none; workers that are starting
    count as there. It falls when fewer have been enough for `cool_down`, to the most that were
    needed in this time.
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
