"""Webhook notices of batches: one for each end, with outcome, counts and files of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Post
from mlxpool.broker.jobs.notices import FIRST_DELAY
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept.batch_lines import BadLine, parse_line
from mlxpool.common.protocol.kept.batch_messages import SubmitBatch
from mlxpool.common.protocol.kept.file_messages import KeyName
from mlxpool.common.protocol.kept.job_messages import Notify
from mlxpool.common.web_targets import Allowed
from support.batch_harness import BatchStory, prompts
from support.stored_jobs import StoredJobs

HOST = "https://hooks.example.org"
NOTIFY = Notify.parse({"url": f"{HOST}/batches"})
FILES = {"output_file": "file-o", "error_file": "file-e"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


@pytest.fixture
def story(store: StoredJobs) -> BatchStory:
    return telling(BatchStory(store))


def telling(story: BatchStory) -> BatchStory:
    allowed = Allowed.of([HOST], [])
    story.policy = replace(story.policy, notify_allowed=allowed, notify_for=600.0)
    return story


def told(post: Post) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(post.body)
    assert event["id"] == post.id and event["object"] == "event"
    return event


def posted(story: BatchStory, post: Post, delivered: bool = True, **fields: Any) -> None:
    story.tell_manager(ev.Posted(post.end_seq, delivered, **fields))
    story.settle()


def test_the_end_of_a_batch_is_told_once_and_its_lines_are_not(story: BatchStory) -> None:
    row = story.submit_batch("b", prompts(5), notify=NOTIFY, **FILES)
    assert (row["notify"], row["notice"], row["outcome"]) == (f"{HOST}/batches", "", "")
    story.work_off(story.ready_worker(sequences=4))
    (post,) = story.posts
    event = told(post)
    row = story.batch("b")
    assert (row["state"], row["outcome"], row["notice"]) == ("done", "completed", "waiting")
    assert (post.url, event["type"]) == (f"{HOST}/batches", "batch.completed")
    assert event["created_at"] == int(row["ended"]) and event["timestamp"].endswith("Z")
    assert event["data"] == {
        "id": "b", "key": "b", "batch": row["batch"].hex(), "tenant": "", "state": "done",
        "lines": 5, "done": 5, "cancelled": 0, "dead": 0, "expired": 0, "failed": 0,
        "output_file_id": "file-o", "error_file_id": None, "end_seq": post.end_seq,
    }  # fmt: skip
    posted(story, post)
    assert story.batch("b")["notice"] == "delivered"
    story.pass_time(30.0)
    assert len(story.posts) == 1


def test_a_batch_without_a_url_is_told_to_that_of_the_pool(story: BatchStory) -> None:
    story.submit_batch("quiet", prompts(1))
    story.policy = replace(story.policy, notify_url=f"{HOST}/pool")
    story.submit_batch("b", prompts(3))
    story.work_off(story.ready_worker(sequences=4))
    assert [(post.url, told(post)["data"]["key"]) for post in story.posts] == [
        (f"{HOST}/pool", "b")
    ]


def test_a_cancelled_batch_is_told(story: BatchStory) -> None:
    worker = story.ready_worker(sequences=2)
    story.submit_batch("b", prompts(10), notify=NOTIFY, **FILES)
    story.pass_time(0.5)
    worker.end(next(iter(worker.runs)), count=2)
    story.settle()
    story.about_batch(messages.CANCEL, "b")
    story.pass_time(1.0)
    (event,) = map(told, story.posts)
    data = event["data"]
    assert (event["type"], data["state"]) == ("batch.cancelled", "cancelled")
    assert (data["done"], data["cancelled"], data["lines"]) == (1, 9, 10)
    assert (data["output_file_id"], data["error_file_id"]) == ("file-o", "file-e")


def test_a_batch_that_expires_is_told(story: BatchStory) -> None:
    story.submit_batch("b", prompts(3), notify=NOTIFY, deadline_ms=2000, **FILES)
    story.pass_time(5.0)
    (event,) = map(told, story.posts)
    assert (event["type"], event["data"]["expired"]) == ("batch.expired", 3)
    assert (event["data"]["output_file_id"], event["data"]["error_file_id"]) == (None, "file-e")
    assert story.batch("b")["outcome"] == "expired"


def test_a_batch_of_which_no_line_can_be_a_job_has_failed(story: BatchStory) -> None:
    story.submit_batch("b", [b"{", b"["], notify=NOTIFY)
    story.submit_batch("mixed", [b"{", *prompts(1)], notify=NOTIFY)
    story.work_off(story.ready_worker(sequences=4))
    types = {told(post)["data"]["key"]: told(post)["type"] for post in story.posts}
    assert types == {"b": "batch.failed", "mixed": "batch.completed"}
    assert story.batch("b")["outcome"] == "failed"


def test_a_batch_that_is_tried_again_is_told_of_again(story: BatchStory) -> None:
    """A retry drops the notice of the batch's first end, unless it was delivered."""
    worker = story.ready_worker(sequences=4)
    story.submit_batch("b", prompts(2), notify=NOTIFY)
    story.pass_time(0.5)
    for id in list(worker.runs):
        worker.fail(id, "bad_request")
    story.pass_time(1.0)
    (first,) = story.posts
    assert told(first)["data"]["dead"] == 2
    story.about_batch(messages.RETRY, "b")
    assert story.batch("b")["notice"] == ""
    posted(story, first, delivered=False, why="HTTP 500")
    worker.credit()
    story.work_off(worker)
    second = story.posts[-1]
    assert told(second)["data"]["done"] == 2 and second.id != first.id and len(story.posts) == 2
    posted(story, second)
    story.pass_time(2 * FIRST_DELAY)
    assert len(story.posts) == 2 and story.store.ask_outbox() == 0


