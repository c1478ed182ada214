"""Jobs that are calls, such as `embed`: one answer, stored once; with a core and a manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.core import events as core
from mlxpool.broker.edge.job_service import CALL_PLACES
from mlxpool.broker.jobs import feeding, retries
from mlxpool.broker.jobs.answers import terminal_of
from mlxpool.broker.store.records import JobState
from mlxpool.common.protocol import from_worker
from mlxpool.common.protocol.frames import Header
from mlxpool.common.protocol.kept import batch_messages
from mlxpool.common.protocol.kept import job_messages as messages
from mlxpool.common.protocol.kept.job_messages import Fetch, JobName
from mlxpool.common.protocol.to_client import Done
from support import core_events as make
from support import kinds
from support.batch_harness import BatchStory
from support.core_harness import BOB, OWNER, FakeWorker, model
from support.job_harness import JobStory
from support.stored_jobs import StoredJobs

EMBED: dict[str, Any] = {"kind": "embed", "inputs": ["a"], "prompt": None, "options": None}


def described(story: JobStory, name: str = "m") -> None:
    story.do(core.ModelDescribed(name, {"features": ["embed"], "problems": []}))


@pytest.fixture
def story() -> JobStory:
    job_story = JobStory()
    described(job_story)
    return job_story


def answer(worker: FakeWorker, ident: bytes, data: bytes = b"1234") -> None:
    """Lets the worker answer a call with one vector of one number."""
    fields = {"rows": 1, "columns": len(data) // 4, "usage": {"prompt_tokens": 3}}
    call_answer = from_worker.CallAnswer({**fields, "timings_ms": {}}, (data,), kinds.VECTORS)
    worker.story.do(core.WorkerAnswer(worker.epoch, ident, call_answer))


def refuse(worker: FakeWorker, ident: bytes, code: str) -> None:
    body = {"code": code, "message": "no", "retryable": code == "queue_full"}
    worker.story.do(core.WorkerAnswer(worker.epoch, ident, from_worker.CallAnswer(body)))


def asked_of(worker: FakeWorker) -> list[bytes]:
    return [call.header.id for call in worker.asked if call.header.id is not None]


def begun(story: JobStory, key: str = "k", **body: Any) -> tuple[FakeWorker, bytes]:
    """Makes a job whose call runs in a worker; returns the worker and the job's id."""
    story.submit(key, **{**EMBED, **body})
    story.settle()
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.3)
    return worker, story.job(key).id


# ---- the life of a job --------------------------------------------------------------------------


def test_a_call_is_answered_once_and_read_by_anybody(story: JobStory) -> None:
    worker, ident = begun(story)
    (call,) = worker.asked
    assert call.header.kind == "embed" and call.message.body() == {
        "model": "m",
        "inputs": ["a"],
        "owner": OWNER,
    }
    early = story.fetch("k")
    story.settle()
    assert early.accepted and early.accepted["state"] == "running" and early.end is None
    answer(worker, ident)
    story.settle()
    job = story.assert_state("k", JobState.DONE)
    assert (job.kind, job.pos, job.seed) == ("embed", 0, 0)
    late = story.fetch("k")
    story.settle()
    for reading in (early, late):
        assert reading.end is not None and reading.end["usage"] == {"prompt_tokens": 3}
        assert reading.end["answer"] == {"kind": "vectors", "rows": 1, "columns": 1}
    ends = [tell.message for tell in story.told if isinstance(tell.message, Done)]
    assert [end.blobs() for end in ends] == [(b"1234",)] * 2
    answer(worker, ident, b"5678")  # a second answer is dropped
    story.settle()
    assert story.store.rows[ident].answer == (b"1234",)


def test_the_same_call_under_one_key_is_the_same_job(story: JobStory) -> None:
    first = story.submit("k", **EMBED)
    again = story.submit("k", **{**EMBED, "normalise": None})
    other = story.submit("k", **{**EMBED, "inputs": ["b"]})
    kind = story.submit("k", prompt="a")
    story.settle()
    assert story.answer(first)["job"] == story.answer(again)["job"]
    assert [story.answer(ident)["code"] for ident in (other, kind)] == [
        "duplicate_id",
        "bad_request",
    ]


