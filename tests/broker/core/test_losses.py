"""Streams of a lost worker are resumed elsewhere, or fail with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import RequestEnded
from mlxpool.broker.requests.request import RequestState
from mlxpool.broker.workers.worker import PROVEN_TOKENS
from mlxpool.common.protocol.token_ids import pack_ids
from support.core_harness import (
    Story,
    body_of,
    model,
)

# ---- resume --------------------------------------------------------------------------------------


def test_a_stream_goes_on_in_the_next_worker(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2, facts={"digest": "d", "prompt_tokens": 3, "now": 5})
    worker.die()
    assert story.to_client() == []
    assert story.request(request).state is RequestState.QUEUED
    again = story.ready_worker(digest="d")
    run = again.runs[request]
    assert run.body["resume"] == {
        "count": 2,
        "resumes": 1,
        "facts": {"digest": "d", "prompt_tokens": 3, "now": 5},
    }
    assert run.blobs == (pack_ids([0, 1]),)
    assert run.attempt == 2
    again.end(request, count=1)
    story.assert_sent(1, "done", pos=3, attempts=2)
    assert story.heard[request, 1].ids == [0, 1, 2]
    assert story.core.state.counters.resumed == 1
    story.assert_idle()
    story.assert_conserved()


def test_a_stream_without_a_token_begins_again(story: Story) -> None:
    worker, request = story.running(options={"seed": 7})
    worker.die()
    run = story.ready_worker().runs[request]
    assert "resume" not in run.body
    assert run.blobs == ()
    assert run.body["seed"] == 7


def test_the_resume_follows_the_prompts_blob(story: Story) -> None:
    worker, request = story.running(prompt=True, blobs=[b"long"])
    worker.tokens(request, 2)
    worker.die()
    assert story.ready_worker().runs[request].blobs == (b"long", pack_ids([0, 1]))


def test_ids_behind_a_shut_window_are_not_made_again(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 3)
    assert story.request(request).reader.sent == 1
    worker.die()
    again = story.ready_worker()
    assert again.runs[request].blobs == (pack_ids([0, 1, 2, 3]),)
    assert again.tokens(request, 1) == []
    story.ack(request, 1)
    story.assert_sent(1, "delta", pos=1, n=4, text="<1><2><3><4>")


def test_a_loss_ends_no_stream_elsewhere(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    requests = [story.generate(link=n) for n in (1, 2, 3)]
    for request in requests[:2]:
        worker.tokens(request, 2)
    elsewhere = story.ready_worker("other")
    other = story.generate(name="other", link=4)
    worker.die()
    assert story.to_client() == []
    elsewhere.end(other)
    story.assert_ended(other, "stop")
    again = story.ready_worker()
    for request in requests:
        again.end(request)
        story.assert_ended(request, "stop")
    story.assert_conserved()


def test_resumed_requests_go_before_fresh_ones(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    first, second, waiting = (story.generate() for _ in range(3))
    worker.tokens(second, 1)
    worker.die()
    again = story.ready_worker(sequences=1)
    order = []
    for _ in range(3):
        (request,) = again.runs
        order.append(request)
        again.end(request)
        again.credit()
    assert order == [first, second, waiting]


def test_a_ready_replica_resumes_a_lost_stream_at_once() -> None:
    story = Story({"m": model(replicas=2)})
    worker, other = story.ready_worker(sequences=2), story.ready_worker(sequences=1, replica=1)
    request = story.generate()
    worker.tokens(request, 2)
    worker.die()
    assert other.runs[request].pos == 2


def test_a_worker_with_another_digest_or_a_smaller_context_is_passed_over() -> None:
    story = Story({"m": model(replicas=4)})
    first = story.ready_worker(digest="d")
    request = story.generate()
    first.tokens(request, 1, facts={"digest": "d", "context": 2048})
    story.workers["m/1"].hello(digest="e").credit(4)
    story.workers["m/2"].hello(digest="d", context=1024).credit(4)
    story.workers["m/3"].hello(digest="d", context=4096).credit(1)
    first.die()
    assert request in story.workers["m/3"].runs


@pytest.mark.parametrize("hello", [{"digest": "e"}, {"digest": "d", "context": 1024}])
def test_a_stream_cannot_go_on_with_another_model(story: Story, hello: dict[str, Any]) -> None:
    worker, request = story.running()
    worker.tokens(request, 2, facts={"digest": "d", "context": 2048})
    worker.die()
    fresh = story.generate(link=2)
    again = story.ready_worker(**hello)
    body = body_of(story.assert_ended(request, "model_unavailable"))
    assert "digest d" in body["message"] and "context 2048" in body["message"]
    again.end(fresh)
    story.assert_ended(fresh, "stop")
    story.assert_idle()


def test_a_resume_for_a_model_that_has_changed_is_told_at_once(story: Story) -> None:
    story.ready_worker(digest="e")
    request = story.generate(
        attempt=2, resume={"count": 1, "facts": {"digest": "d"}}, blobs=[pack_ids([0])]
    )
    story.assert_ended(request, "model_unavailable", attempt=2)
    story.assert_idle()


# ---- how often -----------------------------------------------------------------------------------


def test_the_third_loss_in_a_row_without_a_token_ends_the_stream(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    for resumes in (1, 2):
        worker.die()
        worker = story.ready_worker()
        assert worker.runs[request].body["resume"]["resumes"] == resumes
    worker.die("killed by SIGKILL")
    frame = story.assert_sent(1, "error", id=request, code="worker_lost", pos=2, retryable=True)
    assert "loss 3 in a row" in body_of(frame)["message"]
    assert body_of(frame)["details"] == {
        "worker": "m/0",
        "cause": "killed by SIGKILL",
        "tokens": 2,
    }
    story.assert_idle()
    story.assert_conserved()


def test_losses_with_a_token_between_them_do_not_count() -> None:
    story = Story(restart_limit=100)
    worker, request = story.running()
    for _ in range(7):
        worker.tokens(request, 1)
        worker.die()
        worker = story.ready_worker()
    worker.end(request)
    assert body_of(story.assert_ended(request, "stop"))["attempts"] == 8


def test_text_without_an_id_counts_as_no_progress(story: Story) -> None:
    worker, request = story.running()
    for _ in range(2):
        worker.tokens(request, 0, text="")
        worker.die()
        worker = story.ready_worker()
    worker.die()
    story.assert_ended(request, "worker_lost")


def test_resumes_under_earlier_brokers_count(story: Story) -> None:
    request = story.generate(
        attempt=3, resume={"count": 1, "resumes": 2, "seed": 5}, blobs=[pack_ids([0])]
    )
    story.assert_sent(1, "accepted", seed=5)
    worker = story.ready_worker()
    worker.die()
    story.assert_ended(request, "worker_lost", attempt=3)


def test_a_token_in_a_drained_run_counts_as_progress(story: Story) -> None:
    worker, request = story.running()
    for _ in range(2):
        worker.die()
        worker = story.ready_worker()
    worker.tokens(request, 1)
    story.do(ev.StartDrain("m/0", None, 0.0))
    story.later(0)
    worker.give_back()
    worker.die("drained")
    story.ready_worker().die()
    assert story.request(request).run.resumes_without_progress == 1


def test_a_stream_that_is_not_durable_ends_with_its_worker(story: Story) -> None:
    worker, request = story.running(durable=False)
    worker.tokens(request, 2)
    worker.die("killed by SIGKILL")
    frame = story.assert_sent(1, "error", id=request, code="worker_lost", pos=2, retryable=True)
    assert "killed by SIGKILL" in body_of(frame)["message"]
    assert "send the request again" in body_of(frame)["message"]
    story.assert_idle()
    story.assert_conserved()


def test_what_waits_goes_out_before_the_error_of_a_lost_worker(story: Story) -> None:
    worker, request = story.running(window=1, durable=False)
    worker.tokens(request, 1)
    worker.tokens(request, 5)
    worker.die()
    story.assert_sent(1, "error", code="worker_lost", pos=6)
    assert story.heard[request, 1].ids == list(range(6))


def test_a_cancel_between_two_workers_ends_the_stream(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    worker.die()
    story.cancel(request)
    story.assert_sent(1, "fate", state="queued", pos=2)
    story.assert_sent(1, "done", reason="cancelled", pos=2)
    assert not story.ready_worker().runs
    story.assert_idle()


def test_a_cancelled_run_is_not_resumed_after_a_loss(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    story.cancel(request)
    worker.die()
    assert not story.ready_worker().runs
    story.assert_idle()


def test_a_deadline_between_two_workers_ends_the_stream(story: Story) -> None:
    worker, request = story.running(deadline_ms=500)
    worker.die()
    story.later(0.5)
    story.assert_ended(request, "deadline_exceeded")
    story.assert_idle()


@pytest.mark.parametrize(("tokens", "failures"), [(PROVEN_TOKENS - 1, 1), (PROVEN_TOKENS, 0)])
def test_a_worker_that_made_tokens_did_not_fail_to_start(
    story: Story, tokens: int, failures: int
) -> None:
    worker, request = story.running()
    worker.tokens(request, tokens)
    worker.die()
    assert story.model().failures == failures
    assert story.started() == ([] if failures else ["m/0"])


# ---- spans ---------------------------------------------------------------------------------------


def test_an_ended_request_has_the_times_of_its_resumes() -> None:
    story = Story(traces=True)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    worker, request = story.running(traceparent=parent)
    began = story.now
    worker.tokens(request, 2)
    story.later(2)
    lost = story.now
    worker.die()
    story.later(1)
    worker = story.ready_worker()
    again = story.now
    worker.end(request, "stop")
    (ended,) = [action for action in story.last if isinstance(action, RequestEnded)]
    assert (ended.id, ended.traceparent, ended.outcome) == (request, parent, "stop")
    assert ended.accepted_at <= ended.assigned_at <= began
    assert again > lost and list(ended.resumes) == [(lost, again)]
    assert (ended.attempts, ended.tokens, ended.failed) == (2, 2, False)


def test_without_the_setting_nothing_is_told_of_an_ended_request(story: Story) -> None:
    worker, request = story.running(traceparent="00-x")
    worker.end(request, "stop")
    assert not [action for action in story.last if isinstance(action, RequestEnded)]
