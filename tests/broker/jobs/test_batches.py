"""Scenarios of batches, with a core, a manager and a real store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.batches import batch_questions, live_batches
from mlxpool.broker.jobs.batches.live_batches import AHEAD, MAX_WATCHERS, PORTION_LINES
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.store.records import JobState, Refused
from mlxpool.common.errors import BadRequest, Draining
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept import file_messages as files
from mlxpool.common.protocol.kept.batch_lines import Line, parse_line
from mlxpool.common.protocol.kept.batch_messages import AboutBatch, ListBatches, SubmitBatch
from mlxpool.common.protocol.kept.file_messages import (
    AboutFile,
    KeyName,
    ListFiles,
    PutFile,
    ReadFile,
)
from mlxpool.common.protocol.kept.job_messages import ListJobs
from mlxpool.common.protocol.kept.job_operations import parse_question
from support.batch_harness import BatchStory, jsonl, prompts
from support.core_harness import BOB, OWNER, request_id
from support.stored_jobs import StoredJobs


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


@pytest.fixture
def story(store: StoredJobs) -> BatchStory:
    return BatchStory(store)


def counts(row: dict[str, Any]) -> tuple[int, ...]:
    names = ("waiting", "running", "done", "dead", "failed", "cancelled", "expired")
    return tuple(row[name] for name in names)


def list_all(story: BatchStory, **body: Any) -> dict[str, Any]:
    """Sends an operator's request for the batches of all owners. Returns the answer."""
    owner, question = parse_question("batches", body)
    ident = request_id(90_000 + len(story.told))
    story.tell_manager(ev.QuestionAsked(9, owner, ident, 0, question, operator=True))
    story.settle()
    return story.answer(ident)


