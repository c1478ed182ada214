"""Drain and restart: streams end in their worker, or continue in another worker.

The move to another worker does not count as a failed attempt.
"""

from __future__ import annotations

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.models import listing
from mlxpool.broker.requests.request import RequestState
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol.token_ids import pack_ids
from support import core_events as make
from support import kinds
from support.core_harness import (
    Story,
    X,
    body_of,
    model,
)


def drain(
    story: Story, slot: str | None = "m/0", name: str | None = None, grace: float = 5
) -> None:
    story.do(ev.StartDrain(slot, name, grace))


# ---- a worker ------------------------------------------------------------------------------------


def test_a_drained_worker_finishes_what_it_has(story: Story) -> None:
    worker, request = story.running()
    drain(story)
    worker.assert_is(WorkerState.DRAINING)
    assert not worker.stopped and not worker.draining
    waiting = story.generate()
    assert waiting not in worker.runs
    worker.end(request)
    story.assert_ended(request, "stop")
    assert worker.stopped
    worker.die("stopped")
    assert story.started() == ["m/0"], "somebody waits"
    assert story.core.state.registry.slots["m/0"].restarts == 0
    assert story.model().failures == 0


def test_after_its_grace_it_hands_back_what_it_runs() -> None:
    story = Story({"m": model(replicas=2)})
    worker, request = story.running()
    worker.tokens(request, 2)
    other = story.ready_worker(sequences=1, replica=1)
    drain(story, grace=5)
    story.later(4.9)
    assert not worker.draining
    story.later(0.2)
    assert worker.draining and not worker.stopped
    worker.give_back()
    assert other.runs[request].pos == 2
    assert story.request(request).run.resumes_without_progress == 0
    assert worker.stopped
    other.end(request)
    assert body_of(story.assert_ended(request, "stop"))["attempts"] == 2


@pytest.mark.parametrize("late", [False, True], ids=["comes back", "is late"])
def test_a_worker_that_is_fenced_while_it_leaves_has_not_failed(story: Story, late: bool) -> None:
    worker, request = story.running()
    drain(story, grace=5)
    if late:  # the worker does not return its runs
        story.later(5.1)
        story.hear()
        story.later(story.core.state.config.stop_grace + 0.1)
        story.hear()
    else:
        worker.hello()
    worker.assert_is(WorkerState.CONDEMNED)
    worker.die("killed by SIGKILL")
    slot = story.core.state.registry.slots["m/0"]
    assert (slot.restarts, slot.last_exit, story.model().failures) == (0, "drained", 0)
    assert story.started() == ["m/0"], "the stream goes on at once"
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_request_that_is_not_durable_survives_a_drain(story: Story) -> None:
    worker, request = story.running(durable=False)
    worker.tokens(request, 2)
    drain(story, grace=0)
    story.later(0)
    worker.give_back()
    assert story.request(request).state is RequestState.QUEUED


def test_drains_do_not_count_as_losses(story: Story) -> None:
    worker, request = story.running()
    for _ in range(5):
        drain(story, grace=0)
        story.later(0)
        worker.give_back()
        worker.die("stopped")
        worker = story.ready_worker()
    assert request in worker.runs
    worker.end(request)
    story.assert_ended(request, "stop")


def test_a_worker_that_hands_nothing_back_is_ended(story: Story) -> None:
    worker, request = story.running()
    drain(story, grace=1)
    story.later(1)
    assert worker.draining
    story.later(4.9)
    worker.assert_is(WorkerState.YIELDING)
    story.later(0.2)
    worker.assert_is(WorkerState.CONDEMNED)
    assert story.request(request).state is RequestState.QUEUED
    worker.die("killed by SIGKILL")
    assert story.core.state.registry.slots["m/0"].last_exit == "drained"


def test_a_second_drain_of_a_worker_changes_nothing(story: Story) -> None:
    worker, request = story.running()
    drain(story, grace=5)
    drain(story, grace=50)
    assert story.last == []
    story.later(5)
    assert worker.draining
    worker.end(request)
    assert story.stopped() == ["m/0"]
    drain(story)
    assert story.last == []


def test_a_drain_stops_an_idle_worker_and_ignores_an_empty_slot(story: Story) -> None:
    drain(story)
    assert story.last == []
    worker = story.ready_worker()
    drain(story)
    assert worker.stopped
    drain(story)
    assert story.stopped() == []


