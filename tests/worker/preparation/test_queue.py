"""The fair queue: owners in turn, removal, deadlines, bytes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.preparation.jobs import Encode
from mlxpool.worker.preparation.queue import FairQueue, Waiting


def waiting(key: int, owner: str = "a", size: int = 1, deadline: float = math.inf) -> Waiting:
    return Waiting(key, owner, size, Encode("x"), deadline)


def filled(*all: Waiting) -> FairQueue:
    queue = FairQueue()
    for job in all:
        queue.add(job)
    return queue


def test_owners_take_turns_and_each_has_its_order() -> None:
    queue = filled(*(waiting(key) for key in range(3)), waiting(8, "b"), waiting(9, "c"))
    assert [job.key for job in taken(queue)] == [0, 8, 9, 1, 2]
    assert len(queue) == queue.bytes == 0


def taken(queue: FairQueue) -> list[Waiting]:
    """Takes all jobs, and returns them in the order taken."""
    return [job for _ in range(len(queue)) if (job := queue.take()) is not None]


def test_skipped_owners_keep_their_turn() -> None:
    queue = filled(waiting(1), waiting(2, "b"), waiting(3, "b"))
    assert queue.take({"a"}) == waiting(2, "b")
    assert queue.take({"a", "b"}) is None
    assert [job.key for job in taken(queue)] == [1, 3]
    assert queue.take() is None


def test_a_removed_job_is_not_taken() -> None:
    queue = filled(waiting(1), waiting(2, size=5), waiting(3, "b"))
    assert queue.remove(2) == waiting(2, size=5) and queue.remove(2) is None
    assert queue.bytes == 2
    assert [job.key for job in taken(queue)] == [1, 3]


def test_deadlines() -> None:
    queue = filled(waiting(1, deadline=5.0), waiting(2, deadline=3.0), waiting(3))
    assert queue.next_deadline() == 3.0
    assert queue.expired(2.9) == []
    assert [job.key for job in queue.expired(5.0)] == [1, 2]
    assert queue.next_deadline() == math.inf and len(queue) == 1
    queue.clear()
    assert len(queue) == queue.bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=40))
def test_every_job_is_taken_once_and_no_owner_waits_for_two_of_another(
    jobs: list[tuple[str, int, bool]],
) -> None:
    queue = FairQueue()
    kept = {}
    for key, (owner, size, removed) in enumerate(jobs):
        queue.add(waiting(key, owner, size))
        if removed:
            assert queue.remove(key) is not None
        else:
            kept[key] = owner
    assert queue.bytes == sum(jobs[key][1] for key in kept)
    all = taken(queue)
    assert {job.key for job in all} == set(kept) and len(all) == len(kept)
    owners = [job.owner for job in all]
    for index in range(len(owners) - 1):
        if owners[index] == owners[index + 1]:
            assert set(owners[index + 1 :]) == {owners[index]}
