"""When the store writes jobs' output and ends: soon if a reader waits, otherwise in groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.active import UNREAD_BYTES, UNREAD_DELAY, WRITE_DELAY
from mlxpool.broker.jobs.feeding import FEED_INTERVAL, MAX_LEAVING, AnswerRoom, Feeder
from mlxpool.broker.jobs.manager import PLACE_DELAY, POLL_INTERVAL
from mlxpool.broker.store.operations import FeedNext, Finish, Operation, Progress
from mlxpool.broker.store.records import Fed, FedJob, JobState, JobView, Refused
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.token_ids import pack_ids
from support.batch_harness import BatchStory, prompts
from support.core_harness import OWNER, FakeWorker
from support.job_harness import JobStory, Reading
from support.stored_jobs import StoredJobs


def waiting(story: JobStory, kind: type[Operation]) -> list[Operation]:
    """Returns the operations of this type that the store has not performed yet."""
    return [operation for operation in story.store.inbox if isinstance(operation, kind)]


def running_job() -> tuple[JobStory, FakeWorker, JobView]:
    """Makes a simulation with a worker that runs the job `a`."""
    story = JobStory()
    worker = story.ready_worker(sequences=4)
    story.submit("a")
    story.settle()
    job = story.job("a")
    assert job.id in worker.runs
    return story, worker, job


def running_jobs(sequences: int, count: int) -> tuple[JobStory, FakeWorker]:
    """Makes a simulation with `count` jobs, and a worker that runs as many of them as it can."""
    story = JobStory()
    worker = story.ready_worker(sequences=sequences)
    for number in range(count):
        story.submit(f"a{number}", prompt=f"a{number}")
    story.settle()
    story.pass_time(0.3)
    return story, worker


def running_batch(
    store: StoredJobs, lines: int, sequences: int = 4
) -> tuple[BatchStory, FakeWorker]:
    """Makes a simulation with a worker that runs lines of the batch `b`."""
    story = BatchStory(store)
    story.submit_batch("b", prompts(lines))
    worker = story.ready_worker(sequences=sequences)
    story.pass_time(0.5)
    return story, worker


def read_by_client(story: JobStory, key: str) -> Reading:
    """Makes a client that reads a job from its start."""
    reading = story.fetch(key)
    story.settle()
    return reading


# ---- output --------------------------------------------------------------------------------------


def test_output_that_nobody_reads_is_written_once_with_the_end() -> None:
    story, worker, job = running_job()
    for _ in range(4):
        worker.tokens(job.id, 2)
        story.pass_time(UNREAD_DELAY / 5)
    assert story.job("a").pos == 0
    worker.end(job.id, count=1)
    story.drain()
    (finish,) = waiting(story, Finish)
    assert isinstance(finish, Finish) and finish.chunk is not None and finish.chunk.count == 9
    story.settle()
    assert story.store.output(job.id)[0] == pack_ids(range(9))


def test_output_that_nobody_reads_is_written_when_it_has_waited_for_long() -> None:
    story, worker, job = running_job()
    worker.tokens(job.id, 2)
    story.pass_time(UNREAD_DELAY + 0.2)
    assert story.job("a").pos == 2 and story.job("a").starts == 0
    worker.tokens(job.id, 1)
    story.pass_time(UNREAD_DELAY / 2)
    assert story.job("a").pos == 2
    story.pass_time(UNREAD_DELAY)
    assert story.job("a").pos == 3


def test_much_output_is_not_kept_in_memory() -> None:
    story, worker, job = running_job()
    worker.tokens(job.id, 1, text="x" * UNREAD_BYTES)
    story.pass_time(WRITE_DELAY + 0.1)
    assert story.job("a").pos == 1
    (active,) = story.manager.runs.active.values()
    assert active.size == 0 and not active.steps


def test_a_reader_gets_at_once_what_was_kept_back_and_then_what_follows() -> None:
    story, worker, job = running_job()
    worker.tokens(job.id, 3)
    story.drain()
    reading = read_by_client(story, "a")
    assert reading.ids == []  # the store has no ids of the job yet
    story.tell_manager(ev.Wake())
    assert waiting(story, Progress)
    story.settle()
    assert reading.ids == [0, 1, 2]
    worker.tokens(job.id, 1)
    story.pass_time(WRITE_DELAY + 0.1)
    assert reading.ids == [0, 1, 2, 3]


def test_output_waits_again_when_the_last_reader_has_left() -> None:
    story, worker, job = running_job()
    read_by_client(story, "a")
    (reader,) = story.manager.readers.all.values()
    assert story.manager.readers.reads(job.id)
    story.tell_manager(ev.ReaderLeft(reader.link, OWNER, reader.id))
    assert not story.manager.readers.reads(job.id)
    worker.tokens(job.id, 1)
    story.pass_time(UNREAD_DELAY / 2)
    assert story.job("a").pos == 0


def test_a_job_that_was_started_in_vain_has_its_first_ids_written_soon() -> None:
    """The first stored ids of a job reset its count of starts in vain, so they are stored soon."""
    story, worker, job = running_job()
    worker.tokens(job.id, 2)
    story.drain()
    story = story.restart()
    worker = story.ready_worker(sequences=4)
    story.pass_time(0.3)
    assert story.job("a").starts == 2
    worker.tokens(job.id, 2)
    story.pass_time(WRITE_DELAY + 0.1)
    assert (story.job("a").pos, story.job("a").starts) == (2, 0)
    worker.tokens(job.id, 2)
    story.pass_time(UNREAD_DELAY / 2)
    assert story.job("a").pos == 2  # the job has made progress


def test_what_nobody_has_read_is_computed_again_by_the_next_broker() -> None:
    story, worker, job = running_job()
    worker.tokens(job.id, 2)
    story.pass_time(UNREAD_DELAY + 0.2)
    worker.tokens(job.id, 3)
    story.drain()
    story = story.restart()
    worker = story.ready_worker(sequences=4)
    story.pass_time(0.3)
    assert story.job("a").pos == 2 and job.id in worker.runs
    worker.tokens(job.id, 1)
    worker.end(job.id, count=1)
    story.settle()
    story.assert_state("a", JobState.DONE)
    assert story.store.output(job.id)[0] == pack_ids(range(4))


# ---- ends of lines -------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


def _finish_of(story: JobStory) -> Finish:
    (finish,) = waiting(story, Finish)
    assert isinstance(finish, Finish)
    return finish


def test_the_end_of_a_line_waits_for_others_while_further_lines_wait(store: StoredJobs) -> None:
    story, worker = running_batch(store, 10)
    worker.end(next(iter(worker.runs)), count=1)
    worker.credit()
    story.drain()
    assert not _finish_of(story).urgent
    (feed,) = waiting(story, FeedNext)  # urgent, so the end is written in the same commit
    assert feed.urgent
    story.work_off(worker)
    assert story.batch("b")["done"] == 10


def test_the_last_ends_of_a_batch_do_not_wait(store: StoredJobs) -> None:
    story, worker = running_batch(store, 3)
    worker.end(next(iter(worker.runs)), count=1)
    story.drain()
    assert _finish_of(story).urgent


def test_the_end_of_a_line_that_somebody_reads_does_not_wait(store: StoredJobs) -> None:
    story, worker = running_batch(store, 10)
    id = next(iter(worker.runs))
    key = story.manager.runs.active[id].job.scope.key
    reading = read_by_client(story, key)
    assert reading.accepted is not None
    worker.end(id, count=1)
    story.drain()
    assert _finish_of(story).urgent


def test_the_end_of_a_job_of_its_own_does_not_wait() -> None:
    story, worker = running_jobs(1, 5)
    worker.end(next(iter(worker.runs)), count=1)
    story.drain()
    assert _finish_of(story).urgent


# ---- which jobs are read next --------------------------------------------------------------------


def end_some(story: JobStory, worker: FakeWorker, count: int) -> None:
    for id in list(worker.runs)[:count]:
        worker.end(id, count=1)
    worker.credit()
    story.drain()


def test_jobs_are_read_many_at_once() -> None:
    story, worker = running_jobs(16, 60)
    assert len(story.manager.runs.active) == 32
    end_some(story, worker, 1)
    story.settle()
    assert len(story.manager.runs.active) == 32  # read at once: the last read was long ago
    end_some(story, worker, 3)
    assert not waiting(story, FeedNext)  # no read for only 3 of 32 jobs
    end_some(story, worker, 1)
    (feed,) = waiting(story, FeedNext)
    assert isinstance(feed, FeedNext) and feed.count == 4


def test_a_few_places_are_filled_when_some_time_is_over() -> None:
    story, worker = running_jobs(16, 60)
    end_some(story, worker, 1)
    story.settle()
    end_some(story, worker, 2)
    story.settle()
    assert len(story.manager.runs.active) == 30
    story.pass_time(FEED_INTERVAL + 0.2)
    assert len(story.manager.runs.active) == 32


def test_a_place_that_is_reported_after_the_end_is_filled_soon() -> None:
    """Once a worker reports a free sequence, the next job is read before the usual poll."""
    story, worker = running_jobs(1, 20)
    worker.end(next(iter(worker.runs)), count=1)
    story.drain()
    assert not waiting(story, FeedNext)
    worker.credit()
    story.now = story.manager.next_wake()
    story.tell_manager(ev.Wake())
    assert waiting(story, FeedNext) and PLACE_DELAY < POLL_INTERVAL
    story.settle()
    assert len(story.manager.runs.active) == 2


def test_a_place_is_free_before_the_end_of_its_job_is_on_the_disk() -> None:
    story, worker = running_jobs(2, 20)
    assert len(story.manager.runs.active) == 4
    worker.end(next(iter(worker.runs)), count=1)
    worker.credit()
    story.drain()
    assert waiting(story, Finish) and waiting(story, FeedNext)
    story.settle()
    assert len(story.manager.runs.active) == 4


class Places:
    """Replaces the feeder's view of the pool: one model with a fixed number of free sequences."""

    admits = True

    def __init__(self, places: int) -> None:
        self._places = places

    def model_of(self, name: str) -> str:
        return name

    def available(self, model: str, now: float) -> bool:
        return True

    def places(self, model: str) -> int:
        return self._places

    def may_answer(self, model: str) -> bool:
        return False