def test_operators_list_the_batches_of_all_owners_page_by_page(story: BatchStory) -> None:
    for number in range(5):
        story.submit_batch(f"b{number}", prompts(1), owner=BOB if number % 2 else OWNER)
        story.pass_time(0.1)
    listed = list_all(story)
    assert [row["key"] for row in listed["batches"]] == ["b4", "b3", "b2", "b1", "b0"]
    assert {row["owner"] for row in listed["batches"]} == {OWNER, BOB}
    assert listed["next"] is None and {row["tenant"] for row in listed["batches"]} == {""}
    of_bob = list_all(story, owner=BOB)["batches"]
    assert [row["key"] for row in of_bob] == ["b3", "b1"]
    keys, behind = [], None
    while True:
        page = list_all(story, limit=2, behind=behind)
        keys += [row["key"] for row in page["batches"]]
        behind = page["next"]
        if behind is None:
            break
        assert len(page["batches"]) == 2
    assert keys == ["b4", "b3", "b2", "b1", "b0"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"behind": [1.0, "id"]}, "id of 16 bytes"),
        ({"behind": [-1.0, bytes(16)]}, "behind must be"),
        ({"behind": "x"}, "behind must be"),
        ({"owner": 5}, "owner"),
    ],
)
def test_a_bad_question_for_all_batches_is_refused(body: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        parse_question("batches", body)


# ---- the life of a batch -------------------------------------------------------------------------


def test_lines_become_jobs_and_their_results_are_read_in_order(story: BatchStory) -> None:
    row = story.submit_batch("b", prompts(10), metadata={"who": "me"})
    assert (row["state"], row["lines"], row["metadata"]) == ("running", 10, {"who": "me"})
    worker = story.ready_worker(sequences=4)
    story.pass_time(0.5)
    assert counts(story.batch("b")) == (2, 8, 0, 0, 0, 0, 0)  # 8: twice the worker's sequences
    story.work_off(worker)
    row = story.batch("b")
    assert (row["state"], counts(row)) == ("done", (0, 0, 10, 0, 0, 0, 0))
    outcomes = story.outcomes("b")
    assert [(each["line"], each["id"]) for each in outcomes] == [(n, f"l{n}") for n in range(10)]
    assert {each["text"] for each in outcomes} == {"<0><1>"}
    assert len({each["seed"] for each in outcomes}) == 10
    assert outcomes[0]["end"]["kind"] == "done" and len(outcomes[0]["ids"]) == 8
    assert not story.manager.batches.live


def test_bad_lines_fail_alone(story: BatchStory) -> None:
    lines = [
        b"{not JSON",
        {"id": "good", "prompt": "x", "options": {"max_tokens": 3}},
        {"id": "high", "prompt": "x", "options": {"temperature": -1}},
        {"id": "model", "model": "nosuch", "prompt": "x"},
        {"id": "key", "prompt": "x", "deadline_ms": 5},
        b"[1]",
        {"id": "n" * 300, "prompt": "x"},
        b"",
        {"id": "two", "prompt": "x", "messages": []},
    ]
    story.submit_batch("b", lines)
    story.work_off(story.ready_worker(sequences=4))
    assert counts(story.batch("b")) == (0, 0, 1, 0, 7, 0, 0)
    outcomes = {each["line"]: each for each in story.outcomes("b")}
    assert outcomes[1]["state"] == "done" and sorted(outcomes) == [0, 1, 2, 3, 4, 5, 6, 8]
    errors = {line: each["end"]["body"] for line, each in outcomes.items() if line != 1}
    assert {error["code"] for line, error in errors.items() if line != 3} == {"bad_request"}
    assert errors[3]["code"] == "unknown_model" and "nosuch" in errors[3]["message"]
    assert "temperature" in errors[2]["message"] and "0 to" in errors[2]["message"]
    assert "deadline_ms is of the batch" in errors[4]["message"]
    assert (outcomes[2]["id"], outcomes[6]["id"]) == ("high", "")


def test_a_batch_is_submitted_twice_and_is_one(story: BatchStory) -> None:
    first = story.submit_batch("b", prompts(3), metadata={"n": 1})
    again = story.submit_batch("b", prompts(3), metadata={"n": 2}, priority=1)
    assert again["batch"] == first["batch"] and again["metadata"] == {"n": 1}
    other = story.submit_batch("b2", prompts(3))
    assert other["batch"] != first["batch"]
    message = SubmitBatch(KeyName("b"), "b2", b"another content", defaults={"model": "m"})
    ident = story.ask(message)
    story.settle()
    assert story.answer(ident)["code"] == "duplicate_id"


def test_a_batch_belongs_to_its_owner(story: BatchStory) -> None:
    story.submit_batch("b", prompts(1))
    for kind in messages.CALLS:
        answer = story.about_batch(kind, "b", owner=BOB)
        assert answer["code"] == "unknown_job", kind
    ident = story.ask(SubmitBatch(KeyName("x"), "b"), owner=BOB)
    story.settle()
    assert "there is no file 'b'" in story.answer(ident)["message"]
    assert story.submit_batch("b", prompts(1), owner=BOB)["state"] == "running"


def test_a_cancelled_batch_ends_what_waits_and_what_runs(story: BatchStory) -> None:
    worker = story.ready_worker(sequences=2)
    story.submit_batch("b", prompts(1500))
    story.pass_time(1.0)
    run = next(iter(worker.runs))
    worker.tokens(run, 1)
    reading = story.fetch(story.store.ask_key(run))
    story.settle()
    assert story.about_batch(messages.CANCEL, "b")["state"] == "cancelling"
    story.pass_time(1.0)
    row = story.batch("b")
    assert (row["state"], row["waiting"], row["running"]) == ("cancelled", 0, 0)
    assert row["cancelled"] + row["done"] == row["lines"] >= AHEAD - PORTION_LINES
    assert reading.end is not None and reading.end["reason"] == "cancelled"
    assert story.about_batch(messages.RETRY, "b")["code"] == "bad_request"
    assert not story.manager.batches.live and not story.manager.runs.active


def test_failed_lines_are_tried_again(story: BatchStory) -> None:
    worker = story.ready_worker(sequences=4)
    story.submit_batch("b", prompts(3))
    story.pass_time(0.5)
    for id in list(worker.runs):
        worker.fail(id, "bad_request")
    story.pass_time(1.0)
    row = story.batch("b")
    assert (row["state"], counts(row)) == ("done", (0, 0, 0, 3, 0, 0, 0))
    assert story.about_batch(messages.RETRY, "b")["state"] == "running"
    worker.credit()
    story.work_off(worker)
    row = story.batch("b")
    assert (row["state"], counts(row)) == ("done", (0, 0, 3, 0, 0, 0, 0))


def test_what_is_not_done_by_the_deadline_expires(story: BatchStory) -> None:
    story.submit_batch("b", prompts(AHEAD + 300), deadline_ms=5000)
    story.pass_time(7.0)
    row = story.batch("b")
    assert (row["state"], row["waiting"]) == ("done", 0)
    assert (row["expired"], row["failed"], row["outcome"]) == (AHEAD + 300, 0, "expired")
    outcomes = story.outcomes("b", limit=1000)
    ends = {(each["state"], each["end"]["body"]["code"]) for each in outcomes}
    assert ends == {("expired", "deadline_exceeded")} and len(outcomes) == AHEAD + 300
    assert sum("job" not in each for each in outcomes) >= 100  # the other lines ended as jobs


def test_lines_that_the_deadline_cuts_off_are_expired(
    story: BatchStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the deadline, the lines without a job expire.

    This holds even if all existing jobs of the batch are done, and a later bad line has failed.
    """
    monkeypatch.setattr(live_batches, "AHEAD", 4)
    monkeypatch.setattr(live_batches, "PORTION_LINES", 4)
    worker = story.ready_worker(sequences=4)
    story.submit_batch("b", [*prompts(10), b"{"], deadline_ms=5000)
    story.pass_time(4.0)
    for id in list(worker.runs):
        worker.end(id, count=1)
    story.now += 2.0
    story.work_off(worker)
    row = story.batch("b")
    assert (row["state"], row["outcome"]) == ("done", "expired")
    assert counts(row) == (0, 0, 4, 0, 1, 0, 6)
    outcomes = story.outcomes("b")
    assert [each["state"] for each in outcomes] == ["done"] * 4 + ["expired"] * 6 + ["failed"]
    row = story.about_batch(messages.RETRY, "b")  # no job could wait again
    assert (row["state"], counts(row)) == ("done", (0, 0, 4, 0, 1, 0, 6))


def test_results_are_deleted_when_they_are_released(story: BatchStory) -> None:
    story.submit_batch("b", prompts(3))
    assert "cancel it first" in story.about_batch(messages.RELEASE, "b")["message"]
    story.work_off(story.ready_worker(sequences=4))
    story.about_batch(messages.RELEASE, "b")
    story.pass_time(1.5)
    assert story.batch("b")["state"] == "gone"
    assert {job.state for job in story.store.lines(story.batch("b")["batch"])} == {JobState.GONE}
    assert story.submit_batch("b", prompts(3))["code"] == "gone"


def test_results_of_the_lines_that_are_done_are_deleted_alone(
    story: BatchStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_questions, "RELEASE_COUNT", 2)
    good = prompts(5)
    story.submit_batch("b", [*good, {"id": "bad", "model": "nosuch", "prompt": "x"}])
    release = AboutBatch(messages.RELEASE_RESULTS, KeyName("b"), messages.DONE)

    def answer(message: AboutBatch) -> dict[str, Any]:
        ident = story.ask(message)
        story.settle()
        return story.answer(ident)

    assert "cancel it first" in answer(release)["message"]
    story.work_off(story.ready_worker(sequences=4))
    row = answer(release)
    assert (row["state"], row["deleted"], row["done"], row["failed"]) == ("done", ["done"], 5, 1)
    assert {each["state"] for each in story.outcomes("b")} == {"gone", "failed"}
    assert answer(release)["deleted"] == ["done"]  # a request may arrive twice
    others = AboutBatch(messages.RELEASE_RESULTS, KeyName("b"), messages.OTHERS)
    assert answer(others)["deleted"] == ["done", "others"]
    assert {each["state"] for each in story.outcomes("b")} == {"gone"}
    story.about_batch(messages.RELEASE, "b")
    story.pass_time(1.5)
    assert answer(release)["code"] == "gone"
    for body in ({"key": "b", "only": "dead"}, {"key": "b"}):
        with pytest.raises(BadRequest, match="only must be done or others"):
            messages.parse_question(messages.RELEASE_RESULTS, body)


def test_a_broker_that_does_not_know_deletions_of_some_results_does_not_delete_all() -> None:
    """A deletion of some results is a message of its own.

    An old broker would ignore an unknown key of `release`, and delete all results.
    """
    kinds = {messages.READ, messages.CANCEL, messages.RETRY, messages.RELEASE}
    release = AboutBatch(messages.RELEASE_RESULTS, KeyName("b"), messages.DONE)
    assert release.kind not in kinds
    assert messages.parse_question(release.kind, release.body()) == release


def test_results_are_kept_from_the_end_of_the_batch_on(store: StoredJobs) -> None:
    story = BatchStory(store, JobPolicy(30.0, 1e9))
    worker = story.ready_worker(sequences=1)
    story.submit_batch("b", prompts(3))
    story.pass_time(0.5)
    first = next(iter(worker.runs))
    worker.tokens(first, 1)
    worker.end(first)
    story.pass_time(60.0)  # the other lines take longer than results are kept
    assert [each["state"] for each in story.outcomes("b")] == ["done"]
    worker.credit()
    story.work_off(worker)
    assert story.batch("b")["state"] == "done"
    story.pass_time(32.0)
    assert story.batch("b")["state"] == "gone"


# ---- many lines ----------------------------------------------------------------------------------


def test_a_large_file_is_never_in_memory_as_a_whole(story: BatchStory) -> None:
    row = story.submit_batch("b", prompts(5000))
    story.pass_time(1.0)
    lines = story.store.lines(row["batch"])
    assert AHEAD <= len(lines) < AHEAD + PORTION_LINES
    assert story.batch("b")["lines"] == 5000
    assert story.store.most_waiting < 16
    worker = story.ready_worker(sequences=512)
    story.work_off(worker)
    assert counts(story.batch("b")) == (0, 0, 5000, 0, 0, 0, 0)
    assert [job.line for job in story.store.lines(row["batch"])] == list(range(5000))


def test_lines_are_checked_a_few_in_a_turn(
    story: BatchStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.submit_batch("b", prompts(PORTION_LINES))
    parsed: list[bytes] = []

    def parse(data: bytes, defaults: Mapping[str, Any]) -> Line:
        parsed.append(data)
        return parse_line(data, defaults)

    monkeypatch.setattr(live_batches, "parse_line", parse)
    turns = []
    while story.manager.next_wake() <= story.now:
        before = len(parsed)
        story.tell_manager(ev.Wake())
        turns.append(len(parsed) - before)
        story.settle()
    assert sum(turns) == PORTION_LINES and max(turns) == live_batches.SLICE_LINES


def test_batches_take_turns(story: BatchStory) -> None:
    rows = [story.submit_batch(key, prompts(600)) for key in "abc"]
    for _ in range(18):
        story.tell_manager(ev.Wake())
        story.settle()
    line_counts = [len(story.store.lines(row["batch"])) for row in rows]
    assert max(line_counts) - min(line_counts) <= PORTION_LINES and sum(line_counts) > 0


def test_lines_wait_in_the_file_while_the_pool_does_not_take_them(
    story: BatchStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*args: object) -> None:
        raise Draining("the model m is drained")

    with monkeypatch.context() as patched:
        patched.setattr(story.manager.batches, "_check", check)
        row = story.submit_batch("b", prompts(3))
        story.pass_time(0.5)
        assert counts(story.batch("b"))[0] == 3
        assert story.batch("b")["trouble"] == "the model m is drained"
        assert story.store.lines(row["batch"]) == []
    story.pass_time(1.0)
    story.work_off(story.ready_worker(sequences=4))
    assert (story.batch("b")["done"], story.batch("b")["trouble"]) == (3, "")


def test_quotas_of_jobs_hold_for_batches(store: StoredJobs) -> None:
    story = BatchStory(store, JobPolicy(60.0, 1e9, quota_jobs=5))
    refused = story.submit_batch("b", prompts(6))
    assert refused["code"] == "over_quota" and refused["details"] == {"value": 6, "bound": 5}
    story.submit_batch("c", prompts(5))
    story.submit_batch("d", prompts(5))
    story.work_off(story.ready_worker(sequences=4))
    assert (story.batch("c")["state"], story.batch("d")["waiting"]) == ("done", 5)
    assert "5 jobs are stored for this owner" in story.batch("d")["trouble"]
    assert story.manager.figures().refused == {"over_quota": 1}  # waiting lines are not refused
    story.about_batch(messages.RELEASE, "c")
    story.pass_time(3.0)
    assert story.batch("d")["trouble"] == ""


def test_refused_submissions_are_counted_by_reason(store: StoredJobs) -> None:
    story = BatchStory(store, JobPolicy(60.0, 1e9, quota_jobs=1, quota_file_bytes=10))
    assert story.manager.figures().refused == {}
    story.submit("one")
    story.settle()
    for ident in (story.submit("two"), story.submit("three")):
        story.settle()
        assert story.answer(ident)["code"] == "over_quota"
    story.submit("one")  # a second submission is not refused; another job with the key is
    story.submit("one", prompt="other")
    story.submit("four", model="nowhere")
    story.ask(PutFile(KeyName("f"), 0, b"x" * 11, last=True))
    story.about("retry", "nosuch")  # a refused retry does not count
    story.ask(SubmitBatch(KeyName("b"), "nofile"))
    story.settle()
    assert story.manager.figures().refused == {
        "over_quota": 3,
        "duplicate_id": 1,
        "unknown_model": 1,
        "unknown_job": 1,
    }


# ---- progress ------------------------------------------------------------------------------------


def test_progress_is_told_to_every_reader_that_waits(story: BatchStory) -> None:
    row = story.submit_batch("b", prompts(4))
    worker = story.ready_worker(sequences=4)
    story.pass_time(0.5)
    mark = story.batch("b")["mark"]
    assert mark != row["mark"]
    at_once = story.wait_for("b", row["mark"])
    waiting = [story.wait_for("b", mark, link=link) for link in (1, 2)]
    story.settle()
    assert story.answer(at_once)["mark"] == mark
    assert not any(map(story.answered, waiting))
    for id in list(worker.runs):
        worker.tokens(id, 1)
        worker.end(id)
    story.pass_time(0.5)
    rows = [story.answer(ident) for ident in waiting]
    assert rows[0] == rows[1] and rows[0]["done"] > 0
    story.pass_time(1.0)
    late = story.wait_for("b", "")
    story.settle()
    assert story.answer(late)["state"] == "done"


def test_a_reader_of_progress_is_answered_in_time_in_any_case(story: BatchStory) -> None:
    story.submit_batch("b", prompts(1))
    story.pass_time(0.5)
    ident = story.wait_for("b", story.batch("b")["mark"])
    story.pass_time(29.0)
    assert not story.answered(ident)
    story.pass_time(2.0)
    assert story.answer(ident)["waiting"] == 1


def test_so_many_readers_of_progress_and_no_more(story: BatchStory) -> None:
    story.submit_batch("b", prompts(1))
    story.pass_time(0.5)
    mark = story.batch("b")["mark"]
    asked = [story.wait_for("b", mark) for _ in range(MAX_WATCHERS + 1)]
    story.settle()
    assert [story.answered(ident) for ident in asked].count(True) == 1
    assert story.answer(asked[-1])["code"] == "over_quota"


# ---- crashes and failures of the store -----------------------------------------------------------


def test_another_broker_goes_on_where_the_first_one_ended(story: BatchStory) -> None:
    row = story.submit_batch("b", prompts(3000))
    for _ in range(9):  # until a portion is partly checked
        story.tell_manager(ev.Wake())
        story.settle()
    for _ in range(2):  # after three starts, jobs without ids would run one at a time
        story = story.restart()
        story.pass_time(0.5)
        worker = story.ready_worker(sequences=256)
        story.pass_time(0.3)
        for id in list(worker.runs)[::2]:
            worker.tokens(id, 1)
            worker.end(id)
        story.drain()
    story = story.restart()
    story.work_off(story.ready_worker(sequences=512))
    assert counts(story.batch("b")) == (0, 0, 3000, 0, 0, 0, 0)
    assert [job.line for job in story.store.lines(row["batch"])] == list(range(3000))


def test_a_cancel_goes_on_in_the_next_broker(story: BatchStory) -> None:
    story.submit_batch("b", prompts(1500))
    story.pass_time(1.0)
    story.store.ask_cancel_some("b")
    story = story.restart()
    story.pass_time(1.0)
    assert story.batch("b")["state"] == "cancelled"


def test_a_store_that_refuses_is_asked_again(story: BatchStory) -> None:
    story.submit_batch("b", prompts(300))
    story.store.refusal = Refused("store_busy", "busy")
    story.pass_time(1.5)
    story.store.refusal = None
    story.pass_time(1.5)
    story.work_off(story.ready_worker(sequences=64))
    assert story.batch("b")["done"] == 300


def test_a_lost_store_tells_those_who_wait(story: BatchStory) -> None:
    story.submit_batch("b", prompts(300))
    story.pass_time(0.5)
    ident = story.wait_for("b", story.batch("b")["mark"])
    story.settle()
    story.tell_manager(ev.StoreLost())
    assert story.answer(ident)["code"] == "store_unavailable"
    story.tell_manager(ev.StoreOpened())
    story.work_off(story.ready_worker(sequences=64))
    assert story.batch("b")["done"] == 300


def test_batches_are_looked_for_again_if_the_first_look_is_refused(story: BatchStory) -> None:
    story.submit_batch("b", prompts(3))
    story.tell_manager(ev.StoreLost())
    story.store.refusal = Refused("store_busy", "busy")
    story.tell_manager(ev.StoreOpened())
    story.settle()
    assert not story.manager.batches.live
    story.store.refusal = None
    story.pass_time(1.5)
    assert story.manager.batches.live
    story.work_off(story.ready_worker(sequences=4))
    assert story.batch("b")["done"] == 3


# ---- lists and files -----------------------------------------------------------------------------


def test_lines_are_listed_with_their_batch_alone(story: BatchStory) -> None:
    story.submit("single")
    story.submit_batch("b", prompts(3))
    story.pass_time(0.5)
    assert [row["key"] for row in story.list_jobs()] == ["single"]
    rows = story.list_jobs(batch="b")
    assert [(row["line"], row["id"]) for row in rows] == [(2, "l2"), (1, "l1"), (0, "l0")]
    ident = story.ask(ListJobs(batch="nosuch"))
    story.settle()
    assert story.answer(ident)["code"] == "unknown_job"


def test_batches_are_listed_in_pages(story: BatchStory) -> None:
    for number in range(5):
        story.submit_batch(f"b{number}", prompts(1))
        story.pass_time(0.1)
    keys, before = [], ""
    while True:
        ident = story.ask(ListBatches(before=before, limit=2))
        story.settle()
        answer = story.answer(ident)
        keys += [row["key"] for row in answer["batches"]]
        before = answer["next"]
        if not before:
            break
    assert keys == ["b4", "b3", "b2", "b1", "b0"]


def test_files_are_sent_read_listed_and_deleted(story: BatchStory) -> None:
    data = jsonl(prompts(20_000))
    story.put("f", data)
    read = b""
    while True:
        ident = story.ask(ReadFile(KeyName("f"), len(read)))
        story.settle()
        part = next(tell.message for tell in story.told if tell.header.id == ident)
        if not part.blobs()[0]:
            break
        read += part.blobs()[0]
    assert read == data
    ident = story.ask(ListFiles())
    story.settle()
    (row,) = story.answer(ident)["files"]
    assert (row["key"], row["size"], row["complete"]) == ("f", len(data), True)
    ident = story.ask(PutFile(KeyName("f"), 0, b"other", last=True))
    story.settle()
    assert story.answer(ident)["code"] == "duplicate_id"
    foreign = story.ask(AboutFile(files.READ, KeyName("f")), owner=BOB)
    story.settle()
    assert story.answer(foreign)["code"] == "unknown_job"
    deleted = story.ask(AboutFile(files.DELETE, KeyName("f")))
    again = story.ask(AboutFile(files.READ, KeyName("f")))
    story.settle()
    assert story.answer(deleted)["size"] == len(data)
    assert story.answer(again)["code"] == "unknown_job"


def test_a_file_that_lines_are_read_from_is_not_deleted(story: BatchStory) -> None:
    story.submit_batch("b", prompts(5000))
    ident = story.ask(AboutFile(files.DELETE, KeyName("b")))
    story.settle()
    assert "cancel the batch first" in story.answer(ident)["message"]


def test_a_batch_of_a_file_that_is_not_complete_is_refused(story: BatchStory) -> None:
    story.ask(PutFile(KeyName("f"), 0, b"x", last=False))
    ident = story.ask(SubmitBatch(KeyName("b"), "f"))
    story.settle()
    assert "is not complete" in story.answer(ident)["message"]
