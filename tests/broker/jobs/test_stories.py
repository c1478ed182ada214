"""Scenarios of jobs, with a core, a manager and a store in memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from mlxpool.broker.core.events import StartDrain
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.active import UNREAD_DELAY
from mlxpool.broker.jobs.feeding import MIN_OTHERS_TURN, SUSPECT_WAIT
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.jobs.retries import ALONE_STARTS, MAX_STARTS
from mlxpool.broker.store.records import JobState, JobView
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.kept.job_messages import Fetch, JobName
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_harness import OWNER, FakeWorker
from support.job_harness import JobStory


def text_of(start: int, end: int) -> str:
    return "".join(f"<{i}>" for i in range(start, end))


def started(
    story: JobStory, key: str = "a", sequences: int = 4, **body: Any
) -> tuple[FakeWorker, JobView]:
    """Makes a worker that runs a job. Returns the worker and the job."""
    worker = story.ready_worker(sequences=sequences)
    story.submit(key, **body)
    story.settle()
    job = story.job(key)
    assert job.id in worker.runs
    return worker, job


def test_a_job_is_accepted_when_it_is_on_the_disk_and_not_before() -> None:
    story = JobStory()
    ident = story.submit("a")
    assert not [tell for tell in story.told if tell.header.id == ident]
    story.settle()
    accepted = story.answer(ident)
    assert accepted["state"] == "waiting" and accepted["key"] == "a" and accepted["gen"] == 0
    assert accepted["job"] == story.job("a").id


def test_a_job_runs_and_its_ids_are_stored_with_its_end() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 3, facts={"digest": "d", "context": 9})
    worker.end(job.id, count=2)
    story.settle()
    done = story.assert_state("a", JobState.DONE)
    assert story.store.output(job.id) == (pack_ids(range(5)), text_of(0, 5))
    assert done.pos == 5 and done.facts is not None and done.starts == 0
    assert not story.manager.runs.active
    story.assert_idle()
    story.assert_conserved()


def test_the_count_of_jobs_is_of_one_moment_and_follows_their_ends() -> None:
    """All counts are of the same moment, either before or after the end of the job."""

    def counts() -> tuple[int, int, int]:
        figures = story.manager.figures()
        return figures.waiting, figures.running, figures.done

    story = JobStory()
    worker, job = started(story)
    story.pass_time(0.2)
    assert counts() == (0, 1, 0)
    worker.end(job.id, count=1)
    story.drain()
    story.pass_time(0.05)  # the end is stored, but not counted yet
    story.assert_state("a", JobState.DONE)
    assert counts() in ((0, 1, 0), (0, 0, 1))
    story.pass_time(0.2)
    assert counts() == (0, 0, 1)


def test_a_reader_gets_ids_after_the_commit_that_holds_them() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    story.settle()
    assert reading.accepted is not None and reading.accepted["state"] == "running"
    worker.tokens(job.id, 3)
    story.drain()
    assert reading.ids == []
    story.pass_time(0.2)
    assert reading.ids == [0, 1, 2]
    worker.end(job.id, count=1)
    story.settle()
    assert reading.ids == [0, 1, 2, 3] and reading.end is not None
    assert reading.end["reason"] == "stop" and reading.text == text_of(0, 4)


def test_a_reader_that_came_before_the_first_token_gets_the_facts_too() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    story.settle()
    facts = {"digest": "d", "context": 9, "thinks": True}
    worker.tokens(job.id, 3, facts=facts)
    story.pass_time(0.2)
    worker.tokens(job.id, 1)
    story.pass_time(0.2)
    received = [tell.message.facts for tell in story.told if isinstance(tell.message, StreamDelta)]
    assert reading.ids == [0, 1, 2, 3] and received == [facts, None]


def test_nothing_is_due_while_a_write_is_under_way() -> None:
    """During a write the manager plans no further write of the job.

    Otherwise the broker's loop would run without pause until the commit.
    """
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 1)
    story.drain()
    (active,) = story.manager.runs.active.values()
    story.now = active.write_at
    story.tell_manager(ev.Wake())
    assert active.writing is not None
    worker.tokens(job.id, 2)
    story.drain()
    assert story.manager.runs.next_write() == math.inf
    story.settle()
    story.pass_time(UNREAD_DELAY + 0.2)
    assert story.store.output(job.id)[0] == pack_ids(range(3))


def test_readers_come_early_late_and_from_any_id() -> None:
    story = JobStory()
    early = story.fetch("a")
    story.settle()
    assert early.accepted is None  # the job was unknown
    worker, job = started(story)
    first = story.fetch("a")
    worker.tokens(job.id, 4)
    story.pass_time(0.2)
    middle = story.fetch("a", start=4, gen=0)
    ahead = story.fetch("a", start=6, gen=0)
    worker.tokens(job.id, 4)
    story.pass_time(0.2)
    worker.end(job.id)
    story.settle()
    late = story.fetch("a", start=2)
    story.settle()
    assert first.ids == list(range(8)) and middle.ids == list(range(4, 8))
    assert ahead.ids[-2:] == [6, 7] and late.ids[-6:] == list(range(2, 8))
    assert all(
        reading.end and reading.end["reason"] == "stop" for reading in (first, middle, ahead, late)
    )


def test_a_reader_behind_its_window_waits_for_its_acks_and_the_job_does_not() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a", window=2)
    ident = next(key[0] for key, candidate in story.readings.items() if candidate is reading)
    story.settle()
    for _ in range(3):
        worker.tokens(job.id, 2)
        story.pass_time(0.2)
    assert reading.ids == [0, 1]
    worker.end(job.id)
    story.settle()
    story.assert_state("a", JobState.DONE)
    story.acknowledge(ident, 2)
    story.settle()
    assert reading.ids == list(range(6)) and reading.end is not None


def test_a_silent_reader_is_dropped_and_gets_a_new_link() -> None:
    story = JobStory()
    started(story)
    reading = story.fetch("a")
    story.settle()
    assert reading.accepted is not None
    for _ in range(13):  # the reader's link is silent
        story.later(1.0)
        story.workers["m/0"].beat()
        story.tell_manager(ev.Wake())
        story.settle()
    assert not story.manager.readers.all and story.forgotten == [1]


def test_the_owner_alone_knows_a_job() -> None:
    story = JobStory()
    story.submit("a")
    story.settle()
    for kind in ("job", "cancel", "retry", "release"):
        ident = story.about(kind, "a", owner="uid:2")
        story.settle()
        assert story.answer(ident)["code"] == "unknown_job"
    story.fetch("a", owner="uid:2")
    story.settle()
    assert (story.told[-1].message.body() or {})["code"] == "unknown_job"
    assert [row["key"] for row in story.list_jobs()] == ["a"]


def test_an_id_tells_a_stranger_nothing_about_the_job() -> None:
    story = JobStory()
    worker, job = started(story)
    by_id = JobName(id=job.id)

    def told(owner: str, gen: int | None) -> str:
        ident = story.ask(Fetch(by_id, 0, gen), owner=owner)
        story.settle()
        return str(story.answer(ident)["code"])

    assert told("uid:2", None) == told("uid:2", 5) == "unknown_job"
    assert told(OWNER, 5) == "bad_request"  # an unknown generation
    worker.end(job.id, count=1)
    story.settle()
    story.about("release", "a")
    story.settle()
    assert (told("uid:2", None), told(OWNER, None)) == ("unknown_job", "gone")


def test_a_reading_from_the_middle_never_goes_on_in_another_generation() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 3, facts={"digest": "old", "context": 2048})
    story.pass_time(UNREAD_DELAY + 0.2)
    story = story.restart()
    middle = story.fetch("a", start=5)
    story.settle()
    assert middle.accepted is not None and middle.accepted["gen"] == 0
    story.ready_worker(digest="new")
    story.pass_time(0.5)
    assert story.job("a").gen == 1
    assert middle.end is not None and middle.end["code"] == "job_restarted"


def test_the_same_submission_is_the_same_job_and_another_one_is_refused() -> None:
    story = JobStory()
    first = story.submit("a", options={"temperature": 1, "max_tokens": 5})
    again = story.submit("a", options={"max_tokens": 5, "temperature": 1.0}, keep_ms=5)
    other = story.submit("a", options={"max_tokens": 6})
    story.settle()
    assert story.answer(first)["job"] == story.answer(again)["job"]
    assert story.answer(other)["code"] == "duplicate_id"
    assert len(story.store.rows) == 1


def test_the_same_submission_is_the_same_job_when_the_pool_takes_no_new_ones() -> None:
    story = JobStory()
    first = story.submit("a")
    story.settle()
    story.do(StartDrain(None, "m", 10.0))
    again, other = story.submit("a"), story.submit("b")
    changed = story.submit("a", prompt="another")
    story.settle()
    assert story.answer(again)["job"] == story.answer(first)["job"]
    assert story.answer(other)["code"] == story.answer(changed)["code"] == "draining"


def test_a_released_job_is_gone() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.end(job.id, count=1)
    story.settle()
    released = story.about("release", "a")
    story.settle()
    assert story.answer(released)["state"] == "gone"
    again = story.submit("a")
    story.fetch("a")
    story.settle()
    assert story.answer(again)["code"] == "gone"


def test_a_job_that_runs_is_not_released_and_told_to_run() -> None:
    story = JobStory()
    started(story)
    ident = story.about("release", "a")
    story.settle()
    assert "is running: only an ended job" in story.answer(ident)["message"]


def test_a_result_is_deleted_when_it_was_kept_for_its_time() -> None:
    story = JobStory()
    worker, job = started(story, keep_ms=2000)
    worker.end(job.id, count=1)
    story.settle()
    story.assert_state("a", JobState.DONE)
    story.pass_time(4.0)
    story.assert_state("a", JobState.GONE)


def test_who_wants_a_result_kept_for_too_long_is_told() -> None:
    story = JobStory(policy=JobPolicy(60.0, 3600.0))
    longest, longer = story.submit("a", keep_ms=3_600_000), story.submit("b", keep_ms=7_200_000)
    story.settle()
    assert not story.answer(longest).get("warnings")
    (warning,) = story.answer(longer)["warnings"]
    assert warning == "keep is 7200 s; the result is kept for 3600 s (job_keep_max)"


def test_a_cancelled_job_ends_in_the_core_too() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    worker.tokens(job.id, 2)
    story.pass_time(0.2)
    ident = story.about("cancel", "a")
    story.settle()
    assert story.answer(ident) == {"state": "running", "pos": 2}
    story.assert_state("a", JobState.CANCELLED)
    assert reading.end is not None and reading.end["reason"] == "cancelled"
    assert worker.cancelled and not story.core.state.requests
    again = story.about("cancel", "a")
    story.settle()
    assert story.answer(again)["state"] == "cancelled"


def test_an_operator_cancels_the_run_and_so_the_job() -> None:
    story = JobStory()
    _, job = started(story)
    story.cancel(job.id, None, None)
    story.settle()
    story.assert_state("a", JobState.CANCELLED)


def test_jobs_outlive_the_broker_and_go_on_from_their_durable_ids() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 3, facts={"digest": "d", "context": 2048})
    story.pass_time(UNREAD_DELAY + 0.2)
    worker.tokens(job.id, 2)  # these ids are never stored on the disk
    story.drain()
    story = story.restart()
    worker = story.ready_worker(digest="d")
    story.pass_time(0.3)
    assert worker.runs[job.id].pos == 3
    assert worker.runs[job.id].body["resume"]["facts"] == {"digest": "d", "context": 2048}
    assert worker.runs[job.id].body["seed"] == job.seed
    worker.end(job.id, count=3)
    story.settle()
    story.assert_state("a", JobState.DONE)
    assert story.store.output(job.id)[0] == pack_ids(range(6))


def test_a_changed_model_begins_a_new_generation() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 3, facts={"digest": "old", "context": 2048})
    story.pass_time(UNREAD_DELAY + 0.2)
    story = story.restart()
    reading = story.fetch("a", start=3, gen=0)
    worker = story.ready_worker(digest="new")
    story.pass_time(0.5)
    assert story.job("a").gen == 1 and story.job("a").pos == 0
    assert reading.end is not None and reading.end["code"] == "job_restarted"
    assert worker.runs[job.id].pos == 0
    worker.end(job.id, count=2)
    story.settle()
    again = story.fetch("a", gen=1)
    story.settle()
    assert again.ids == [0, 1]


def test_the_end_of_the_pool_puts_jobs_back_without_an_attempt() -> None:
    from mlxpool.broker.core import events as core

    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 3)
    story.drain()
    story.do(core.Shutdown(False))
    story.settle()
    waiting = story.assert_state("a", JobState.WAITING)
    assert (waiting.attempts, waiting.starts, waiting.pos) == (0, 0, 3)


def test_a_job_that_never_ran_before_the_end_of_the_pool_has_not_been_started() -> None:
    from mlxpool.broker.core import events as core

    story = JobStory()
    started(story)
    story.do(core.Shutdown(False))
    story.settle()
    assert story.job("a").starts == 0


def test_an_unloaded_model_puts_jobs_back_and_they_run_again() -> None:
    from mlxpool.broker.core import events as core

    story = JobStory()
    _, job = started(story)
    story.do(core.UnloadModel("m"))
    story.settle()
    waiting = story.assert_state("a", JobState.WAITING)
    assert (waiting.attempts, waiting.starts) == (0, 0)
    story.workers["m/0"].die("stopped")
    story.pass_time(3.0)
    worker = story.workers["m/0"].hello().credit(4)
    story.pass_time(3.0)
    assert job.id in worker.runs


def test_failures_are_counted_and_the_eighth_is_the_last() -> None:
    story = JobStory()
    worker, job = started(story)
    for attempt in range(1, 8):
        worker.fail(job.id, "out_of_memory")
        story.settle()
        waiting = story.assert_state("a", JobState.WAITING)
        assert waiting.attempts == attempt
        assert 2 <= waiting.due - story.store.now <= 60
        worker.credit()
        while job.id not in worker.runs:
            worker.beat()
            story.pass_time(1.0)
    worker.fail(job.id, "out_of_memory", "no memory left")
    story.settle()
    dead = story.assert_state("a", JobState.DEAD)
    assert (dead.cause, dead.attempts) == ("no memory left", 8)
    rows = story.list_jobs(state="dead")
    assert [(row["key"], row["cause"]) for row in rows] == [("a", "no memory left")]


def test_a_dead_job_waits_again_after_retry() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.fail(job.id, "bad_request", "no such thing")
    story.settle()
    story.assert_state("a", JobState.DEAD)
    refused = story.about("release", "none")
    ident = story.about("retry", "a")
    story.settle()
    assert story.answer(ident)["state"] == "waiting"
    assert story.answer(refused)["code"] == "unknown_job"
    worker.credit()
    story.pass_time(0.3)
    assert job.id in worker.runs
    again = story.about("retry", "a")
    story.settle()
    assert story.answer(again)["state"] == "running"  # a request may arrive twice
    worker.end(job.id, count=1)
    story.settle()
    refused = story.about("retry", "a")
    story.settle()
    assert story.answer(refused)["code"] == "bad_request"


def test_a_poisoned_job_is_dead_and_its_like_refused_until_it_is_retried() -> None:
    story = JobStory()
    worker, job = started(story, sequences=1)
    worker.die(own=True)
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    assert job.id in worker.runs
    worker.die(own=True)
    story.settle()
    dead = story.assert_state("a", JobState.DEAD)
    assert "ended two workers" in dead.cause
    like = story.submit("b")
    story.settle()
    assert story.answer(like)["code"] == "poisoned"
    story = story.restart()
    like = story.submit("b")
    story.settle()
    assert story.answer(like)["code"] == "poisoned"
    story.about("retry", "a")
    story.settle()
    like = story.submit("b")
    story.settle()
    assert story.answer(like)["state"] == "waiting"


def test_a_charge_and_the_stacks_of_a_lost_worker_are_stored_at_once() -> None:
    story = JobStory()
    worker, job = started(story, sequences=1)
    worker.die("killed by SIGSEGV", own=True)
    story.settle()
    assert story.assert_state("a", JobState.WAITING).charge == 1.0
    ((failure),) = story.store.rows[job.id].failures
    assert failure.cause == "the worker m/0 ended: killed by SIGSEGV"
    assert failure.stacks == "stacks of m/0"
    story = story.restart()  # the charge remains after the broker's end
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    assert job.id in worker.runs
    worker.die("killed by SIGSEGV", own=True)
    story.settle()
    dead = story.assert_state("a", JobState.DEAD)
    assert "ended two workers" in dead.cause
    causes = [failure.cause for failure in story.store.rows[job.id].failures]
    assert len(causes) == 3 and causes[-1] == dead.cause


def test_a_commanded_end_of_a_worker_is_no_failure_of_its_jobs() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.die("stopped")
    story.settle()
    assert story.store.rows[job.id].failures == [] and story.job("a").charge == 0.0


def test_a_job_whose_request_is_damaged_is_dead() -> None:
    story = JobStory()
    story.submit("a")
    story.settle()
    story.store.damaged = "the disk has changed what is stored of the job 'a': its request"
    story.ready_worker()
    story.pass_time(0.3)
    dead = story.assert_state("a", JobState.DEAD)
    assert dead.cause == story.store.damaged
    reading = story.fetch("a")
    story.settle()
    assert reading.end is not None and reading.end["code"] == "damaged"


def test_a_job_that_ends_the_broker_runs_alone_and_is_dead_in_the_end() -> None:
    story = JobStory()
    story.submit("bad")
    story.settle()
    for start in range(1, 4):
        story.ready_worker()
        story.pass_time(0.3)
        assert story.job("bad").starts == start
        story = story.restart()
    story.submit("good", prompt="other")
    story.settle()
    worker = story.ready_worker()
    story.pass_time(0.3)
    assert story.job("bad").id not in worker.runs  # `bad` comes last
    worker.end(story.job("good").id, count=1)
    worker.credit()
    story.pass_time(0.3)
    assert story.job("bad").id in worker.runs and story.job("bad").starts == 4
    other = story.submit("later", prompt="another")
    story.settle()
    worker.credit()
    assert story.answer(other)["state"] == "waiting"
    for _ in range(2):
        story = story.restart()
        worker = story.ready_worker()
        story.pass_time(0.3)
        later = story.job("later")
        if later.id in worker.runs:
            worker.end(later.id, count=1)
            worker.credit()
            story.pass_time(0.3)
    story.pass_time(0.5)
    dead = story.assert_state("bad", JobState.DEAD)
    assert "5 times" in dead.cause
    story.assert_state("good", JobState.DONE)
    story.assert_state("later", JobState.DONE)


def blamed_story(*keys: str) -> JobStory:
    """Makes a simulation in which three brokers ended, each after it had started the jobs `keys`.

    The jobs are therefore suspected to have ended the brokers.
    """
    story = JobStory()
    for key in keys or ("bad",):
        story.submit(key)
    story.settle()
    for _ in range(3):
        story.ready_worker()
        story.pass_time(0.3)
        story = story.restart()
    return story


def test_a_model_that_always_has_other_jobs_does_not_hold_up_one_that_has_to_run_alone() -> None:
    story = blamed_story()
    for number in range(90):
        story.submit(f"good {number}", prompt=f"other {number}")
    story.settle()
    worker, bad = story.ready_worker(), story.job("bad").id
    begin, waited = story.now, 0.0
    while bad not in worker.runs:
        assert waited < SUSPECT_WAIT + 20, "it was held up"
        story.pass_time(1.0)
        for running in [ident for ident in worker.runs if ident != bad][:1]:
            worker.end(running, count=1)
        worker.credit()
        waited = story.now - begin
    assert waited >= SUSPECT_WAIT
    assert sum(story.job(f"good {number}").state is JobState.WAITING for number in range(90))
    worker.end(bad, count=1)
    worker.credit()
    story.pass_time(1.0)
    story.assert_state("bad", JobState.DONE)
    assert worker.runs, "the others go on"


def test_jobs_that_have_to_run_alone_and_have_waited_take_turns_with_the_others() -> None:
    """Jobs that must run alone, and have waited SUSPECT_WAIT, take turns with the other jobs.

    Otherwise the many suspected jobs of a restarted broker would wait too long.
    """
    keys = [f"bad {number}" for number in range(3)]
    story = blamed_story(*keys)
    for number in range(200):
        story.submit(f"good {number}", prompt=f"other {number}")
    story.settle()
    worker, bad = story.ready_worker(sequences=2), [story.job(key).id for key in keys]
    goods, begun = 0, dict[bytes, float]()
    while len(begun) < len(bad):
        assert not begun or story.now < begun[next(iter(begun))] + 20, "they were held up"
        story.pass_time(0.5)
        for id in list(worker.runs):
            if id in bad:
                assert set(worker.runs) == {id} and goods
                begun[id], goods = story.now, 0
            else:
                goods += 1
            worker.end(id, count=1)
        worker.credit()
    assert [*begun] == bad
    for first, second in itertools.pairwise(begun.values()):
        assert second - first >= MIN_OTHERS_TURN


def test_suspects_of_several_priorities_leave_the_others_a_turn_together() -> None:
    """Suspected jobs alternate with other jobs, whatever the priorities of the suspected jobs."""
    keys = [f"bad {number}" for number in range(8)]
    story = JobStory()
    for number, key in enumerate(keys):
        story.submit(key, priority=number % 2)
    story.settle()
    for _ in range(3):
        story.ready_worker(sequences=8)
        story.pass_time(0.3)
        story = story.restart()
    for number in range(300):
        story.submit(f"good {number}", prompt=f"other {number}")
    story.settle()
    worker, bad = story.ready_worker(sequences=2), {story.job(key).id for key in keys}
    goods, begun, steps = 0, set[bytes](), 0
    while len(begun) < len(keys):
        steps += 1
        assert steps < 500, "they were held up"
        story.pass_time(0.5)
        running = list(worker.runs)
        for id in running:
            if id in bad and steps % 4:
                continue  # a bad job computes for 2 s before its first token
            if id in bad:
                assert goods, "two of them one after the other, while others were due"
                goods = 0
                begun.add(id)
            else:
                goods += 1
            worker.end(id, count=1)
        worker.credit()


def test_an_innocent_job_of_another_model_is_not_dead_with_the_one_that_ends_the_broker() -> None:
    """Each of three brokers ended after both jobs had started; then the jobs run one at a time.

    So only the job that ends the broker becomes dead.
    """
    story = JobStory()
    story.submit("bad")
    story.submit("innocent", model="other", prompt="another")
    story.settle()
    for _ in range(MAX_STARTS + 1):
        story.ready_worker()
        story.ready_worker("other")
        story.pass_time(0.3)
        if story.job("bad").state is JobState.WAITING:
            assert story.job("innocent").starts <= ALONE_STARTS
            story = story.restart()
    story.assert_state("bad", JobState.DEAD)
    innocent = story.job("innocent").id
    story.workers["other/0"].end(innocent, count=1)
    story.pass_time(0.3)
    story.assert_state("innocent", JobState.DONE)


def test_a_suspect_for_which_there_is_no_place_does_not_hold_up_urgent_jobs_for_ever() -> None:
    """A suspected job gets no place, because streams of higher priority use all places.

    Meanwhile an urgent job and a job of another model run. A second suspected job, of the other
    model, waits until the first suspected job has run.
    """
    story = JobStory()
    story.submit("bad")
    story.submit("worse", model="other", prompt="another")
    story.settle()
    for _ in range(ALONE_STARTS):
        story.ready_worker()
        story.ready_worker("other")
        story.pass_time(0.3)
        story = story.restart()
    streams = [story.generate(priority=1) for _ in range(4)]
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    while bad not in story.manager.runs.active:
        story.pass_time(1.0)
    story.submit("urgent", prompt="at once", priority=2)
    story.submit("beside", model="other", prompt="something else")
    story.settle()
    story.ready_worker("other")
    begin, urgent = story.now, story.job("urgent").id
    while urgent not in story.manager.runs.active:
        assert story.now < begin + 2 * SUSPECT_WAIT, "it was held up"
        story.pass_time(1.0)
    assert bad in story.manager.runs.active and bad not in worker.runs
    story.pass_time(2 * SUSPECT_WAIT)
    active = story.manager.runs.active
    assert story.job("beside").id in active, "the model of a suspect that waits goes on"
    assert story.job("worse").id not in active
    assert set(streams) & worker.runs.keys()


def test_a_suspect_waits_until_jobs_of_other_models_have_ids_but_not_for_ever() -> None:
    story = blamed_story()
    story.submit("slow", model="other", prompt="another")
    story.settle()
    story.ready_worker("other")
    worker, bad = story.ready_worker(), story.job("bad").id
    story.pass_time(SUSPECT_WAIT - 2)
    assert bad not in worker.runs
    story.pass_time(4.0)
    assert bad in worker.runs


def test_streams_do_not_wait_for_a_job_that_has_to_run_alone() -> None:
    """While a suspected job runs alone, streams start; other jobs wait, so that none is blamed."""
    story = blamed_story()
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    story.pass_time(0.3)
    assert bad in worker.runs
    stream = story.generate(owner="uid:2", link=2)
    assert stream in worker.runs
    worker.end(stream)
    worker.credit()
    story.submit("good", prompt="other")
    story.pass_time(3.0)
    assert set(worker.runs) == {bad}


def test_a_job_that_waits_for_a_place_alone_does_not_hold_up_streams() -> None:
    """A suspected job waits for a place while streams use all places.

    After SUSPECT_WAIT it waits in the same queue as the streams, so it gets a place in its turn.
    """
    story = blamed_story()
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    streams = [story.generate(owner="uid:2", link=2) for _ in range(2)]
    while bad not in story.manager.runs.active:
        story.pass_time(1.0)
    following = story.generate(owner="uid:2", link=2)
    for stream in streams:
        worker.end(stream)
        worker.credit()
    assert set(worker.runs) == {bad, following}


def test_other_jobs_go_on_once_an_id_of_the_one_that_had_to_run_alone_is_on_the_disk() -> None:
    """A stored token id proves that the suspected job does not crash the broker.

    Then the other jobs start. They do not wait for the end of the suspected job, which may take
    hours.
    """
    story = blamed_story()
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    story.pass_time(0.3)
    story.submit("good", prompt="other")
    story.pass_time(1.0)
    assert set(worker.runs) == {bad}
    worker.tokens(bad, 1)
    story.pass_time(1.0)
    assert story.job("bad").starts == 0
    assert set(worker.runs) == {bad, story.job("good").id}


def test_a_job_that_has_to_run_alone_waits_for_others_only_until_they_have_ids() -> None:
    """A suspected job starts once the running jobs have stored ids and so could not be blamed."""
    story = blamed_story()
    story.submit("good", prompt="other")
    story.settle()
    worker = story.ready_worker(sequences=2)
    story.pass_time(5.0)
    bad, good = story.job("bad").id, story.job("good").id
    assert set(worker.runs) == {good}
    worker.tokens(good, 1)
    story.pass_time(UNREAD_DELAY + 0.3)
    assert set(worker.runs) == {bad, good}
    story = story.restart()
    assert (story.job("good").starts, story.job("bad").starts) == (0, 4)


def test_a_job_that_had_to_run_alone_and_was_cancelled_holds_up_nothing() -> None:
    story = blamed_story()
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    story.pass_time(0.3)
    assert bad in worker.runs
    story.submit("good", prompt="other")
    story.about("cancel", "bad")
    story.pass_time(0.5)
    assert story.job("good").id in worker.runs


def test_a_job_that_has_to_run_alone_is_run_again_when_it_was_put_back() -> None:
    story = blamed_story()
    worker, bad = story.ready_worker(), story.job("bad").id
    story.pass_time(0.3)
    assert bad in worker.runs
    worker.fail(bad, "model_load_failed")
    worker.credit()
    story.pass_time(0.3)
    job = story.assert_state("bad", JobState.WAITING)
    assert job.starts == 3 and job.due > story.now + story.offset
    story.pass_time(5.0)
    assert bad in worker.runs


def test_a_job_that_has_to_run_alone_and_has_waited_is_given_to_the_core() -> None:
    """After SUSPECT_WAIT the core gets the suspected job, although streams use all places."""
    story = blamed_story()
    streams = [story.generate() for _ in range(2)]
    worker, bad = story.ready_worker(sequences=2), story.job("bad").id
    begin = story.now
    while bad not in story.manager.runs.active:
        assert story.now < begin + SUSPECT_WAIT + 10, "it was held up"
        for stream in streams:
            worker.tokens(stream, 1)
            story.ack(stream, 1)  # the ack shows that the client is connected
        story.pass_time(1.0)
    assert story.now >= begin + SUSPECT_WAIT and set(worker.runs) == set(streams)


def test_a_deadline_counts_while_the_job_waits_and_while_the_broker_is_down() -> None:
    story = JobStory()
    story.submit("a", deadline_ms=10_000)
    story.submit("b")
    story.settle()
    story = story.restart()
    story.offset += 11
    story.pass_time(2.0)
    story.assert_state("a", JobState.EXPIRED)
    story.assert_state("b", JobState.WAITING)
    reading = story.fetch("a")
    story.settle()
    assert reading.end is not None and reading.end["code"] == "deadline_exceeded"


def test_a_running_job_expires_at_its_deadline() -> None:
    story = JobStory()
    worker, job = started(story, deadline_ms=3000)
    worker.tokens(job.id, 2)
    for _ in range(5):
        worker.beat()
        story.pass_time(1.0)
    expired = story.assert_state("a", JobState.EXPIRED)
    assert expired.pos == 2


def test_a_job_of_later_is_not_run_before_its_time() -> None:
    story = JobStory()
    worker = story.ready_worker()
    story.submit("a", not_before=story.store.now + 5)
    story.settle()
    story.pass_time(4.0)
    assert not worker.runs
    worker.beat()
    story.pass_time(2.0)
    assert story.job("a").id in worker.runs


def test_a_refusing_store_loses_nothing() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    story.settle()
    story.store.refusing = "store_full"
    refused = story.submit("b")
    worker.tokens(job.id, 3)
    story.pass_time(2.0)
    assert story.answer(refused)["code"] == "store_full"
    assert reading.ids == [] and story.job("a").pos == 0
    worker.end(job.id, count=2)
    story.pass_time(2.0)
    story.store.refusing = ""
    story.pass_time(2.0)
    story.assert_state("a", JobState.DONE)
    assert reading.ids == list(range(5))


def test_output_that_the_store_cannot_hold_ends_its_job_and_no_other() -> None:
    story = JobStory()
    worker, job = started(story)
    worker.tokens(job.id, 2)
    story.pass_time(UNREAD_DELAY + 0.2)
    story.store.refusing = "store_error"
    worker.tokens(job.id, 3)
    story.pass_time(UNREAD_DELAY + 0.2)
    story.store.refusing = ""
    story.pass_time(1.5)
    dead = story.assert_state("a", JobState.DEAD)
    assert dead.pos == 2 and "refused by the test" in dead.cause
    assert worker.cancelled and not story.manager.runs.active


def test_an_end_that_the_store_cannot_hold_is_dead() -> None:
    story = JobStory()
    worker, job = started(story)
    story.store.refusing = "store_error"
    worker.end(job.id, count=2)
    story.pass_time(1.5)
    story.store.refusing = ""
    story.pass_time(1.5)
    assert "refused by the test" in story.assert_state("a", JobState.DEAD).cause
    assert not story.manager.runs.active


def test_a_store_that_refuses_the_first_look_is_looked_at_again() -> None:
    story = JobStory()
    story.submit("a")
    story.settle()
    following = story.restart()
    following.store.refusing = "store_busy"
    following.tell_manager(ev.StoreLost())
    following.tell_manager(ev.StoreOpened())
    following.settle()
    following.store.refusing = ""
    worker = following.ready_worker()
    following.pass_time(2.0)
    assert following.job("a").id in worker.runs


def test_a_lost_store_ends_runs_and_what_was_durable_goes_on_later() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    worker.tokens(job.id, 3)
    story.pass_time(0.2)
    story.store.refusing = "store_closed"
    worker.tokens(job.id, 3)
    story.pass_time(0.2)
    story.tell_manager(ev.StoreLost())
    story.settle()
    assert not story.core.state.requests and worker.cancelled
    refused = story.submit("b")
    story.settle()
    assert story.answer(refused)["code"] == "store_unavailable"
    worker.runs.pop(job.id, None)
    worker.credit()
    story.store.refusing = ""
    story.tell_manager(ev.StoreOpened())
    story.pass_time(0.5)
    assert worker.runs[job.id].pos == 3
    worker.end(job.id, count=1)
    story.settle()
    assert reading.ids == [0, 1, 2, 3] and reading.end is not None


def test_an_end_that_is_committed_as_the_store_is_lost_reaches_readers() -> None:
    """The store commits the end, but the manager first learns that the store is lost.

    The reader gets the end once the store is open again.
    """
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    worker.tokens(job.id, 3)
    story.pass_time(0.2)
    assert reading.ids == [0, 1, 2]
    worker.end(job.id, count=0)
    story.drain()
    story.store.commit()
    story.tell_manager(ev.StoreLost())
    story.settle()
    story.assert_state("a", JobState.DONE)
    story.tell_manager(ev.StoreOpened())
    story.settle()
    assert reading.end is not None and reading.end["reason"] == "stop"


def test_idle_jobs_run_when_nothing_waits_and_give_way_to_others() -> None:
    story = JobStory()
    worker, job = started(story, sequences=1, priority=-1)
    stream = story.generate(prompt="now")
    worker.tokens(job.id, 1)
    story.drain()
    assert stream not in worker.runs
    for _ in range(7):
        worker.tokens(job.id, 10)
        story.drain()
    story.settle()
    waiting = story.assert_state("a", JobState.WAITING)
    assert waiting.pos == 71 and waiting.attempts == 0
    worker.confirm(job.id)
    worker.credit()
    assert stream in worker.runs
    story.pass_time(1.0)
    worker.beat()
    assert job.id not in worker.runs
    worker.end(stream)
    worker.credit()
    story.pass_time(0.3)
    assert worker.runs[job.id].pos == 71


def test_output_of_an_idle_job_that_has_given_way_costs_no_other_job_an_id() -> None:
    """Output that a run sends after its preemption comes in one event with output of another job.

    The other job still gets all its ids.
    """
    story = JobStory()
    worker, idle = started(story, sequences=2, priority=-1)
    story.submit("b", prompt="b")
    story.settle()
    other = story.job("b")
    story.generate(prompt="now")
    story.generate(prompt="and now")
    worker.tokens(idle.id, 1)
    story.drain()
    worker.tokens(idle.id, 64)
    worker.say(worker.row(idle.id, 1), worker.row(other.id, 1))
    worker.say(worker.row(idle.id, 1), worker.row(other.id, 1))
    story.settle()
    assert story.assert_state("a", JobState.WAITING).pos == 65
    worker.end(other.id)
    story.settle()
    assert story.assert_state("b", JobState.DONE).pos == 2


def test_output_that_does_not_follow_is_not_stored() -> None:
    story = JobStory()
    worker, job = started(story)
    reading = story.fetch("a")
    worker.tokens(job.id, 2)
    story.drain()
    attempt = story.manager.runs.active[job.id].attempt
    with pytest.raises(ValueError, match="at 3, which has 2 ids"):
        story.tell_manager(ev.Output([Delta(job.id, attempt, 3, "3 ", pack_ids([3]))]))
    story.perform(story.manager.decided())  # the broker also performs these actions after an error
    story.settle()
    assert story.assert_state("a", JobState.WAITING).pos == 2
    assert worker.runs[job.id].pos == 2  # the job runs again, after the stored ids
    worker.end(job.id, count=2)
    story.settle()
    assert reading.ids == [0, 1, 2, 3] and reading.end is not None


def test_owners_have_turns_and_the_window_bounds_what_runs() -> None:
    story = JobStory()
    for number in range(20):
        story.submit(f"a{number}", prompt=f"a{number}")
    for number in range(3):
        story.submit(f"b{number}", prompt=f"b{number}", owner="uid:2")
    story.settle()
    story.ready_worker(sequences=4)
    story.pass_time(0.3)
    running = list(story.manager.runs.active.values())
    assert len(running) == 8  # twice the worker's places
    assert sum(active.job.scope.owner == "uid:2" for active in running) == 3


def test_a_job_waits_for_its_model_and_has_it_loaded() -> None:
    story = JobStory()
    story.submit("a")
    story.settle()
    story.pass_time(0.2)
    assert "m/0" in story.workers
    worker = story.workers["m/0"].hello().credit(1)
    story.pass_time(0.3)
    assert story.job("a").id in worker.runs


def test_the_feed_lists_ends_in_order_and_only_new_ones() -> None:
    story = JobStory()
    worker = story.ready_worker()
    for key in "ab":
        story.submit(key, prompt=key)
    story.settle()
    worker.end(story.job("b").id, count=1)
    story.settle()
    worker.end(story.job("a").id, count=1)
    story.settle()
    rows = story.list_jobs(after=0)
    assert [row["key"] for row in rows] == ["b", "a"]
    assert [row["key"] for row in story.list_jobs(after=rows[0]["end_seq"])] == ["a"]