def planned(feeder: Feeder, view: Any, now: float) -> int:
    """Simulates the next read of jobs, which finds all wanted jobs.

    Returns their number, or 0 if no read is due.
    """
    for plan in feeder.plan(view, (), now):
        jobs = tuple(
            cast(FedJob, SimpleNamespace(request=b"", blobs=())) for _ in range(plan.count)
        )
        for _ in jobs:
            feeder.started((plan.model, plan.priority), "a")
        feeder.fed(plan, Fed(jobs, "", None, now), now)
        return plan.count
    return 0


def test_so_many_ends_may_wait_for_the_disk_and_no_more() -> None:
    """While many results wait for a slow disk, the feeder reads no more jobs into memory."""
    feeder, view, group = Feeder(AnswerRoom()), Places(100), ("m", 0)
    feeder.came(group, 0.0)
    assert planned(feeder, view, 0.0) == 200
    read, now = 200, 0.0
    for _ in range(10):
        now += 1.0
        for _ in range(feeder.groups[group].active):
            feeder.leaving(group, "a")
        read += planned(feeder, view, now)
    backlog = feeder.groups[group]
    assert read <= MAX_LEAVING + 200 and backlog.leaving >= MAX_LEAVING
    assert planned(feeder, view, now + 1) == 0
    for _ in range(backlog.leaving):
        feeder.left(group, "a", leaving=True)
    assert planned(feeder, view, now + 2) == 200


