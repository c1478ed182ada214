"""Workers that die before they serve: back-off, circuit breaker, load failures."""

from __future__ import annotations

import math

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.models import listing
from mlxpool.broker.requests.request import RequestState
from mlxpool.broker.workers.worker import PROVEN_TOKENS, WorkerState, restart_delay
from mlxpool.common.errors import MAX_MESSAGE
from support import core_events as make
from support import kinds
from support.core_harness import (
    BOOT,
    Story,
    body_of,
    model,
)

# ---- workers die ---------------------------------------------------------------------------------


def test_death_in_load_keeps_the_queue_and_restarts_after_the_back_off(story: Story) -> None:
    request = story.generate()
    worker = story.workers["m/0"].hello()
    worker.die("killed by SIGSEGV")
    assert story.started() == []
    assert story.to_client() == []
    delay = restart_delay(1, 1.0, 60.0, BOOT)
    story.later(delay - 0.01)
    assert story.started() == []
    story.later(0.02)
    assert story.started() == ["m/0"]
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_worker_that_had_served_is_restarted_at_once(story: Story) -> None:
    worker, request = story.running(sequences=1)
    worker.end(request)
    worker.credit()
    running, waiting = story.generate(), story.generate()
    worker.die()
    assert story.started() == ["m/0"]
    again = story.ready_worker(sequences=1)
    for request in (running, waiting):
        again.end(request)
        again.credit()
        story.assert_ended(request, "stop")


def test_a_wanted_model_comes_back_without_a_request(story: Story) -> None:
    story.ready_worker().die()
    story.later(pause(1))
    assert story.started() == ["m/0"]


def test_a_second_replica_comes_back_too() -> None:
    story = Story({"m": model(replicas=2)})
    story.ready_worker()
    other = story.ready_worker(replica=1)
    other.die()
    story.later(2)
    assert story.started() == ["m/1"]


def fail_in_a_row(story: Story, times: int) -> list[float]:
    """Lets the model's workers die while they load. Returns the pause before each restart."""
    pauses = []
    for number in range(times):
        story.workers["m/0"].die("exit code 3", own=True)
        before = story.now
        if number < times - 1:
            while not story.started():
                story.hear()
                story.later(0.5)
            pauses.append(story.now - before)
    return pauses


def test_the_breaker_opens_after_five_failures(story: Story) -> None:
    request = story.generate()
    assert fail_in_a_row(story, 5) == [pause(n) for n in (1, 2, 3, 4)]
    frame = story.assert_ended(request, "model_unavailable")
    assert "5 times in a row" in body_of(frame)["message"]
    assert "exit code 3" in body_of(frame)["message"]
    assert body_of(frame)["retry_after_ms"] == 300_000
    assert listing.rows(story.core.state.registry, story.now)[0]["state"] == "broken"
    story.generate()
    story.assert_refused("model_unavailable", "exit code 3", "300 s")
    story.later(299)
    story.generate()
    story.assert_refused("model_unavailable")
    story.later(1)
    probe = story.generate()
    assert story.started() == ["m/0"]
    story.ready_worker().end(probe)
    story.assert_ended(probe, "stop")


def test_a_load_by_the_operator_closes_the_breaker(story: Story) -> None:
    story.generate()
    fail_in_a_row(story, 5)
    story.do(ev.LoadModel("m"))
    assert story.started() == ["m/0"]
    story.generate()
    story.assert_sent(1, "accepted")


def test_the_back_off_has_a_bound() -> None:
    story = Story(restart_limit=100, restart_delay_max=3.0)
    story.do(ev.LoadModel("m"))
    assert fail_in_a_row(story, 6) == [pause(n, 3.0) for n in (1, 2, 3, 4, 5)]
    assert pause(5, 3.0) <= 4.0


def test_a_load_failure_fails_all_waiting_requests_with_its_message(story: Story) -> None:
    requests = [story.generate(link=n) for n in (1, 2)]
    asked = story.ask(kinds.TOKENIZE, 3, model="m", text="a")
    worker = story.workers["m/0"].hello()
    why = "model.embed_tokens.weight is missing"
    worker.bye("model_load_failed", why)
    assert story.to_client() == []
    worker.die("exit code 1", own=True)
    for link, request in ((1, requests[0]), (2, requests[1]), (3, asked)):
        story.assert_sent(link, "error", id=request, code="model_load_failed", message=why)
    story.generate(link=4)
    story.assert_refused("model_load_failed", why, link=4)
    story.ask(kinds.TOKENIZE, 5, model="m", text="a")
    story.assert_sent(5, "error", code="model_load_failed", message=why)
    assert story.started() == []
    story.later(pause(1))
    assert story.started() == [], "nobody waits for it"
    story.generate()
    story.assert_sent(1, "accepted")
    assert story.started() == ["m/0"]