def test_a_call_under_way_is_waited_for(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    drain(story)
    assert not worker.stopped
    story.do(make.tokens(worker.epoch, ident, {}, ()))
    assert worker.stopped


def test_a_yield_of_an_unknown_run_does_nothing(story: Story) -> None:
    worker, request = story.running()
    for runs in (None, 3, [3], [[request]], [[request, 99]], [[X, 1]], [["x", 1]]):
        story.do(make.handed_back(worker.epoch, runs))
        assert story.request(request).state is RequestState.ASSIGNED
    fenced = story.core.state.counters.fenced
    story.do(make.handed_back(worker.epoch + 1, [[request, 1]]))
    assert story.core.state.counters.fenced == fenced + 1


def test_a_yield_of_a_cancelled_run_ends_its_lease(story: Story) -> None:
    worker, request = story.running()
    story.cancel(request)
    drain(story, grace=0)
    story.later(0)
    worker.give_back()
    assert worker.stopped
    story.assert_idle()


def test_a_hung_worker_is_condemned_though_it_drains(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 1)
    drain(story, grace=100)
    worker.watched(11, ProgressReading("decode", count=4))
    worker.assert_is(WorkerState.CONDEMNED)
    assert story.request(request).state is RequestState.QUEUED


# ---- restart -------------------------------------------------------------------------------------


def test_a_restart_moves_the_streams_to_the_next_worker(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 3)
    story.do(ev.RestartWorker("m/0"))
    story.later(0)
    assert worker.draining
    worker.give_back()
    assert worker.stopped
    worker.die("stopped")
    assert story.started() == ["m/0"]
    again = story.ready_worker()
    assert again.runs[request].body["resume"] == {"count": 3, "resumes": 0}
    again.end(request)
    story.assert_ended(request, "stop")
    assert story.model().failures == 0


def test_a_restart_of_an_idle_worker_starts_another(story: Story) -> None:
    worker = story.ready_worker()
    story.do(ev.RestartWorker("m/0"))
    assert worker.stopped
    worker.die("stopped")
    assert story.started() == ["m/0"]


def test_a_restart_of_a_starting_worker_is_no_failure(story: Story) -> None:
    story.do(ev.LoadModel("m"))
    story.do(ev.RestartWorker("m/0"))
    story.later(1)
    story.workers["m/0"].die("stopped")
    assert story.started() == ["m/0"]
    assert story.model().failures == 0


def test_a_restart_of_an_empty_slot_fills_it(story: Story) -> None:
    story.do(ev.RestartWorker("m/0"))
    assert story.started() == ["m/0"]


# ---- a model, the pool ---------------------------------------------------------------------------


def test_a_drained_model_takes_nothing_new_until_it_is_loaded(story: Story) -> None:
    worker, request = story.running(sequences=1)
    waiting = story.generate()
    drain(story, None, "m", 60)
    story.generate()
    story.assert_refused("draining", "mlxpool load m")
    story.ask(kinds.TOKENIZE, model="m", text="a")
    story.assert_sent(1, "error", code="draining")
    story.generate(name="other")
    story.assert_sent(1, "accepted")
    worker.end(request)
    worker.credit()
    assert not worker.stopped
    worker.end(waiting)
    assert worker.stopped
    worker.die("stopped")
    assert story.started() == []
    assert {m["name"]: m["state"] for m in listing.rows(story.core.state.registry, story.now)}[
        "m"
    ] == "drained"
    story.do(ev.LoadModel("m"))
    assert story.started() == ["m/0"]
    story.generate()
    story.assert_sent(1, "accepted")


def test_a_take_over_passes_a_drained_model(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.tokens(X, 1)
    drain(story, None, "m", 60)
    story.generate(X, attempt=2, resume={"count": 1}, blobs=[pack_ids([0])])
    story.assert_sent(1, "accepted", attempt=2)


def test_what_outlives_the_grace_of_a_drained_model_fails(story: Story) -> None:
    worker, request = story.running(sequences=1)
    waiting, other = story.generate(), story.generate(name="other")
    drain(story, None, "m", 3)
    story.later(3)
    for each in (request, waiting):
        story.assert_ended(each, "draining")
    assert worker.stopped
    assert other in story.core.state.requests


def test_a_stream_of_a_drained_model_survives_its_worker(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 1)
    drain(story, None, "m", 60)
    worker.die()
    again = story.ready_worker()
    again.end(request)
    story.assert_ended(request, "stop")
    assert again.stopped


def test_a_drained_pool_stops_after_its_last_stream(story: Story) -> None:
    worker, request = story.running()
    drain(story, None, None, 60)
    story.generate()
    story.assert_refused("draining")
    assert story.pool_stopped == 0
    worker.end(request)
    assert story.pool_stopped == 1
    story.assert_idle()


def test_an_idle_pool_is_drained_at_once(story: Story) -> None:
    drain(story, None, None, 60)
    drain(story, None, None, 60)
    assert story.pool_stopped == 1


def test_what_outlives_the_grace_of_a_drained_pool_fails(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    drain(story, None, None, 3)
    story.later(3)
    story.assert_ended(request, "draining")
    assert story.pool_stopped == 1
    assert worker.cancelled == [(request, 1)]


def test_a_stream_of_a_draining_pool_survives_its_worker(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 1)
    drain(story, None, None, 60)
    worker.die()
    again = story.ready_worker()
    again.end(request)
    story.assert_ended(request, "stop")
    assert story.pool_stopped == 1


def test_a_call_that_waits_in_a_drained_model_is_answered(story: Story) -> None:
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.workers["m/0"].hello().die("killed by SIGSEGV", own=True)
    story.do(ev.StartDrain(None, "m", 0.5))
    story.later(0.6)
    story.assert_sent(1, "error", id=ident, code="draining")
    story.assert_idle()