# ---- commits reported as failed ------------------------------------------------------------------


def perform_and_refuse(story: JobStory | BatchStory) -> None:
    """Performs the waiting operations, but reports each as refused, as after a lost connection."""
    group = list(story.store.inbox)
    story.store.commit()
    story.store.results = [
        (operation, Refused("store_closed", "the connection is lost")) for operation in group
    ]
    story.drain()


def test_a_job_goes_on_behind_ids_whose_commit_was_told_to_have_failed() -> None:
    story, worker, job = running_job()
    reading = read_by_client(story, "a")
    worker.tokens(job.id, 3)
    story.drain()
    story.later(0.1)
    story.tell_manager(ev.Wake())
    assert waiting(story, Progress)
    perform_and_refuse(story)
    assert story.job("a").pos == 3 and reading.ids == []
    for _ in range(15):
        story.pass_time(0.1)
        for id, number in worker.cancelled:
            if id in worker.runs and worker.runs[id].attempt == number:
                worker.confirm(id)
        worker.cancelled.clear()
    assert job.id in worker.runs and worker.runs[job.id].pos == 3 and reading.ids == [0, 1, 2]
    worker.end(job.id, count=1)
    story.settle()
    assert story.store.output(job.id)[0] == pack_ids(range(4))
    assert reading.ids == [0, 1, 2, 3] and reading.end is not None
    assert reading.end["reason"] == "stop"


def test_an_end_whose_commit_was_told_to_have_failed_reaches_readers() -> None:
    story, worker, job = running_job()
    reading = read_by_client(story, "a")
    worker.end(job.id, count=2)
    story.drain()
    assert waiting(story, Finish)
    perform_and_refuse(story)
    assert story.job("a").state is JobState.DONE and reading.end is None
    story.pass_time(1.5)
    assert reading.ids == [0, 1] and reading.end is not None and not story.manager.busy


def test_a_batch_ends_when_the_commit_of_its_last_end_was_told_to_have_failed(
    store: StoredJobs,
) -> None:
    story, worker = running_batch(store, 1, 1)
    (id,) = worker.runs
    worker.end(id, count=1)
    story.drain()
    assert waiting(story, Finish)
    perform_and_refuse(story)
    story.pass_time(3.0)
    assert story.about_batch(messages.READ, "b")["state"] == "done"
