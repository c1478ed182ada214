"""A client sends the same request again, with the ids that it has."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.requests.request import RequestState
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_harness import (
    BOB,
    ENTROPY,
    START,
    Story,
    X,
    body_of,
)


def again(story: Story, have: int = 0, **body: Any) -> None:
    """Sends X a second time, with `have` of its ids."""
    resume = {"count": have, **body.pop("resume", {})}
    story.generate(
        X, attempt=body.pop("attempt", 2), resume=resume, blobs=[pack_ids(range(have))], **body
    )


def test_a_take_over_keeps_what_the_stream_is(story: Story) -> None:
    worker = story.ready_worker(digest="d")
    story.generate(X)
    arrival = story.request(X).arrival
    worker.tokens(X, 2, facts={"digest": "d", "prompt_tokens": 3})
    story.later(1)
    again(story, 1, link=2, resume={"facts": {"digest": "forged"}, "seed": 99})
    after = story.request(X)
    run = after.run
    assert (run.seed, after.arrival, after.accepted_at) == (ENTROPY, arrival, START)
    assert run.facts is not None and run.facts.raw == {"digest": "d", "prompt_tokens": 3}
    assert (run.tries, run.taken, after.reader.sent) == (2, 1, 1)
    story.assert_sent(2, "accepted", seed=ENTROPY, link=2)
    worker.end(X, count=2)
    body = body_of(story.assert_ended(X, "stop", attempt=2))
    assert body["attempts"] == 2
    assert body["timings_ms"]["total"] == 1000.0
    assert story.heard[X, 2].ids == [1, 2]


def test_the_first_connection_is_told_nothing_of_a_take_over(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    again(story, 2, link=2)
    assert {action.link for action in story.to_client()} == {2}
    worker.tokens(X, 3)
    assert {action.link for action in story.to_client()} == {2}
    assert story.ack(X, 2, link=1) == story.ack(X, 99, link=1) == []
    for _ in range(12):  # longer than client_grace; the first connection is silent
        story.hear(2)
        story.later(1)
    assert story.request(X).live
    story.cancel(X, link=1)
    story.assert_sent(1, "fate", id=X, state="streaming")
    story.assert_sent(2, "done", id=X, attempt=2, reason="cancelled")


def test_the_first_connection_takes_its_stream_back_with_a_higher_attempt(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    again(story, 2, link=2)
    worker.tokens(X, 1)
    again(story, 2, link=1, attempt=3)
    story.assert_sent(1, "accepted", id=X, attempt=3)
    worker.end(X, count=2)
    story.assert_ended(X, "stop", attempt=3)
    assert story.heard[X, 3].ids == [2, 3]
    assert story.heard[X, 2].ended is None


def test_nothing_unread_of_the_old_sending_is_sent_twice(story: Story) -> None:
    worker, _ = story.running(request=X, window=1)
    worker.tokens(X, 1)
    worker.tokens(X, 3)
    again(story, 1, link=2)
    assert story.to_client("delta") == []
    worker.tokens(X, 1)
    story.assert_sent(2, "delta", pos=1, n=1)


def test_a_take_over_keeps_losses_and_charges(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 1)
    worker.die("exit code 3", own=True, prefill=X)
    again(story, 1)
    run = story.request(X).run
    assert (run.charge, run.batch_bound, run.resumes_without_progress) == (1.0, 1, 1)
    story.ready_worker().die("exit code 3", own=True)
    story.assert_ended(X, "poisoned", attempt=2)


def test_the_greater_count_of_resumes_holds(story: Story) -> None:
    story.generate(X)
    again(story, resume={"resumes": 2})
    again(story, attempt=3, resume={"resumes": 1})
    assert story.request(X).run.resumes_without_progress == 2


@pytest.mark.parametrize("ids", [[7], [0, 2], [0, 1, 2]])
def test_ids_that_are_not_those_of_the_stream_are_refused(story: Story, ids: list[int]) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    other = story.generate(link=2)
    story.generate(X, attempt=2, resume={"count": len(ids)}, blobs=[pack_ids(ids)])
    frame = story.assert_refused("bad_request", f"the {len(ids)} ids of resume", "2 ids; send")
    assert frame.header.attempt == 2
    assert worker.cancelled == [(X, 1)]
    worker.end(other)
    story.assert_ended(other, "stop")
    story.assert_conserved()


def test_a_longer_resume_than_max_tokens_is_refused(story: Story) -> None:
    again(story, 4, options={"max_tokens": 3})
    story.assert_refused("bad_request", "resume has 4 ids, max_tokens is 3")
    assert not story.core.state.requests


def test_a_lower_attempt_changes_nothing(story: Story) -> None:
    worker, _ = story.running(request=X, attempt=3)
    worker.tokens(X, 2)
    again(story, 0, link=2)
    assert story.last == []
    worker.end(X)
    story.assert_ended(X, "stop", attempt=3)


@pytest.mark.parametrize("change", [{"owner": BOB}, {"prompt": "other"}, {"priority": 2}])
def test_another_owner_or_payload_touches_nothing(story: Story, change: dict[str, Any]) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    again(story, 2, link=2, **change)
    frame = story.assert_sent(2, "error", code="duplicate_id", about=X)
    assert frame.header.id is None
    worker.end(X)
    story.assert_ended(X, "stop")


def test_queue_ms_and_first_token_ms_hold_for_the_first_sending_alone(story: Story) -> None:
    worker, _ = story.running(request=X, queue_ms=100, first_token_ms=2000)
    worker.tokens(X, 1)
    worker.die()
    story.generate(X, attempt=2, first_token_ms=2000, queue_ms=100)
    for _ in range(5):
        story.hear()
        story.later(1)
    assert story.request(X).live


def test_a_take_over_waits_while_its_old_run_holds_the_last_credit(story: Story) -> None:
    worker, _ = story.running(sequences=1, request=X)
    worker.tokens(X, 2)
    old = worker.runs[X]
    again(story, 2)
    assert story.request(X).state is RequestState.QUEUED
    worker.say(Delta(X, old.attempt, 2, "", b"", end={"reason": "cancelled"}))
    assert story.to_client() == []
    del worker.runs[X]
    worker.credit()
    assert worker.runs[X].pos == 2
    assert worker.runs[X].attempt != old.attempt


def test_a_refused_sending_ends_the_stream_on_its_new_link(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 1)
    worker.die()
    story.core.state.registry.models["m"].failures = 5
    story.model().retry_at = story.now + 10
    again(story, 1, link=2)
    story.assert_sent(2, "error", id=X, attempt=2, code="model_unavailable")
    assert not story.core.state.requests
    story.assert_conserved()


def test_a_loss_after_a_take_over_in_the_same_worker_counts_once(story: Story) -> None:
    """The worker dies with the old and the new run of a request: this is one loss, not two."""
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    again(story, 2)
    assert worker.runs[X].pos == 2
    worker.die("exit code 1", own=True)
    assert (story.request(X).run.resumes_without_progress, story.request(X).run.charge) == (1, 1.0)
    story.ready_worker().end(X)
    story.assert_ended(X, "stop", attempt=2)
    story.assert_idle()