@pytest.mark.parametrize("made", [0, 5, PROVEN_TOKENS])
def test_the_error_of_a_bye_is_the_cause_of_a_ready_workers_end(story: Story, made: int) -> None:
    """The durable stream continues in the next worker, even if it had no token yet."""
    worker, request = story.running()
    frail = story.generate(link=2, durable=False)
    worker.tokens(request, made)
    worker.bye("internal", "the device is lost: a reason")
    worker.die("exit code 1", own=True)
    frame = story.assert_ended(frail, "worker_lost")
    assert body_of(frame)["details"]["cause"] == "the device is lost: a reason"
    assert story.core.state.registry.slots["m/0"].last_exit == "the device is lost: a reason"
    assert story.request(request).run.charge == 0.5
    assert story.model().last_error is None
    story.later(pause(1))
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_worker_that_said_bye_gets_no_more_work(story: Story) -> None:
    worker, request = story.running()
    worker.bye("internal", "the device is lost")
    later, asked = story.generate(link=2), story.ask(kinds.TOKENIZE, 3, model="m", text="a")
    worker.die("exit code 1", own=True)
    assert (story.request(request).run.charge, story.request(later).run.charge) == (1.0, 0.0)
    assert story.request(later).run.resumes_without_progress == 0
    story.later(pause(1))
    fresh = story.ready_worker()
    assert [call.header.id for call in fresh.asked] == [asked]
    fresh.end(request)  # `request` runs alone, because it is charged with the loss
    fresh.credit()
    fresh.end(later)
    story.assert_ended(later, "stop")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ({"code": "internal", "message": "x" * 300_000}, "x" * MAX_MESSAGE),
        ({}, "it cannot serve any longer"),
    ],
)
def test_the_error_of_a_bye_is_bounded(story: Story, error: dict[str, str], cause: str) -> None:
    worker, _ = story.running()
    frail = story.generate(link=2, durable=False)
    story.do(make.bye(worker.epoch, error))
    worker.die("exit code 1", own=True)
    assert body_of(story.assert_ended(frail, "worker_lost"))["details"]["cause"] == cause
    assert story.core.state.registry.slots["m/0"].last_exit == cause


def test_a_worker_that_cannot_be_started_is_a_load_failure(story: Story) -> None:
    request = story.generate()
    story.do(ev.SpawnFailed("m/0", "cannot start the worker of 'm': no more processes"))
    story.assert_sent(1, "error", id=request, code="model_load_failed")
    assert story.model().workers == []


def test_the_pid_of_a_worker_is_known_once_it_is_started(story: Story) -> None:
    story.do(ev.LoadModel("m"))
    story.do(ev.Spawned("m/0", 4711))
    assert story.model().workers[0].pid == 4711


def pause(failures: int, most: float = 60.0) -> float:
    """Returns the pause before a restart, in steps of half a second."""
    return math.ceil(restart_delay(failures, 1.0, most, BOOT) * 2) / 2


def test_a_probe_starts_one_replica_until_it_has_served() -> None:
    story = Story({"m": model(replicas=3)}, restart_limit=2)
    story.do(ev.LoadModel("m"))
    assert len(story.started()) == 3
    for replica in range(3):
        story.workers[f"m/{replica}"].die("exit code 3", own=True)
    story.later(300)
    story.generate()
    assert story.started() == ["m/0"]
    probe = story.workers["m/0"].hello().credit(2)
    story.generate()
    assert story.started() == []
    probe.end(next(iter(probe.runs)))
    assert story.started() == ["m/1", "m/2"]


def test_a_failed_probe_waits_as_long_again() -> None:
    story = Story(restart_limit=1)
    story.do(ev.LoadModel("m"))
    story.workers["m/0"].die("exit code 3", own=True)
    for _ in range(2):
        story.later(300)
        story.generate()
        assert story.started() == ["m/0"]
        story.workers["m/0"].die("exit code 4", own=True)
        story.assert_sent(1, "error", code="model_unavailable")


def test_the_delays_of_two_pools_differ() -> None:
    delays = {restart_delay(3, 1.0, 60.0, boot) for boot in range(1, 50)}
    assert len(delays) > 40
    assert all(4.0 <= delay <= 5.0 for delay in delays)


def test_the_exit_of_a_worker_that_said_bye_charges_no_request(story: Story) -> None:
    worker, request = story.running()
    story.do(make.bye(worker.epoch, None))
    worker.die("exit code 0", own=True)
    assert story.request(request).run.charge == 0
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_kills_from_outside_open_no_breaker() -> None:
    story = Story(restart_limit=2)
    request = story.generate()
    for _ in range(5):
        story.workers["m/0"].die("killed by SIGKILL")
        story.hear()
        story.later(5)
        story.hear()
        story.later(5)
        assert story.started() == ["m/0"] or story.workers["m/0"].state is WorkerState.STARTING
    assert story.request(request).state is RequestState.QUEUED
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")