@pytest.mark.parametrize("at", ["ended jobs", "end", "post", "answer"])
def test_a_broker_that_is_killed_at_any_step_tells_the_end(store: StoredJobs, at: str) -> None:
    """The notice arrives at least once, always with the same id and the same bytes."""
    story = telling(BatchStory(store))
    story.submit_batch("b", prompts(2), notify=NOTIFY)
    worker = story.ready_worker(sequences=4)
    story.pass_time(0.5)
    for id in list(worker.runs):
        worker.tokens(id, 1)
        worker.end(id, count=1)
    if at == "ended jobs":  # the ends of the jobs are committed, the end of the batch is not
        story.drain()
        story.store.commit()
    else:
        story.settle()
        story.pass_time(1.0)
        assert len(story.posts) == 1
    before = [(post.id, post.body) for post in story.posts]
    if at == "answer":  # the notice was delivered, but the disk has no record of it
        story.tell_manager(ev.Posted(story.posts[0].end_seq, True))
    following = telling(story.restart())
    following.pass_time(3.0)
    (again,) = following.posts
    assert not before or [(again.id, again.body)] == before
    assert told(again)["type"] == "batch.completed" and told(again)["data"]["done"] == 2
    posted(following, again)
    telling(following.restart()).pass_time(3.0)
    assert following.store.ask_outbox() == 0


def test_a_released_batch_is_told_of_as_it_ended(story: BatchStory) -> None:
    story.submit_batch("b", prompts(2), notify=NOTIFY, **FILES)
    story.work_off(story.ready_worker(sequences=4))
    (post,) = story.posts
    posted(story, post, delivered=False, why="HTTP 500")
    assert story.about_batch(messages.RELEASE, "b")["notice"] == "waiting"
    story.pass_time(2.0)
    assert story.batch("b")["state"] == "gone" and len(story.posts) == 1
    story.pass_time(FIRST_DELAY)
    again = story.posts[-1]
    assert len(story.posts) == 2 and (again.id, again.body) == (post.id, post.body)


def test_a_notice_that_is_given_up_is_seen_in_the_batch(story: BatchStory) -> None:
    story.submit_batch("b", prompts(1), notify=NOTIFY)
    story.work_off(story.ready_worker(sequences=4))
    posted(story, story.posts[0], delivered=False, why="HTTP 410", final=True)
    assert story.batch("b")["notice"] == "given_up"


def test_a_url_of_another_host_is_refused_unless_the_batch_is_known(story: BatchStory) -> None:
    bad = Notify.parse({"url": "https://other.example/"})
    refused = story.submit_batch("b", prompts(1), notify=bad)
    assert refused["code"] == "bad_request" and "job_notify_hosts" in refused["message"]
    assert story.batch("b")["code"] == "unknown_job"
    first = story.submit_batch("b", prompts(1), notify=NOTIFY)
    story.policy = replace(story.policy, notify_allowed=Allowed.of([], []))
    assert story.submit_batch("b", prompts(1), notify=NOTIFY)["batch"] == first["batch"]


def test_a_line_with_a_url_is_refused_by_name(story: BatchStory) -> None:
    with pytest.raises(BadLine, match="notify is of the batch"):
        parse_line(b'{"model": "m", "prompt": "x", "notify": {"url": "https://a.example"}}', {})
    with pytest.raises(BadRequest, match="defaults can have"):
        SubmitBatch.parse({"key": "b", "file": "b", "defaults": {"notify": {"url": HOST}}})
    lines = [{"prompt": "x", "notify": {"url": HOST}}, *prompts(1)]
    story.submit_batch("b", lines)
    story.work_off(story.ready_worker(sequences=4))
    assert not story.posts
    failed = story.outcomes("b")[0]
    assert (
        failed["state"] == "failed" and "notify is of the batch" in failed["end"]["body"]["message"]
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"notify": "https://a.example"}, "notify must be"),
        ({"notify": {"url": "ftp://a.example/"}}, "notify.url"),
        ({"output_file": 5}, "output_file"),
        ({"error_file": "x" * 300}, "error_file"),
    ],
)
def test_a_submission_of_another_form_is_refused(body: dict[str, Any], what: str) -> None:
    with pytest.raises(BadRequest, match=what):
        SubmitBatch.parse({"key": "b", "file": "b", **body})


def test_a_submission_is_parsed_as_it_is_sent() -> None:
    message = SubmitBatch(
        KeyName("b"), "b", notify=NOTIFY, output_file="file-o", error_file="file-e"
    )
    assert SubmitBatch.parse(message.body()) == message
