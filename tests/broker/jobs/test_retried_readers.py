"""Readers of a job receive the errors after which the job was retried."""

from __future__ import annotations

import pytest

from mlxpool.broker.jobs.active import UNREAD_DELAY
from mlxpool.broker.store.records import JobState
from mlxpool.common.protocol.kept.job_messages import Fetch, JobName
from mlxpool.common.protocol.to_client import StreamDelta
from support.core_harness import FakeWorker
from support.job_harness import JobStory

AGAIN = [0, 0]  # a step border (0, 0): the job failed there and was retried


@pytest.fixture
def story() -> JobStory:
    return JobStory()


def fail(story: JobStory, worker: FakeWorker, key: str = "a") -> None:
    """Ends the job with an error, and has it retried."""
    job = story.job(key)
    worker.fail(job.id, "bad_request", "no such thing")
    story.settle()
    assert story.job(key).state is JobState.DEAD
    worker.credit()


def retry(story: JobStory, worker: FakeWorker, key: str = "a") -> None:
    story.about("retry", key)
    story.settle()
    worker.beat()
    story.pass_time(0.3)
    assert story.job(key).id in worker.runs


def read(story: JobStory, start: int = 0, *, steps: bool = True) -> bytes:
    ident = story.ask(Fetch(JobName("a"), start, steps=steps))
    story.settle()
    return ident


def deltas(story: JobStory, reading: bytes) -> list[tuple[int, int, int]]:
    """Returns (position, failures before it, number of ids) of each delta that a reader got."""
    sent = [tell for tell in story.told if tell.header.id == reading]
    rows = []
    for tell in sent:
        if isinstance(tell.message, StreamDelta):
            body = tell.message.body()
            failures = sum(step == AGAIN for step in body["steps"])
            assert body["steps"][:failures] == [AGAIN] * failures
            rows.append((tell.header.pos, failures, body["n"]))
    return rows


def test_every_reading_has_the_failures_at_the_same_places(story: JobStory) -> None:
    worker = story.ready_worker(sequences=4)
    story.submit("a")
    story.settle()
    fail(story, worker)  # the job is retried twice before its first id
    retry(story, worker)
    fail(story, worker)
    retry(story, worker)
    job = story.job("a")
    live = read(story)
    worker.tokens(job.id, 3)
    story.pass_time(0.2)
    fail(story, worker)
    assert deltas(story, live) == [(0, 2, 3)]
    late = read(story)
    assert deltas(story, late) == deltas(story, live)
    retry(story, worker)
    going_on = read(story, 3)
    worker.tokens(job.id, 2)
    story.pass_time(0.2)
    assert deltas(story, going_on) == [(3, 1, 2)]
    fail(story, worker)
    retry(story, worker)
    fail(story, worker)
    assert story.job("a").retried == ((0, 2), (3, 1), (5, 1))
    whole = read(story)
    # The last delta has no ids, and the first error at position 5; the second error follows it.
    assert deltas(story, whole) == [(0, 2, 3), (3, 1, 2), (5, 1, 0)]
    assert deltas(story, read(story, 5)) == [(5, 1, 0)]
    kinds = [tell.message.kind for tell in story.told if tell.header.id == whole]
    assert kinds == ["accepted", "delta", "delta", "delta", "error"]


def test_a_slow_reader_is_told_of_a_failure_that_it_did_not_see(story: JobStory) -> None:
    worker = story.ready_worker(sequences=4)
    story.submit("a")
    story.settle()
    job = story.job("a")
    slow = story.ask(Fetch(JobName("a"), 0, None, 3, steps=True))
    story.settle()
    worker.tokens(job.id, 3)
    story.pass_time(0.2)  # the reader's window is full now
    fail(story, worker)
    retry(story, worker)
    worker.tokens(job.id, 2)
    story.pass_time(0.2)
    assert deltas(story, slow) == [(0, 0, 3)]
    story.acknowledge(slow, 3)
    story.settle()
    assert deltas(story, slow) == [(0, 0, 3), (3, 1, 2)]


def test_readers_that_do_not_ask_for_steps_are_told_nothing_of_it(story: JobStory) -> None:
    worker = story.ready_worker(sequences=4)
    story.submit("a")
    story.settle()
    fail(story, worker)
    retry(story, worker)
    worker.tokens(story.job("a").id, 3)
    story.pass_time(UNREAD_DELAY + 0.2)
    reading = read(story, steps=False)
    bodies = [tell.message.body() or {} for tell in story.told if tell.header.id == reading]
    assert [body.get("steps") for body in bodies] == [None, None]
