"""The jobs of one owner do not keep other owners' jobs from a model's workers."""

from __future__ import annotations

from collections import Counter

from mlxpool.broker.jobs.feeding import MAX_WITH_OTHERS, WINDOW
from mlxpool.broker.store.operations import FeedNext
from support.core_harness import BOB, OWNER, FakeWorker
from support.job_harness import JobStory

PLACES = 4


def flooded(jobs: int = 40) -> tuple[JobStory, FakeWorker]:
    """Makes a worker full of one owner's jobs; many more jobs wait in the store."""
    story = JobStory()
    worker = story.ready_worker(sequences=PLACES)
    for number in range(jobs):
        story.submit(f"{number}")
    story.settle()
    for job in list(worker.runs):
        worker.tokens(job, 1)
    story.settle()
    return story, worker


def go_on(story: JobStory, worker: FakeWorker, seconds: float) -> None:
    """Lets time pass; the worker confirms its cancelled runs meanwhile."""
    end = story.now + seconds
    while story.now < end:
        story.pass_time(0.1)
        for job in [ident for ident, _ in worker.cancelled if ident in worker.runs]:
            worker.confirm(job)
        worker.cancelled.clear()
        worker.credit()
        worker.beat()
        story.settle()


def owners(story: JobStory, worker: FakeWorker) -> Counter[str]:
    return Counter(story.request(job).owner for job in worker.runs)


def test_the_job_of_another_owner_is_run_beside_a_flood() -> None:
    story, worker = flooded()
    assert owners(story, worker) == {OWNER: PLACES}
    story.submit("bob's", owner=BOB)
    go_on(story, worker, 1.0)
    assert owners(story, worker) == {OWNER: PLACES - 1, BOB: 1}
    assert story.core.state.counters.preempted == 1


def test_two_floods_have_equal_shares() -> None:
    story, worker = flooded()
    for number in range(40):
        story.submit(f"{number}", owner=BOB)
    go_on(story, worker, 2.0)
    assert owners(story, worker) == {OWNER: PLACES // 2, BOB: PLACES // 2}


def test_the_core_has_a_bounded_number_of_jobs_of_many_owners() -> None:
    story, worker = flooded()
    for number in range(30):
        for key in ("a", "b"):
            story.submit(key, owner=f"uid:{100 + number}")
    go_on(story, worker, 10.0)
    most = MAX_WITH_OTHERS * WINDOW * PLACES
    assert len({request.owner for request in story.core.state.requests.values()}) > 20
    assert len(story.core.state.requests) <= most + 1


def test_one_owner_alone_is_not_looked_for_again_and_again() -> None:
    story, worker = flooded()
    asked: list[FeedNext] = []
    offer = story.store.offer

    def count(operation: object) -> None:
        if isinstance(operation, FeedNext):
            asked.append(operation)
        offer(operation)

    story.store.offer = count
    for number in range(20):
        story.submit(f"more {number}")
        go_on(story, worker, 0.3)
    assert len(asked) <= 1
