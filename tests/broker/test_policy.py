"""Which request, which worker, how long to wait."""

from __future__ import annotations

import pytest

from mlxpool.broker.policy import LOOK_AHEAD, choose_worker, next_request, restart_delay
from mlxpool.broker.requests import Payload, Request
from mlxpool.broker.workers import Worker, WorkerState


def request(number: int, priority: int = 0) -> Request:
    payload = Payload.parse({"model": "m", "prompt": "a", "priority": priority}, ())
    ident = number.to_bytes(16, "big")
    return Request(ident, 1, 1, "uid:1", b"", payload, 0, 0.0, 1.0, 1.0)


def worker(name: str, free: int, ready_at: float = 1.0, **fields: int) -> Worker:
    made = Worker(name, "m", state=WorkerState.READY, sequences=free, ready_at=ready_at)
    made.works_sent = fields.get("unseen", 0)
    return made


def test_no_request() -> None:
    assert next_request([]) is None


def test_the_oldest_of_the_highest_priority() -> None:
    queue = [request(1), request(2, 1), request(3, 2), request(4, 2)]
    assert next_request(queue) is queue[2]
    assert next_request(queue[:1]) is queue[0]


def test_the_look_ahead_is_bounded() -> None:
    queue = [request(n) for n in range(LOOK_AHEAD)] + [request(9999, 2)]
    assert next_request(queue) is queue[0]


def test_no_worker() -> None:
    assert choose_worker([]) is None
    assert choose_worker([worker("a", 0), worker("b", 2, unseen=2)]) is None


def test_a_worker_that_is_not_ready_gets_nothing() -> None:
    suspect = worker("a", 9)
    suspect.move("suspect")
    assert choose_worker([suspect]) is None
    other = worker("b", 1)
    assert choose_worker([suspect, other]) is other


def test_the_worker_with_most_room_then_the_longest_ready() -> None:
    few, many = worker("a", 1), worker("b", 3, unseen=1)
    assert choose_worker([few, many]) is many
    young, old = worker("a", 2, ready_at=9.0), worker("b", 2, ready_at=3.0)
    assert choose_worker([young, old]) is old


@pytest.mark.parametrize(
    ("failures", "delay"), [(-1, 0), (0, 0), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10**9, 60)]
)
def test_the_restart_delay_doubles_up_to_a_bound(failures: int, delay: float) -> None:
    assert restart_delay(failures, 1.0, 60.0) == delay
