"""Several `generate` with the same id, and cancels."""

from __future__ import annotations

import pytest

from mlxpool.broker.requests.request import RequestState
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol.to_client import Fate
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_harness import (
    BOB,
    OWNER,
    Story,
    X,
    body_of,
    request_id,
)

# ---- the same id again ---------------------------------------------------------------------------


def about_duplicate(story: Story, *words: str, link: int = 1) -> None:
    frame = story.assert_sent(link, "error", code="duplicate_id", about=X)
    assert frame.header.id is None, "it must end no stream"
    assert all(word in body_of(frame)["message"] for word in words)


def test_an_id_with_another_payload_is_a_duplicate(story: Story) -> None:
    story.generate(X, prompt="one")
    story.generate(X, prompt="two", attempt=2)
    about_duplicate(story, "in use by another request")
    assert story.request(X).attempt == 1


def test_an_id_of_another_owner_is_a_duplicate(story: Story) -> None:
    story.generate(X)
    story.generate(X, attempt=2, owner=BOB, link=2)
    about_duplicate(story, link=2)
    assert story.request(X).owner == OWNER


def test_an_equal_attempt_is_accepted_again(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    story.generate(X)
    story.assert_sent(1, "accepted", id=X, attempt=1)
    assert len(story.last) == 1
    worker.tokens(X)
    story.assert_sent(1, "delta", pos=2)
    assert story.core.state.counters.accepted == 1


def test_a_lower_attempt_is_dropped(story: Story) -> None:
    story.generate(X, attempt=3)
    story.generate(X, attempt=2)
    assert story.last == []
    assert story.request(X).attempt == 3


def test_a_higher_attempt_takes_over_and_stops_the_old_run(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 2)
    story.generate(X, attempt=2, link=2)
    story.assert_sent(2, "accepted", id=X, attempt=2)
    assert worker.cancelled == [(X, 1)]
    assert worker.runs[X].attempt == 2
    worker.tokens(X)
    story.assert_sent(2, "delta", pos=0)
    # Frames of the old run are dropped; the run's end frees its sequence.
    fenced = story.core.state.counters.fenced
    old = deltas.Delta(X, 1, 2, "late", pack_ids([2]))
    assert worker.say(old) == []
    worker.say(deltas.Delta(X, 1, 3, "", b"", end={"reason": "cancelled"}))
    assert story.core.state.counters.fenced == fenced, "the place was still known"
    worker.end(X)
    story.assert_ended(X, "stop", attempt=2)
    assert story.core.state.counters.accepted == 1
    story.assert_conserved()
    story.assert_idle()


def test_a_take_over_of_a_queued_request_leaves_one_in_the_queue(story: Story) -> None:
    story.generate(X)
    story.generate(X, attempt=2)
    assert [r.attempt for r in story.model().queue] == [2]
    worker = story.ready_worker()
    worker.end(X)
    story.assert_ended(X, "stop", attempt=2)
    story.assert_idle()


def test_a_take_over_passes_a_full_queue() -> None:
    story = Story(queue_limit=1)
    story.generate(X)
    story.generate(X, attempt=2)
    story.assert_sent(1, "accepted", attempt=2)


def test_a_take_over_goes_on_from_the_ids_the_client_has(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 3)
    story.generate(
        X, attempt=2, link=2, resume={"count": 2, "facts": {"a": 1}}, blobs=[pack_ids([0, 1])]
    )
    story.assert_sent(2, "accepted", attempt=2)
    run = worker.runs[X]
    assert (run.attempt, run.pos, run.blobs) == (2, 2, (pack_ids([0, 1]),))
    worker.tokens(X)
    story.assert_sent(2, "delta", pos=2)


def test_an_equal_attempt_of_an_ended_id_is_refused(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.end(X)
    story.generate(X)
    about_duplicate(story, "has ended: done")
    story.generate(X, prompt="other", attempt=2)
    about_duplicate(story)


def test_a_higher_attempt_of_an_ended_id_runs_again(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.end(X, count=2)
    story.generate(X, attempt=2)
    story.assert_sent(1, "accepted", attempt=2)
    worker.end(X, count=2)
    assert story.heard[X, 2].ids == [0, 1]
    assert story.core.state.counters.accepted == 2
    story.assert_conserved()


def test_tombstones_are_forgotten_in_time(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.end(X)
    assert story.core.state.tombstones
    story.later(601)
    assert not story.core.state.tombstones
    story.cancel(X)
    story.assert_sent(1, "fate", state="unknown", pos=0)


def test_tombstones_are_bounded(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.broker.core.ended_requests.MAX_TOMBSTONES", 3)
    worker = story.ready_worker()
    for _ in range(5):
        worker.end(story.generate())
        worker.credit()
    assert list(story.core.state.tombstones) == [request_id(n) for n in (3, 4, 5)]


# ---- cancel --------------------------------------------------------------------------------------


def test_a_cancel_ends_a_queued_request(story: Story) -> None:
    request = story.generate()
    story.cancel(request)
    story.assert_sent(1, "fate", id=request, state="queued", pos=0)
    story.assert_sent(1, "done", id=request, reason="cancelled")
    story.assert_idle()
    story.assert_conserved()


def test_a_cancel_ends_an_assigned_request(story: Story) -> None:
    worker, request = story.running()
    story.cancel(request)
    story.assert_sent(1, "fate", state="assigned", pos=0)
    story.assert_sent(1, "done", reason="cancelled", pos=0)
    assert worker.cancelled == [(request, 1)]


def test_a_cancelled_run_keeps_its_lease_until_the_worker_confirms(story: Story) -> None:
    worker, request = story.running(sequences=1)
    worker.tokens(request, 3)
    story.cancel(request)
    story.assert_sent(1, "fate", state="streaming", pos=3)
    body = body_of(story.assert_sent(1, "done", reason="cancelled", pos=3))
    assert body["usage"]["completion_tokens"] == 3
    waiting = story.generate()
    assert story.request(waiting).state is RequestState.QUEUED
    worker.tokens(request)
    assert story.to_client() == [], "nothing after the terminal"
    worker.confirm(request)
    assert story.to_client() == []
    worker.credit()
    assert waiting in worker.runs


def test_a_cancel_after_the_end_changes_nothing(story: Story) -> None:
    worker, request = story.running()
    worker.end(request, count=2)
    story.cancel(request)
    story.assert_sent(1, "fate", id=request, state="done", pos=2)
    assert len(story.last) == 1


def test_a_second_cancel_is_answered_with_cancelled(story: Story) -> None:
    request = story.generate()
    story.cancel(request)
    story.cancel(request)
    story.assert_sent(1, "fate", state="cancelled")
    assert story.to_client("done") == []


def test_a_cancel_of_an_unknown_id_is_answered_with_unknown(story: Story) -> None:
    story.cancel(X)
    story.assert_sent(1, "fate", id=X, state="unknown", pos=0)


def test_a_cancel_by_another_owner_is_answered_with_unknown(story: Story) -> None:
    _worker, request = story.running()
    story.cancel(request, link=2, owner=BOB)
    story.assert_sent(2, "fate", state="unknown", pos=0)
    assert story.request(request).live
    story.cancel(request)
    story.cancel(request, link=2, owner=BOB)
    story.assert_sent(2, "fate", state="unknown")


def test_the_admin_may_cancel_anything(story: Story) -> None:
    _worker, request = story.running()
    assert story.core.ended.fate(request) == Fate("assigned", 0)
    story.cancel(request, link=None, owner=None)
    assert story.to_client("fate") == []
    story.assert_sent(1, "done", reason="cancelled")


def test_the_fate_of_a_request_is_hidden_from_other_owners(story: Story) -> None:
    request = story.generate()
    assert story.core.ended.fate(request, BOB).state == "unknown"
    assert story.core.ended.fate(request, OWNER).state == "queued"
