"""Sequences of events that once ended a stream wrongly, or gave an owner an unfair share."""

from __future__ import annotations

from mlxpool.broker.core import events as ev
from mlxpool.broker.requests.request import RequestState
from mlxpool.common.protocol import token_ids
from support import core_events as make
from support import kinds
from support.core_harness import Story, model

TWO = {"m": model(replicas=2), "other": model()}


def test_a_replica_that_cannot_load_ends_no_stream_of_another_worker() -> None:
    story = Story(TWO)
    first = story.ready_worker()
    request = story.generate()
    first.tokens(request, 3)
    first.die()
    story.later(3)
    second = story.workers["m/1"]
    second.hello().bye("model_load_failed", "a tensor is missing")
    second.die("exit code 1")
    assert story.request(request).state is RequestState.QUEUED
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_model_that_grew_beyond_the_limit_can_still_be_started() -> None:
    """The model's bytes exceed the limit only because they include its last worker's KV cache."""
    story = Story(memory=1000, needs={"m": 100})
    worker, request = story.running()
    story.do(make.beat(worker.epoch, {"memory": {"active": 5000}}))
    worker.tokens(request, 2)
    worker.die()
    story.later(3)
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_new_connection_of_a_worker_counts_as_no_loss() -> None:
    """After a freeze of the broker each worker sends `hello` anew; no worker counts as lost."""
    story = Story({"m": model(replicas=4)})
    workers = [story.ready_worker(replica=n) for n in range(4)]
    request = story.generate()
    for _ in range(2):
        for worker in workers:
            worker.runs.clear()
            worker.hello()
    for worker in workers:
        worker.works = 0
        worker.credit(4)
    (busy,) = [worker for worker in workers if request in worker.runs]
    busy.end(request)
    story.assert_ended(request, "stop")


def test_an_unload_before_a_restart_leaves_no_request_waiting(story: Story) -> None:
    request = story.generate()
    story.workers["m/0"].hello().die("killed by SIGSEGV")
    story.do(ev.UnloadModel("m"))
    story.later(3)
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_a_broker_that_ends_starts_no_worker(story: Story) -> None:
    story.ready_worker()
    story.do(ev.Shutdown())
    story.do(ev.RestartWorker("other/0"))
    assert story.started() == []
    story.do(ev.RestartWorker("m/0"))
    story.workers["m/0"].die("stopped")
    story.later(400)
    assert story.started() == []


def test_a_later_sending_of_a_queued_request_does_not_advance_it(story: Story) -> None:
    worker = story.ready_worker(sequences=1)
    running = story.generate()
    first, second = story.generate(), story.generate()
    story.generate(second, attempt=2)
    worker.end(running)
    worker.credit()
    assert story.request(first).state is RequestState.ASSIGNED
    assert story.request(second).state is RequestState.QUEUED


def test_resumes_of_streams_from_another_broker_are_bounded() -> None:
    story = Story(queue_limit=2)
    for number in range(9):
        story.generate(resume={"count": 1}, blobs=[b"1234"], attempt=2)
        if number == 8:
            story.assert_refused("queue_full")
    assert len(story.model().queue) == 8


def test_a_poisoned_request_ends_no_stream_of_another_owner(story: Story) -> None:
    worker = story.ready_worker()
    live = story.generate(prompt="the same", owner="uid:2", link=2)
    worker.tokens(live, 2)
    story.core.ended.quarantine(story.request(live).digest, story.now)
    story.generate(
        live, prompt="the same", owner="uid:2", link=3, attempt=2,
        resume={"count": 2}, blobs=[token_ids.pack_ids([0, 1])],
    )  # fmt: skip
    assert not story.to_client("error")
    assert live in story.core.state.requests


def test_one_id_for_calls_of_two_models_is_refused(story: Story) -> None:
    story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.do(make.call(1, kinds.TOKENIZE, ident, 1, {"model": "other", "text": "a"}, ()))
    story.assert_sent(1, "error", code="duplicate_id")
    story.do(make.call(1, kinds.DETOKENIZE, ident, 1, {"model": "m"}, (b"1234",)))
    story.assert_sent(1, "error", code="duplicate_id")


def test_a_cancelled_id_cannot_be_sent_again(story: Story) -> None:
    _, request = story.running()
    story.cancel(request)
    story.generate(request, attempt=2)
    story.assert_sent(1, "error", code="duplicate_id")
    assert request not in story.core.state.requests


def test_odd_values_of_a_worker_raise_no_error(story: Story) -> None:
    worker, request = story.running()
    for body in ({"sequences": "x", "works": None}, {}, {"sequences": -5, "works": 1}):
        story.do(make.credit(worker.epoch, body))
    broken: list[object] = [None, [[]], [[request, []]], [[["x"], 1]], "runs"]
    for runs in broken:
        story.do(make.handed_back(worker.epoch, runs))
    worker.credit()
    worker.end(request)
    story.assert_ended(request, "stop")