def test_what_the_model_is_not_for_is_refused(story: JobStory) -> None:
    ident = story.submit("k", kind="rerank", query="q", documents=["a"], prompt=None, options=None)
    story.settle()
    assert "does not rerank: it is a model for embed" in story.answer(ident)["message"]


def test_a_call_that_its_worker_refuses_is_dead_with_the_reason(story: JobStory) -> None:
    worker, ident = begun(story)
    refuse(worker, ident, "context_exceeded")
    story.settle()
    job = story.assert_state("k", JobState.DEAD)
    assert terminal_of(job.end).body()["code"] == "context_exceeded"


def test_a_failure_of_the_worker_is_tried_again_with_a_pause(story: JobStory) -> None:
    worker, ident = begun(story)
    refuse(worker, ident, "internal")
    story.settle()
    assert story.job("k").attempts == 1
    story.pass_time(1.0)
    assert len(worker.asked) == 1
    story.pass_time(2.0)
    assert asked_of(worker) == [ident] * 2
    for attempts in range(2, retries.MAX_ATTEMPTS + 1):
        refuse(worker, ident, "internal")
        story.settle()
        assert story.job("k").attempts == attempts or attempts == retries.MAX_ATTEMPTS
        until_asked = len(worker.asked) + 1
        while story.job("k").state is JobState.WAITING and len(worker.asked) < until_asked:
            story.pass_time(1.0)
    story.assert_state("k", JobState.DEAD)
    story.about(messages.RETRY, "k")
    story.settle()
    story.pass_time(0.5)
    answer(worker, ident)
    story.settle()
    story.assert_state("k", JobState.DONE)


def test_the_call_of_a_lost_worker_goes_to_the_next_and_its_charge_is_kept(story: JobStory) -> None:
    worker, ident = begun(story)
    worker.die("killed by SIGSEGV", own=True, prefill=ident)
    story.settle()
    assert story.job("k").charge == 1.0
    assert [failure.stacks for failure in story.store.rows[ident].failures] == ["stacks of m/0"]
    following = story.restart()
    described(following)
    worker = following.ready_worker(sequences=1)
    following.pass_time(0.5)
    (call,) = worker.asked
    assert (call.message.body() or {})["alone"] is True
    worker.die("killed by SIGSEGV", own=True, prefill=ident)
    following.settle()
    job = following.assert_state("k", JobState.DEAD)
    assert "ended two workers" in job.cause
    again = following.submit("other", **EMBED)  # the same request with another key
    following.settle()
    assert following.answer(again)["code"] == "poisoned"


def test_a_kill_from_outside_costs_nothing(story: JobStory) -> None:
    worker, ident = begun(story)
    for _ in range(4):
        worker.die("killed by SIGKILL")
        worker = story.ready_worker(sequences=1)
        story.settle()
    assert asked_of(worker) == [ident]
    answer(worker, ident)
    story.settle()
    job = story.assert_state("k", JobState.DONE)
    assert (job.attempts, job.charge) == (0, 0.0)


@pytest.mark.parametrize("committed", [False, True])
def test_a_broker_that_ends_before_the_commit_has_it_computed_again(
    story: JobStory, committed: bool
) -> None:
    """If a broker ends before the first answer is committed, the next broker repeats the call."""
    worker, ident = begun(story)
    answer(worker, ident, b"first---")
    story.drain()
    if committed:
        story.store.commit()
    following = story.restart()
    described(following)
    worker = following.ready_worker(sequences=1)
    following.pass_time(0.5)
    assert asked_of(worker) == ([] if committed else [ident])
    if not committed:
        answer(worker, ident, b"seco")
        following.settle()
    following.assert_state("k", JobState.DONE)
    reading = following.fetch("k")
    following.settle()
    (end,) = [tell.message for tell in following.told if isinstance(tell.message, Done)]
    whole = b"first---" if committed else b"seco"
    assert end.blobs() == (whole,) and reading.end is not None
    assert reading.end["answer"]["columns"] == len(whole) // 4
    assert not following.store.ended_twice


def test_a_shutdown_charges_no_start(story: JobStory) -> None:
    begun(story)
    story.do(core.Shutdown())
    story.settle()
    job = story.assert_state("k", JobState.WAITING)
    assert (job.starts, job.attempts) == (0, 0)


# ---- deadlines and cancels ----------------------------------------------------------------------


