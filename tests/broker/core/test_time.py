"""Deadlines, idle models and slow readers."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.models import listing
from mlxpool.broker.requests.request import RequestState
from mlxpool.broker.workers.worker import WorkerState
from support import core_events as make
from support.core_harness import (
    Story,
    X,
    body_of,
    model,
)

# ---- time ----------------------------------------------------------------------------------------


def test_a_deadline_ends_a_queued_request(story: Story) -> None:
    request = story.generate(deadline_ms=1500)
    story.later(1.4)
    assert story.to_client() == []
    story.hear()
    story.later(0.1)
    story.assert_sent(1, "error", id=request, code="deadline_exceeded")
    story.assert_idle()


def test_a_deadline_before_the_model_is_loaded_says_how_far_it_is(story: Story) -> None:
    request = story.generate(deadline_ms=1500)
    worker = story.workers["m/0"].hello()
    worker.beat(phase="load", load_progress=0.25)
    story.later(1.5)
    frame = story.assert_sent(1, "error", id=request, code="deadline_exceeded")
    body = body_of(frame)
    assert body["details"] == {"model": "m", "load_progress": 0.25}
    assert "'m' is still loading, 25% of its weights are loaded" in body["message"]


def test_a_deadline_behind_others_in_the_queue_says_nothing_of_a_load(story: Story) -> None:
    story.running(sequences=1)
    request = story.generate(deadline_ms=1500)
    story.later(1.5)
    frame = story.assert_sent(1, "error", id=request, code="deadline_exceeded")
    assert "details" not in body_of(frame)


def test_a_deadline_ends_a_stream_and_stops_its_run(story: Story) -> None:
    worker, request = story.running(deadline_ms=2000)
    worker.tokens(request, 3)
    story.later(2)
    frame = story.assert_sent(1, "error", code="deadline_exceeded", pos=3)
    assert "2.000 s" in body_of(frame)["message"] and "3 tokens" in body_of(frame)["message"]
    assert worker.cancelled == [(request, 1)]


def test_a_request_without_a_deadline_has_the_pools() -> None:
    story = Story(deadline=5.0)
    request = story.generate()
    story.later(5)
    story.assert_ended(request, "deadline_exceeded")


def test_queue_ms_counts_only_in_the_queue(story: Story) -> None:
    worker, running = story.running(sequences=1, queue_ms=500)
    waiting = story.generate(queue_ms=500)
    story.later(0.5)
    frame = story.assert_sent(1, "error", id=waiting, code="deadline_exceeded")
    assert "queue_ms" in body_of(frame)["message"]
    worker.end(running)
    story.assert_ended(running, "stop")


def test_an_idle_model_is_unloaded() -> None:
    story = Story({"m": model(keep_alive=60)})
    worker, request = story.running()
    story.hear()
    worker.end(request)
    worker.credit()
    story.later(59)
    assert not worker.stopped
    story.later(1)
    assert story.stopped() == ["m/0"]
    assert worker.state is WorkerState.STOPPING
    worker.die("stopped")
    story.later(100)
    assert story.started() == []
    assert listing.rows(story.core.state.registry, story.now)[0]["state"] == "cold"


def test_a_request_keeps_a_model_alive() -> None:
    story = Story({"m": model(keep_alive=60)})
    worker = story.ready_worker()
    story.later(59)
    request = story.generate()
    worker.end(request)
    worker.credit()
    story.later(59)
    assert not worker.stopped
    story.later(1)
    assert worker.stopped


def test_a_cancelled_run_keeps_a_model_alive_until_it_is_confirmed() -> None:
    story = Story({"m": model(keep_alive=1)})
    worker, request = story.running()
    story.cancel(request)
    story.later(5)
    assert not worker.stopped
    worker.confirm(request)
    worker.credit()
    story.later(1)
    assert worker.stopped


@pytest.mark.parametrize(("keep_alive", "stopped"), [(-1.0, False), (0.0, True)])
def test_keep_alive_below_zero_is_for_ever_and_zero_unloads_at_once(
    keep_alive: float, stopped: bool
) -> None:
    story = Story({"m": model(keep_alive=keep_alive)})
    request = story.generate()
    worker = story.ready_worker()
    worker.end(request)
    worker.credit()
    story.later(0 if stopped else 10**7)
    assert worker.stopped is stopped


def test_a_request_for_a_draining_model_starts_it_again() -> None:
    story = Story({"m": model(keep_alive=1)})
    worker = story.ready_worker()
    story.later(1)
    assert worker.stopped
    request = story.generate()
    assert story.started() == [], "two never hold the weights together"
    worker.die("stopped")
    assert story.started() == ["m/0"]
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


# ---- slow readers --------------------------------------------------------------------------------


def test_behind_a_shut_window_deltas_merge_until_an_ack(story: Story) -> None:
    worker, request = story.running(window=4)
    worker.tokens(request, 4)
    story.assert_sent(1, "delta", pos=0, n=4)
    for _ in range(3):
        assert worker.tokens(request, 2) == []
    story.ack(request, 1)
    story.assert_sent(1, "delta", pos=4, n=6, text="<4><5><6><7><8><9>")
    assert worker.tokens(request) == []
    story.ack(request, 10)
    story.assert_sent(1, "delta", pos=10, n=1)


def test_the_last_output_and_the_terminal_pass_a_shut_window(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    assert worker.tokens(request, 2) == []
    worker.end(request, count=1)
    assert [a.header.kind for a in story.to_client()] == ["delta", "done"]
    story.assert_sent(1, "done", pos=4)
    assert story.heard[request, 1].ids == [0, 1, 2, 3]


def test_logprobs_and_facts_survive_the_merging(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1, facts={"prompt_tokens": 2})
    assert body_of(story.assert_sent(1, "delta"))["facts"] == {"prompt_tokens": 2}
    for number in (1, 2):
        worker.tokens(request, 1, logprobs=[{"logprob": -number}])
    story.ack(request, 1)
    frame = story.assert_sent(1, "delta", n=2)
    assert body_of(frame)["logprobs"] == [{"logprob": -1}, {"logprob": -2}]


def test_no_ack_behind_a_shut_window_is_a_slow_consumer(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 2)
    worker.tokens(request, 2)
    for _ in range(29):
        story.later(1)
        story.hear()
    assert request in story.core.state.requests
    story.later(1)
    frame = story.assert_sent(1, "error", id=request, code="slow_consumer", pos=2)
    assert "no ack for 30 s" in body_of(frame)["message"]
    assert story.to_client("delta") == []
    assert worker.cancelled == [(request, 1)]


def test_an_ack_starts_the_grace_again(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 3)
    worker.tokens(request, 1)
    for have in (1, 2):
        for _ in range(25):
            story.later(1)
            story.hear()
        story.ack(request, have)
        assert story.to_client("delta") == []
    assert request in story.core.state.requests
    story.ack(request, 3)
    story.assert_sent(1, "delta", pos=3)


def test_an_open_window_needs_no_ack(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 3)
    for _ in range(100):
        story.later(1)
        story.hear()
    assert request in story.core.state.requests


def test_too_much_unread_is_a_slow_consumer() -> None:
    story = Story(unread_bytes=4096)
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 1, text="x" * 1000)
    assert story.to_client() == []
    worker.tokens(request, 1, text="x" * 1000)
    frame = story.assert_sent(1, "error", code="slow_consumer", pos=1)
    assert "4096" in body_of(frame)["message"]


def test_an_ack_beyond_what_was_sent_ends_no_stream(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    story.ack(request, 3)
    frame = story.assert_sent(1, "error", code="bad_request")
    assert frame.header.id is None and "about" in body_of(frame)
    assert "2 sent" in body_of(frame)["message"]
    worker.end(request)
    story.assert_ended(request, "stop")


def test_an_ack_cannot_go_back(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 5)
    story.ack(request, 4)
    assert story.to_client() == []
    story.ack(request, 3)
    assert story.assert_sent(1, "error", code="bad_request").header.id is None
    story.ack(request, 4)
    assert story.to_client() == []


@pytest.mark.parametrize("have", [None, 3, [3], [[1, 2]], [[b"x"]], [[b"x", "y"]], [[b"x", 1, 2]]])
def test_a_malformed_ack_is_answered_with_an_error(story: Story, have: Any) -> None:
    story.generate()
    story.do(make.ack(1, have))
    frame = story.assert_sent(1, "error", code="bad_request")
    assert frame.header.id is None and "about" in body_of(frame)


def test_acks_of_ended_or_foreign_streams_do_nothing(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 1)
    assert story.ack(request, 1, link=9) == []
    worker.end(request)
    assert story.ack(request, 2) == []
    assert story.ack(X, 2) == []


def test_what_waits_goes_out_before_the_terminal(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 5)
    worker.fail(request)
    story.assert_sent(1, "error", code="internal", pos=6)
    assert story.heard[request, 1].ids == list(range(6))


def test_a_request_without_a_token_in_first_token_ms_fails(story: Story) -> None:
    _worker, request = story.running(first_token_ms=1500)
    story.later(1.4)
    assert story.to_client() == []
    story.later(0.1)
    frame = story.assert_sent(1, "error", id=request, code="deadline_exceeded")
    assert "first_token_ms" in body_of(frame)["message"]
    assert not story.core.state.requests


def test_a_first_token_ends_the_bound_of_first_token_ms(story: Story) -> None:
    worker, request = story.running(first_token_ms=1500)
    worker.tokens(request, 0, text="")
    story.later(1)
    worker.tokens(request, 1)
    for _ in range(5):
        story.later(1)
        story.hear()
    assert request in story.core.state.requests


def test_queue_ms_counts_only_until_the_first_worker(story: Story) -> None:
    worker, request = story.running(queue_ms=500)
    worker.die()
    story.later(0.9)
    assert story.request(request).state is RequestState.QUEUED
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_an_idle_model_is_unloaded_though_a_replica_found_no_memory() -> None:
    story = Story({"m": model(replicas=2, keep_alive=5.0)}, needs={"m": 6}, memory=10)
    worker = story.ready_worker()
    story.later(5)
    assert worker.stopped
