"""Quotas, revoked owners and workers that connect by themselves, in the core."""

from __future__ import annotations

from msgspec.structs import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.endings import MAX_ENDED
from support import core_events as make
from support.core_harness import BOB, OWNER, FakeWorker, Story, body_of, model


def refused(story: Story, *words: str) -> int:
    """Checks that the newest request exceeded its owner's quota. Returns `retry_after_ms`."""
    body = body_of(story.assert_refused("over_quota", OWNER, *words))
    assert body["retryable"] is True
    return int(body["retry_after_ms"])


def test_live_requests_are_counted_for_each_owner() -> None:
    story = Story(quota_requests=2)
    worker = story.ready_worker()
    first = story.generate()
    story.generate(), story.generate()
    assert refused(story, "2 live requests", "at most 2", "quota_requests") > 0
    story.generate(owner=BOB, link=2)
    story.assert_sent(2, "accepted")
    worker.end(first)
    story.generate()
    story.assert_sent(1, "accepted")
    assert sum(story.core.state.owned.values()) == len(story.core.state.requests)


def test_a_later_sending_counts_as_no_second_live_request() -> None:
    story = Story(quota_requests=1)
    request = story.generate()
    story.generate(request, attempt=2)
    story.assert_sent(1, "accepted")
    assert story.core.state.owned == {OWNER: 1}


def test_every_end_of_a_request_frees_its_quota() -> None:
    story = Story(quota_requests=1)
    story.cancel(story.generate())
    assert not story.core.state.owned
    story.generate(queue_ms=100)
    story.later(1.0)
    assert not story.core.state.owned
    story.generate(name="nobody")
    assert not story.core.state.owned


def test_the_waiting_tokens_of_an_owner_are_bounded() -> None:
    story = Story(quota_tokens=300)
    story.generate(prompt="x" * 800)
    story.generate(prompt="x" * 800)
    refused(story, "201 waiting prompt tokens", "300", "quota_tokens")
    story.generate(prompt="x" * 200)
    story.assert_sent(1, "accepted")
    story.ready_worker()  # the worker takes the waiting requests
    story.generate(prompt="x" * 800)
    story.assert_sent(1, "accepted")


def test_an_owner_that_cancels_too_often_is_refused_new_requests() -> None:
    story = Story(quota_cancels=2)
    for _ in range(2):
        story.cancel(story.generate())
        story.assert_sent(1, "fate")
    story.generate()
    wait = refused(story, "more than 2 requests a second", "quota_cancels")
    story.generate(owner=BOB, link=2)
    story.assert_sent(2, "accepted")
    story.later(wait / 1000 + 0.1)
    story.generate()
    story.assert_sent(1, "accepted")


def test_a_cancel_is_always_obeyed() -> None:
    story = Story(quota_cancels=1)
    requests = [story.generate() for _ in range(4)]
    for request in requests:
        story.cancel(request)
    assert not story.core.state.requests


def test_new_limits_hold_at_once_and_for_new_requests() -> None:
    story = Story()
    story.generate(), story.generate()
    config = story.core.state.config
    story.do(ev.Reload(replace(config, quota_requests=1), story.core.state.registry.memory))
    assert len(story.core.state.requests) == 2
    story.generate()
    refused(story, "2 live requests", "at most 1")


def test_a_revoked_key_ends_the_streams_of_its_owner_alone() -> None:
    story = Story()
    worker = story.ready_worker(sequences=1)
    running, waiting = story.generate(), story.generate()
    other = story.generate(owner=BOB, link=2)
    story.do(ev.Revoked(OWNER))
    for request in (running, waiting):
        story.assert_ended(request, "unauthorized")
    assert list(story.core.state.requests) == [other]
    assert (running, 1) in worker.cancelled
    story.assert_conserved()