def test_a_job_past_its_deadline_expires_while_its_worker_computes(story: JobStory) -> None:
    worker, ident = begun(story, deadline_ms=2000)
    story.pass_time(3.0)
    story.assert_state("k", JobState.EXPIRED)
    assert worker.cancelled == [(ident, 0)]


def test_a_cancel_of_the_job_reaches_its_worker(story: JobStory) -> None:
    worker, ident = begun(story)
    story.about(messages.CANCEL, "k")
    story.settle()
    story.assert_state("k", JobState.CANCELLED)
    assert worker.cancelled == [(ident, 0)] and not story.manager.runs.active
    answer(worker, ident)
    story.settle()
    assert story.store.rows[ident].answer == ()


def test_a_cancel_by_the_id_of_the_job_ends_the_job(story: JobStory) -> None:
    """The call of a job has the job's id, so its owner can cancel the job as a call."""
    _, ident = begun(story)
    story.do(core.CancelRequest(1, OWNER, ident))
    story.settle()
    story.assert_state("k", JobState.CANCELLED)
    assert not story.manager.runs.active


def test_a_client_cannot_take_over_the_call_of_a_job(story: JobStory) -> None:
    worker, ident = begun(story)
    header = Header(kinds.EMBED, ident, 0, 1)
    story.do(make.client(1, OWNER, header, {"model": "m", "inputs": ["a"]}))
    story.assert_sent(1, "error", id=ident, code="duplicate_id")
    answer(worker, ident)
    story.settle()
    story.assert_state("k", JobState.DONE)


def test_a_released_answer_is_gone(story: JobStory) -> None:
    worker, ident = begun(story)
    answer(worker, ident)
    story.settle()
    story.about(messages.RELEASE, "k")
    story.settle()
    story.assert_state("k", JobState.GONE)


# ---- how many at once ---------------------------------------------------------------------------


def test_a_worker_is_full_and_as_many_calls_wait_for_its_places(story: JobStory) -> None:
    for number in range(3 * CALL_PLACES):
        story.submit(f"k{number}", **{**EMBED, "inputs": [f"text {number}"]})
    story.settle()
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    assert len(worker.asked) == CALL_PLACES and len(story.model().calls) == CALL_PLACES
    for ident in asked_of(worker)[:10]:
        answer(worker, ident)  # without waiting for the commit of these answers
    assert len(worker.asked) == CALL_PLACES + 10
    story.settle()
    story.pass_time(0.5)
    assert len(story.model().calls) == CALL_PLACES


def test_the_call_of_a_client_takes_turns_with_those_of_jobs(story: JobStory) -> None:
    for number in range(2 * CALL_PLACES):
        story.submit(f"k{number}", **{**EMBED, "inputs": [f"text {number}"]})
    story.settle()
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    header = Header(kinds.EMBED, b"c" * 16, 0, 1)
    story.do(make.client(2, BOB, header, {"model": "m", "inputs": ["now"]}))
    for ident in asked_of(worker)[:2]:
        answer(worker, ident)
    assert header.id in asked_of(worker)[CALL_PLACES:]


