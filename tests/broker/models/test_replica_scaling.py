"""The number of workers of a model: pure functions of its requests and the time."""

from __future__ import annotations

import pytest

from mlxpool.broker.models.replica_scaling import (
    HOLD,
    ReplicaLoad,
    ReplicaScale,
    needed,
    next_scale,
)
from mlxpool.common.config.schema import Scaling

RULES = Scaling(min=1, max=4, waiting_tokens=1000, cool_down=300.0)
IDLE = ReplicaLoad(0, 0, 0, 8)


def queue(tokens: int, waiting: int = 100, running: int = 8) -> ReplicaLoad:
    return ReplicaLoad(waiting, tokens, running, 8)


@pytest.mark.parametrize(
    ("load", "wanted", "expected"),
    [
        (IDLE, 1, 1),
        (IDLE, 4, 1),
        (queue(1000), 1, 1),
        (queue(1001), 1, 2),
        (queue(3500), 1, 4),
        (queue(10**9), 1, 4),  # not above max
        (queue(10**9, waiting=1), 1, 2),  # one prompt of any length needs one more worker
        (queue(0, 0, running=8), 1, 1),  # all workers are full, but no request waits
        (queue(0, 0, running=16), 4, 3),  # 16 rows are 2.7 workers that are three quarters full
        (queue(0, 0, running=100), 2, 2),  # running sequences need no more workers than there are
        (ReplicaLoad(0, 0, 18, 8, workers=3), 1, 3),  # a new broker finds three working workers
    ],
)
def test_the_workers_that_a_load_needs(load: ReplicaLoad, wanted: int, expected: int) -> None:
    assert needed(load, wanted, RULES) == expected


def test_workers_are_added_once_too_much_has_waited_for_a_while() -> None:
    scale = next_scale(ReplicaScale(1), queue(2500), RULES, 10.0)
    assert scale.wanted == 1
    scale = next_scale(scale, queue(2500), RULES, 10.0 + HOLD - 0.1)
    assert scale.wanted == 1
    assert next_scale(scale, queue(2500), RULES, 10.0 + HOLD) == ReplicaScale(3)


def test_a_short_queue_adds_none() -> None:
    scale = next_scale(ReplicaScale(1), queue(2500), RULES, 10.0)
    scale = next_scale(scale, IDLE, RULES, 11.0)
    assert next_scale(scale, queue(2500), RULES, 10.0 + HOLD).wanted == 1


def test_workers_that_are_starting_count_as_there() -> None:
    """Workers that still load the model count, so a constant queue starts no more of them."""
    scale = ReplicaScale(3)
    for second in range(60):
        scale = next_scale(scale, queue(2500), RULES, float(second))
    assert scale.wanted == 3


def test_the_first_worker_of_none_is_wanted_at_once() -> None:
    rules = Scaling(min=0, max=4, waiting_tokens=1000)
    assert next_scale(ReplicaScale(0), IDLE, rules, 1.0).wanted == 0
    assert next_scale(ReplicaScale(0), queue(5, waiting=1, running=0), rules, 1.0).wanted == 1


def test_workers_are_ended_to_the_most_that_were_needed_in_the_cool_down() -> None:
    scale = next_scale(ReplicaScale(4), queue(0, 0, 4), RULES, 0.0)
    scale = next_scale(scale, queue(0, 0, 12), RULES, 100.0)  # needs two workers
    scale = next_scale(scale, queue(0, 0, 1), RULES, 299.0)
    assert scale.wanted == 4
    assert next_scale(scale, queue(0, 0, 1), RULES, 300.0) == ReplicaScale(2)


def test_a_moment_of_need_begins_the_cool_down_again() -> None:
    scale = next_scale(ReplicaScale(2), IDLE, RULES, 0.0)
    scale = next_scale(scale, queue(1500), RULES, 299.0)
    scale = next_scale(scale, IDLE, RULES, 301.0)
    assert next_scale(scale, IDLE, RULES, 600.0).wanted == 2
    assert next_scale(scale, IDLE, RULES, 601.0).wanted == 1


def test_new_bounds_hold_at_once() -> None:
    assert next_scale(ReplicaScale(9), queue(10**6), RULES, 0.0).wanted == 4
    assert next_scale(ReplicaScale(0), IDLE, RULES, 0.0).wanted == 1
