"""A job that may have crashed a worker runs alone in its worker, but does not delay streams."""

from __future__ import annotations

import pytest

from mlxpool.broker.jobs.runs import CHARGED_IDS, IDLE_IDS
from mlxpool.broker.requests.blame import MAX_WAIT, MAX_WAIT_IDLE
from mlxpool.broker.store.records import JobState, JobView
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_harness import FakeWorker
from support.job_harness import JobStory

PLACES = 3


def charged_in_the_next_broker(priority: int = 0) -> tuple[JobStory, JobView]:
    """Makes a restarted broker with a job "a" that is suspected to have ended a worker."""
    story = JobStory()
    worker = story.ready_worker(sequences=PLACES)
    story.submit("a", priority=priority)
    story.settle()
    job = story.job("a")
    assert job.id in worker.runs
    worker.die("killed by SIGSEGV", own=True)
    story.settle()
    return story.restart(), job


def running_alone(priority: int = 0) -> tuple[JobStory, JobView, FakeWorker]:
    """Makes the simulation of `charged_in_the_next_broker`, and a worker that runs its job."""
    story, job = charged_in_the_next_broker(priority)
    worker = story.ready_worker(sequences=PLACES)
    story.pass_time(0.5)
    assert list(worker.runs) == [job.id]
    return story, job, worker


def tokens(story: JobStory, worker: FakeWorker, job: JobView, count: int) -> None:
    """Lets the worker make up to `count` tokens of the job, fewer if the job is cancelled.

    Confirms the cancel.
    """
    for _ in range(count):
        if any(id == job.id for id, _ in worker.cancelled):
            break
        worker.tokens(job.id, 1)
        story.drain()
    story.settle()
    if worker.cancelled:
        worker.confirm(job.id)
        worker.cancelled.clear()
        worker.credit()


def busy(story: JobStory, worker: FakeWorker, seconds: float) -> None:
    """Lets streams come and go for `seconds`: one always runs, and one arrives each second."""
    end = story.now + seconds
    while story.now < end:
        story.generate()
        for stream in sorted(worker.runs)[:-1]:
            worker.end(stream)
        worker.credit()
        worker.beat()
        story.pass_time(1.0)


def test_a_charged_job_runs_alone_in_the_next_broker_as_well() -> None:
    """The suspected job is alone in its worker: if that worker ends, no other job is blamed."""
    story, job = charged_in_the_next_broker()
    for key in ("b", "c"):
        story.submit(key)
    story.settle()
    worker = story.ready_worker(sequences=PLACES)
    story.pass_time(0.5)
    assert list(worker.runs) == [job.id]
    worker.die("killed by SIGSEGV", own=True)
    story.settle()
    assert "ended two workers" in story.assert_state("a", JobState.DEAD).cause
    others = [story.assert_state(key, JobState.WAITING) for key in ("b", "c")]
    assert [other.charge for other in others] == [0.0, 0.0]
    story.pass_time(10.0)
    worker = story.ready_worker(sequences=PLACES)
    story.pass_time(0.5)
    assert set(worker.runs) == {other.id for other in others}


@pytest.mark.parametrize(("priority", "wait"), [(0, MAX_WAIT), (-1, MAX_WAIT_IDLE)])
def test_a_charged_job_lets_streams_go_first_for_a_time(priority: int, wait: float) -> None:
    story, job = charged_in_the_next_broker(priority)
    worker = story.ready_worker(sequences=PLACES)
    story.generate()
    assert len(worker.runs) == 1
    busy(story, worker, wait - 5)
    assert worker.runs and job.id not in worker.runs
    story.pass_time(6.0)
    last = story.generate()
    assert last not in worker.runs, "nothing new when the charged one has waited for long enough"
    for stream in sorted(worker.runs):
        worker.end(stream)
    worker.credit()
    assert list(worker.runs) == [job.id]
    worker.end(job.id)
    worker.credit()
    assert list(worker.runs) == [last]


def test_a_charged_job_gets_a_worker_that_others_leave() -> None:
    """The worker gets no new jobs until it is empty and has run the charged job."""
    story, job = charged_in_the_next_broker()
    worker = story.ready_worker(sequences=PLACES)
    first = story.generate()
    story.pass_time(0.5)
    story.submit("b")
    story.settle()
    story.pass_time(0.5)
    assert list(worker.runs) == [first], "no other job while the charged one waits"
    worker.end(first)
    worker.credit()
    assert list(worker.runs) == [job.id]


def test_a_charged_job_of_a_high_priority_waits_for_no_stream_of_a_lower_one() -> None:
    story, job = charged_in_the_next_broker(priority=2)
    worker = story.ready_worker(sequences=PLACES)
    first = story.generate()
    story.pass_time(0.5)
    second = story.generate(priority=1)
    assert list(worker.runs) == [first]
    worker.end(first)
    worker.credit()
    assert list(worker.runs) == [job.id]
    tokens(story, worker, job, 2 * CHARGED_IDS)
    assert list(worker.runs) == [job.id]
    worker.end(job.id)
    worker.credit()
    assert list(worker.runs) == [second]


@pytest.mark.parametrize(("priority", "ids"), [(0, CHARGED_IDS), (-1, IDLE_IDS)])
def test_a_charged_job_gives_way_though_its_worker_has_places(priority: int, ids: int) -> None:
    """The job is preempted for waiting requests, because its worker runs nothing beside the job."""
    story, job, worker = running_alone(priority)
    tokens(story, worker, job, 3)
    stream = story.generate()
    assert stream not in worker.runs
    tokens(story, worker, job, ids + 1)
    assert list(worker.runs) == [stream]
    waiting = story.assert_state("a", JobState.WAITING)
    assert (waiting.pos, waiting.attempts, waiting.charge) == (ids + 4, 0, 1.0)
    worker.end(stream)
    worker.credit()
    story.pass_time(0.5)
    assert worker.runs[job.id].pos == ids + 4


def test_a_charged_job_gives_way_to_no_other_job_of_its_priority() -> None:
    story, job, worker = running_alone()
    story.submit("b")
    story.settle()
    tokens(story, worker, job, 2 * CHARGED_IDS)
    assert list(worker.runs) == [job.id]


def test_a_charged_job_that_always_gives_way_ends_with_all_its_ids() -> None:
    story, job, worker = running_alone()
    turns = 0
    for turn in range(1, 100):
        if worker.runs[job.id].pos >= 3 * CHARGED_IDS:
            break
        story.generate()
        tokens(story, worker, job, CHARGED_IDS + 2)
        assert job.id not in worker.runs
        busy(story, worker, MAX_WAIT + 3)
        for stream in sorted(worker.runs):
            worker.end(stream)
        worker.credit()
        turns = turn
    assert turns == 3
    worker.end(job.id, count=5)
    story.settle()
    done = story.assert_state("a", JobState.DONE)
    assert story.store.output(job.id)[0] == pack_ids(range(done.pos)) and done.attempts == 0
    assert done.pos == 3 * (CHARGED_IDS + 1) + 5


def test_a_charged_stream_waits_for_nobody() -> None:
    """A suspected stream starts immediately, because its client waits."""
    story = JobStory()
    worker = story.ready_worker(sequences=PLACES)
    charged = story.generate()
    worker.die("killed by SIGSEGV", own=True, prefill=charged)
    worker = story.ready_worker(sequences=PLACES)
    other = story.generate(priority=2)
    assert list(worker.runs) == [charged]
    worker.end(charged)
    worker.credit()
    assert list(worker.runs) == [other]