def test_answers_that_may_come_are_bounded_in_bytes(
    story: JobStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected answers of all calls in the core have at most MAX_ANSWERS bytes."""
    monkeypatch.setattr(feeding, "MAX_ANSWERS", 5 * 4 * 1024 * 1024)
    for number in range(12):
        texts = [f"text {number}"] * 256
        story.submit(f"k{number}", **{**EMBED, "inputs": texts})
    story.submit("short", **{**EMBED, "inputs": ["one"], "dimensions": 8})
    story.settle()
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    assert len(worker.asked) == 5
    story.store.refusing = "store_busy"  # answers cannot be stored
    for ident in asked_of(worker)[:3]:
        answer(worker, ident)
    story.settle()
    story.pass_time(0.5)
    assert len(worker.asked) == 5
    story.store.refusing = ""
    story.pass_time(2.0)
    assert len(worker.asked) == 8
    story.about(messages.CANCEL, "k11")  # a job that is held
    done = 3
    while done < len(worker.asked):
        for ident in asked_of(worker)[done:]:
            answer(worker, ident)
            done += 1
        story.settle()
        story.pass_time(0.5)
    story.assert_state("k11", JobState.CANCELLED)
    for number in range(11):
        story.assert_state(f"k{number}", JobState.DONE)
    story.assert_state("short", JobState.DONE)
    assert not story.manager.runs.active and done == 12


def test_calls_of_one_model_hold_up_no_job_of_another() -> None:
    """The calls of one model use all the memory for answers; jobs of other models still start."""
    story = JobStory(models={name: model() for name in ("m", "g", "other")})
    described(story)
    described(story, "other")
    story.do(core.ModelDescribed("g", {"features": ["generate"], "problems": []}))
    worker = story.ready_worker(sequences=1)
    generating, other = story.ready_worker("g", sequences=4), story.ready_worker("other")
    for number in range(60):
        story.submit(f"k{number}", **{**EMBED, "inputs": [f"text {number}"] * 256})
    story.pass_time(0.5)
    assert len(worker.asked) == 32
    for number in range(2):
        story.submit(f"g{number}", model="g", priority=2)
        story.submit(f"o{number}", **{**EMBED, "model": "other", "inputs": ["short"]})
    story.pass_time(0.5)
    assert len(generating.runs) == 2 and len(other.asked) == 1 and len(worker.asked) == 32
    answer(other, asked_of(other)[0])
    story.pass_time(0.5)
    assert len(other.asked) == 2  # `other` only waits for its own answers
    for answering in (worker, other):
        answer(answering, asked_of(answering)[-1])
    story.pass_time(0.5)
    assert len(worker.asked) == 33


def test_a_call_that_was_never_begun_is_charged_no_start(story: JobStory) -> None:
    """32 of 40 calls start, and fill the memory for answers.

    After a kill of the broker the other 8 still count as never started.
    """
    for number in range(40):
        story.submit(f"k{number}", **{**EMBED, "inputs": [f"text {number}"] * 256})
    story.settle()
    story.ready_worker(sequences=1)
    story.pass_time(0.5)
    asked = {row.job.id for row in story.store.rows.values() if row.job.starts}
    assert len(asked) == 32
    story = story.restart()
    assert [story.job(f"k{number}").starts for number in range(40)].count(0) == 8


def test_a_held_job_expires_at_its_deadline(
    story: JobStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "MAX_ANSWERS", 1)
    story.submit("first", **EMBED)
    story.submit("late", **{**EMBED, "deadline_ms": 2000})
    story.settle()
    worker = story.ready_worker(sequences=1)
    story.pass_time(3.0)
    assert len(worker.asked) == 1
    answer(worker, asked_of(worker)[0])
    story.settle()
    story.pass_time(1.0)
    story.assert_state("first", JobState.DONE)
    story.assert_state("late", JobState.EXPIRED)


def test_idle_calls_come_when_no_others_wait(story: JobStory) -> None:
    for number in range(3):
        story.submit(f"idle{number}", **{**EMBED, "inputs": [f"idle {number}"], "priority": -1})
    for number in range(2 * CALL_PLACES + 5):
        story.submit(f"k{number}", **{**EMBED, "inputs": [f"text {number}"]})
    story.settle()
    worker = story.ready_worker(sequences=1)
    seen = list[str]()
    while len(seen) < 2 * CALL_PLACES + 8:
        story.pass_time(0.3)
        assert len(worker.asked) > len(seen)
        for call in worker.asked[len(seen) :]:
            seen.append((call.message.body() or {})["inputs"][0])
            answer(worker, call.header.id or b"")
        story.settle()
    assert sorted(seen[-3:]) == ["idle 0", "idle 1", "idle 2"]


def test_a_model_of_unknown_files_has_calls_too() -> None:
    story = JobStory()
    worker, ident = begun(story)
    answer(worker, ident)
    story.settle()
    story.assert_state("k", JobState.DONE)


# ---- batches ------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


def lines(count: int) -> list[dict[str, Any]]:
    return [{"id": f"l{n}", "kind": "embed", "inputs": [f"text {n}"]} for n in range(count)]


def vector(line: int) -> bytes:
    return line.to_bytes(4, "little")


def work_off(story: BatchStory, worker: FakeWorker, done: int = 0) -> int:
    """Lets a worker answer its calls until there are no more calls. Returns their number."""
    while done < len(worker.asked):
        for call in worker.asked[done:]:
            done += 1
            text = (call.message.body() or {})["inputs"][0]
            answer(worker, call.header.id or b"", vector(int(text.split()[1])))
        story.settle()
        story.pass_time(0.3)
    return done


def check(story: BatchStory, count: int) -> None:
    outcomes = story.outcomes("b", limit=50)
    assert [(outcome["line"], outcome["id"], outcome["state"]) for outcome in outcomes] == [
        (n, f"l{n}", "done") for n in range(count)
    ]
    assert [outcome["end"]["blobs"] for outcome in outcomes] == [[vector(n)] for n in range(count)]
    assert outcomes[0]["end"]["body"]["answer"] == {"kind": "vectors", "rows": 1, "columns": 1}


def test_lines_of_calls_are_worked_off_and_read_in_order(store: StoredJobs) -> None:
    story = BatchStory(store)
    described(story)
    story.submit_batch("b", lines(300))
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    work_off(story, worker)
    assert story.batch("b")["done"] == 300
    check(story, 300)


def test_a_batch_has_lines_of_several_kinds_and_bad_ones(store: StoredJobs) -> None:
    story = BatchStory(store, models={"m": model(), "other": model()})
    described(story)
    story.submit_batch(
        "b",
        [
            *lines(2),
            {"id": "text", "model": "other", "prompt": "x"},
            {"id": "query", "kind": "rerank", "query": "q", "documents": ["a"]},
            {"id": "many", "kind": "embed", "inputs": ["a"] * 300},
            {"id": "generate", "prompt": "x"},
        ],
    )
    worker = story.ready_worker(sequences=1)
    other = story.ready_worker("other", sequences=4)
    story.pass_time(0.5)
    work_off(story, worker)
    story.work_off(other)
    outcomes = {outcome["id"]: outcome for outcome in story.outcomes("b")}
    states = {name: outcome["state"] for name, outcome in outcomes.items()}
    assert states == {
        "l0": "done", "l1": "done", "text": "done",
        "query": "failed", "many": "failed", "generate": "failed",
    }  # fmt: skip
    assert outcomes["text"]["text"] and "answer" not in outcomes["text"]["end"]["body"]
    said = {name: outcome["end"]["body"]["message"] for name, outcome in outcomes.items()
            if "body" in outcome["end"] and "message" in outcome["end"]["body"]}  # fmt: skip
    assert "does not rerank" in said["query"] and "does not generate" in said["generate"]
    assert "1 to 256 texts" in said["many"]


def test_a_batch_of_calls_goes_on_in_the_next_broker(store: StoredJobs) -> None:
    story = BatchStory(store)
    described(story)
    story.submit_batch("b", lines(200))
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    for call in worker.asked[:30]:
        text = (call.message.body() or {})["inputs"][0]
        answer(worker, call.header.id or b"", vector(int(text.split()[1])))
    story.drain()  # the end is decided, but not on the disk yet
    following = story.restart()
    described(following)
    worker = following.ready_worker(sequences=1)
    following.pass_time(0.5)
    work_off(following, worker)
    assert following.batch("b")["done"] == 200 == store.ended()
    check(following, 200)


def test_an_answer_that_is_too_large_for_a_page_is_fetched_by_itself(store: StoredJobs) -> None:
    story = BatchStory(store)
    described(story)
    story.submit_batch("b", lines(3))
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    large = bytes(3 * 1024 * 1024)
    for ident in asked_of(worker):
        answer(worker, ident, large)
    story.settle()
    outcomes = story.outcomes("b", limit=50)
    assert [outcome["whole"] for outcome in outcomes] == [False] * 3 and "end" not in outcomes[0]
    ident = story.ask(Fetch(JobName(id=outcomes[1]["job"])))
    story.settle()
    (end,) = [t.message for t in story.told if t.header.id == ident and t.message.kind == "done"]
    assert end.blobs() == (large,)


def test_a_batch_of_calls_is_cancelled(store: StoredJobs) -> None:
    story = BatchStory(store)
    described(story)
    story.submit_batch("b", lines(100))
    worker = story.ready_worker(sequences=1)
    story.pass_time(0.5)
    assert worker.asked
    story.about_batch(batch_messages.CANCEL, "b")
    story.pass_time(0.5)
    assert story.batch("b")["cancelled"] == 100
    assert {ident for ident, _ in worker.cancelled} == set(asked_of(worker))
    assert not story.manager.runs.active and not story.core.state.calls