def test_the_many_streams_of_a_revoked_key_end_in_portions() -> None:
    story = Story()
    other = story.generate(owner=BOB, link=2)
    many = [story.generate() for _ in range(2 * MAX_ENDED + 1)]
    for number in range(3):
        story.do(ev.Wake() if number else ev.Revoked(OWNER))
        left = max(0, len(many) - (number + 1) * MAX_ENDED)
        assert len(story.core.state.requests) == 1 + left
    for request in many:
        story.assert_ended(request, "unauthorized")
    assert list(story.core.state.requests) == [other]
    story.assert_conserved()


# ---- workers that dial in ----------------------------------------------------------------------


def dial(story: Story, name: str = "m") -> FakeWorker:
    """Connects a worker of this model that the broker did not start, and lets it take work."""
    slot = story.core.state.registry.remote_slot_name(name)
    worker = story.workers.setdefault(slot, FakeWorker(story, slot))
    story.do(make.dialled(slot, name, {"context": 2048, "pid": 5}, "t"))
    return worker.credit(4)


def remote(**settings: int) -> Story:
    """A broker that starts no workers."""
    return Story({"m": model(replicas=0, **settings)})


def test_without_local_workers_nothing_is_started_and_requests_wait() -> None:
    story = remote()
    request = story.generate()
    assert story.started() == [] and story.core.state.requests
    worker = dial(story)
    assert request in worker.runs


def test_the_streams_of_a_lost_remote_worker_are_resumed_in_another() -> None:
    story = remote()
    first, second = dial(story), dial(story)
    assert (first.slot, second.slot) == ("m/0", "m/1")
    request = story.generate()
    had = first if request in first.runs else second
    had.tokens(request, 3)
    story.do(ev.WorkerExited(had.slot, "its connection ended"))
    went_on = second if had is first else first
    assert went_on.runs[request].pos == 3
    again = dial(story)
    assert again.slot == had.slot
    went_on.end(request)
    story.assert_conserved()


def test_a_remote_workers_failures_close_no_breaker() -> None:
    story = remote()
    for _ in range(20):
        worker = dial(story)
        story.do(ev.WorkerExited(worker.slot, "its connection ended"))
    story.generate()
    story.assert_sent(1, "accepted")
    assert story.core.state.registry.models["m"].failures == 0


def test_idle_time_and_want_of_memory_end_no_remote_worker() -> None:
    story = remote(keep_alive=1)
    worker = dial(story)
    request = story.generate()
    worker.end(request)
    story.later(100.0)
    assert not worker.stopped
    assert story.core.pool.memory_used() == 0


def test_a_model_that_a_worker_brings_can_be_asked_for() -> None:
    story = remote()
    story.generate(name="new")
    story.assert_refused("unknown_model")
    worker = dial(story, "new")
    assert worker.slot == "new/0"
    assert story.generate(name="new") in worker.runs


def test_a_broker_that_is_going_down_welcomes_no_worker() -> None:
    story = remote()
    story.do(ev.Shutdown())
    story.do(make.dialled("m/0", "m", {}, "t"))
    assert not story.core.state.workers


# ---- models come and go ------------------------------------------------------------------------


def test_a_removed_model_finishes_its_streams_and_is_unknown() -> None:
    story = Story()
    worker, request = story.running()
    story.do(ev.ModelGone("m", 5.0))
    story.generate()
    story.assert_refused("unknown_model")
    worker.end(request)
    assert worker.stopped
    worker.die()
    config = story.core.state.registry.names.known["m"].config
    story.do(ev.ModelFound("m", config, "", 0))
    story.generate()
    story.assert_sent(1, "accepted")


def test_what_outlives_the_grace_of_a_removed_model_fails() -> None:
    story = Story()
    _, request = story.running()
    story.do(ev.ModelGone("m", 5.0))
    story.later(5.1)
    story.assert_ended(request, "draining")


def test_fewer_replicas_drain_the_others() -> None:
    story = Story({"m": model(replicas=2)})
    first, second = story.ready_worker(), story.ready_worker(replica=1)
    config = model(replicas=1)
    story.do(ev.ModelChanged("m", config, "", 0, 5.0))
    assert second.stopped and not first.stopped
    second.die()
    story.do(ev.LoadModel("m"))
    assert story.core.state.registry.slots["m/1"].worker is None
