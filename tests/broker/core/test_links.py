"""Connections (links), outdated frames, and batches."""

from __future__ import annotations

from collections.abc import Iterator

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import MAX_DUE
from mlxpool.broker.core.endings import MAX_ENDED
from mlxpool.broker.requests.fair_queue import Queue
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol.token_ids import pack_ids
from support import core_events as make
from support import kinds
from support.core_harness import (
    Story,
    X,
    body_of,
    model,
    wake_until_idle,
)

# ---- links ---------------------------------------------------------------------------------------


def test_a_silent_links_streams_are_cancelled_after_the_grace(story: Story) -> None:
    """The silent client gets no terminal: if it was only frozen, it sends its streams again."""
    worker, streaming = story.running(sequences=1)
    worker.tokens(streaming)
    queued = story.generate()
    other = story.generate(link=2)
    for _ in range(3):
        story.later(3)
        story.hear(2)
    assert act.ForgetLink(1) not in story.last
    assert act.ForgetLink(1) in story.later(1)
    assert story.to_client() == []
    for request in (streaming, queued):
        assert story.core.state.tombstones[request].state is RequestState.CANCELLED
    assert worker.cancelled == [(streaming, 1)]
    assert other in story.core.state.requests
    assert list(story.core.state.links) == [2]
    story.assert_conserved()


def test_the_place_of_a_silent_client_is_given_to_a_client_that_waits(story: Story) -> None:
    worker, stalled = story.running(sequences=1)
    worker.tokens(stalled)
    own = story.generate()
    waiting = story.generate(link=2)
    story.later(2.9)
    story.hear(2)
    assert worker.cancelled == []
    assert act.ForgetLink(1) in story.later(0.1)
    assert worker.cancelled == [(stalled, 1)] and story.to_client() == []
    assert story.core.state.tombstones[stalled].state is RequestState.CANCELLED
    assert {own, waiting} == story.core.state.requests.keys()
    worker.end(stalled, "cancelled")
    worker.credit()
    assert waiting in worker.runs or own in worker.runs


def test_a_silent_client_keeps_its_place_until_somebody_waits(story: Story) -> None:
    worker, stalled = story.running(sequences=1)
    own = story.generate()  # other requests of the silent client do not count as waiting
    story.later(6)
    assert worker.cancelled == []
    story.generate(link=2)
    story.later(1)
    assert worker.cancelled == [(stalled, 1)]
    assert own in story.core.state.requests


def test_a_silent_client_with_many_streams_is_ended_in_portions(story: Story) -> None:
    """The client's streams end in several passes of the loop, between which workers are served."""
    _, streaming = story.running(sequences=1)
    ids = {streaming, *(story.generate() for _ in range(3 * MAX_ENDED))}
    for link in range(2, 2 + MAX_DUE):  # other clients that fall silent at the same time
        story.generate(link=link)
    story.now += 10
    ended = wake_until_idle(story)
    assert not story.core.state.requests and max(ended) == MAX_ENDED
    assert all(story.core.state.tombstones[id].state is RequestState.CANCELLED for id in ids)
    assert not story.core.state.links
    story.assert_conserved()


def test_whether_somebody_waits_is_looked_up_once_for_each_model(story: Story) -> None:
    """Whether other requests wait is looked up once per model, not once per ended stream."""
    story.running(sequences=8)
    for _ in range(7 + 100):
        story.generate()
    queue = story.core.state.registry.models["m"].queue
    assert len(queue) == 100
    looked: list[int] = []

    class Counted(Queue):
        def __iter__(self) -> Iterator[Request]:
            for request in super().__iter__():
                looked.append(request.arrival)
                yield request

    queue.__class__ = Counted
    story.later(3)
    assert 0 < len(looked) <= len(queue)


def test_a_durable_stream_that_gave_its_place_goes_on_when_its_client_wakes(story: Story) -> None:
    worker, stalled = story.running(sequences=1)
    worker.tokens(stalled, 3)
    other = story.generate(link=2)
    story.later(3)
    story.hear(2)
    assert worker.cancelled == [(stalled, 1)]
    resume = {"count": 3, "seed": 0, "resumes": 0}
    story.generate(stalled, link=3, attempt=2, resume=resume, blobs=[pack_ids([0, 1, 2])])
    assert {stalled, other} == story.core.state.requests.keys()
    assert story.request(stalled).run.taken == 3


def test_the_end_of_a_connection_ends_its_streams_that_are_not_durable(story: Story) -> None:
    worker, plain = story.running(sequences=2, durable=False)
    durable, waiting = story.generate(), story.generate(durable=False)
    other = story.generate(link=2, durable=False)
    story.do(ev.LinkLost(1))
    story.later(0)
    assert worker.cancelled == [(plain, 1)] and story.to_client() == []
    assert {durable, other} == story.core.state.requests.keys()
    for request in (plain, waiting):
        assert story.core.state.tombstones[request].state is RequestState.CANCELLED
    story.assert_conserved()


def plain_streams(story: Story, count: int, link: int = 1) -> list[bytes]:
    """Makes `count` streams whose client never sends them again."""
    return [story.generate(link=link, durable=False) for _ in range(count)]


def test_many_streams_of_a_lost_link_end_in_portions(story: Story) -> None:
    """Between the portions other clients are served; they keep their streams."""
    worker, durable = story.running(sequences=2)
    other = story.generate(link=2)
    plain = plain_streams(story, 3 * MAX_ENDED + 1)
    story.do(ev.LinkLost(1))
    assert len(story.core.state.requests) == 2 + len(plain), "the event itself ends none"
    story.do(ev.Wake())
    worker.tokens(other)
    story.assert_sent(2, kinds.DELTA, id=other)
    ended = wake_until_idle(story)
    assert max(ended) == MAX_ENDED and sum(ended) == len(plain) - MAX_ENDED
    assert story.core.state.requests.keys() == {durable, other}
    assert all(story.core.state.tombstones[id].state is RequestState.CANCELLED for id in plain)
    assert story.core.state.counters.cancelled == len(plain)
    story.assert_conserved()


def test_many_links_that_are_lost_at_once_end_in_portions_together(story: Story) -> None:
    """The few streams of one lost link end before all streams of the larger links have ended."""
    large = [id for link in (1, 2) for id in plain_streams(story, 2 * MAX_ENDED, link)]
    small = [id for link in range(3, 13) for id in plain_streams(story, 1, link)]
    for link in range(1, 13):
        story.do(ev.LinkLost(link))
    story.do(ev.Wake())
    assert not story.core.state.requests.keys() & set(small)
    ended = wake_until_idle(story)
    assert max(ended) == MAX_ENDED
    assert all(story.core.state.tombstones[id].state is RequestState.CANCELLED for id in large)
    story.assert_conserved()
    story.assert_idle()


def test_streams_that_have_a_place_are_the_first_of_a_lost_link(story: Story) -> None:
    """Running streams of a lost link end before its waiting streams."""
    waiting = plain_streams(story, 2 * MAX_ENDED)
    resume = {"count": 1}  # these streams ran in another broker, so they precede other requests
    running = [
        story.generate(durable=False, resume=resume, blobs=[pack_ids([0])]) for _ in range(2)
    ]
    worker = story.ready_worker(sequences=2)
    assert worker.runs.keys() == set(running)
    story.do(ev.LinkLost(1))
    story.do(ev.Wake())
    assert [id for id, _ in worker.cancelled] == running
    assert len(story.core.state.requests.keys() & set(waiting)) == MAX_ENDED + 2


def test_the_stream_with_a_place_is_the_first_of_a_small_link_beside_a_large_one(
    story: Story,
) -> None:
    worker = story.ready_worker(sequences=4)
    for _ in range(3):
        story.generate(link=2)
    running, waiting = plain_streams(story, 2)
    assert len(worker.runs) == 4 and running in worker.runs
    story.core.state.links[1].ids = dict.fromkeys([waiting, running])
    story.do(ev.LinkLost(1))
    story.do(ev.Wake())
    assert [*story.core.state.tombstones] == [running, waiting]
    assert len(story.core.state.requests) == 3


def test_a_client_that_comes_back_keeps_the_streams_that_have_not_ended(story: Story) -> None:
    """A stream that is sent again on the new link continues; an ended stream starts anew."""
    worker, first = story.running(sequences=1, durable=False)
    worker.tokens(first, 2)
    *_, last = plain_streams(story, 2 * MAX_ENDED)
    story.do(ev.LinkLost(1))
    story.do(ev.Wake())
    assert story.core.state.tombstones[first].state is RequestState.CANCELLED
    for id in (first, last):
        story.generate(id, link=2, attempt=2, durable=False)
    wake_until_idle(story)
    assert story.core.state.requests.keys() == {first, last}
    worker.confirm(first)
    worker.credit()
    for id in (last, first) if last in worker.runs else (first, last):
        worker.end(id, count=3)
        story.assert_ended(id, "stop", attempt=2)
        assert story.heard[id, 2].ids == [0, 1, 2]
        worker.credit()
    story.assert_conserved()
    story.assert_idle()


def test_what_a_lost_link_still_has_may_end_otherwise_and_ends_once(story: Story) -> None:
    """Each stream ends once, even if its worker, a deadline or the broker ends it first."""
    worker, done = story.running(sequences=2, durable=False)
    late = story.generate(durable=False, deadline_ms=1)
    plain = plain_streams(story, 4 * MAX_ENDED)
    counters = story.core.state.counters
    for link in range(2, 2 + MAX_ENDED):  # streams of each end before streams of link 1
        plain_streams(story, 2, link)
        story.do(ev.LinkLost(link))
    story.do(ev.LinkLost(1))
    worker.end(done)
    assert counters.done == 1 and story.to_client() == []
    worker.die(own=True)
    assert late not in story.core.state.requests, "no worker is asked to run it again"
    story.do(ev.Wake())
    left = len(story.core.state.requests)
    assert left > MAX_ENDED
    story.do(ev.Shutdown())
    assert left - MAX_ENDED == len(story.core.state.requests)
    wake_until_idle(story)
    assert not story.core.state.requests and counters.failed > MAX_ENDED
    assert {done, late, *plain} <= story.core.state.tombstones.keys()
    assert counters.done + counters.failed + counters.cancelled == counters.accepted
    story.assert_idle()


def test_a_link_that_is_heard_from_keeps_its_streams(story: Story) -> None:
    request = story.generate()
    for _ in range(10):
        story.later(5)
        story.hear()
    assert request in story.core.state.requests


def test_nothing_is_sent_on_a_lost_link_and_its_streams_end_in_time(story: Story) -> None:
    worker, request = story.running()
    story.do(ev.LinkLost(1))
    story.do(ev.LinkLost(1))
    assert story.core.state.counters.links_lost == 1
    worker.tokens(request)
    assert story.to_client() == []
    story.later(10)
    assert story.to_client() == []
    assert worker.cancelled == [(request, 1)]
    assert story.core.state.counters.cancelled == 1
    story.assert_conserved()


def test_the_loss_of_an_unknown_link_does_nothing(story: Story) -> None:
    assert story.do(ev.LinkLost(4)) == []


def test_a_silent_link_and_a_deadline_at_one_wake_end_a_stream_once(story: Story) -> None:
    """After a long sleep a silent client and the deadlines of its streams are due together."""
    requests = [story.generate(deadline_ms=20_000) for _ in range(2)]
    story.now += 100
    story.do(ev.Wake())
    for request in requests:
        stream = story.heard[request, 1]
        assert stream.forgotten or stream.ended
    story.assert_conserved()
    story.assert_idle()


# ---- outdated frames -----------------------------------------------------------------------------


def test_frames_of_an_old_epoch_are_fenced(story: Story) -> None:
    worker, request = story.running()
    old = worker.row(request)
    epoch = worker.epoch
    worker.die()
    story.later(1)
    again = story.ready_worker()
    assert again.epoch > epoch
    story.generate(request, attempt=2)
    for event in (
        ev.WorkerDeltas(epoch, [old]),
        make.beat(epoch, {}),
        make.credit(epoch, {"sequences": 9, "works": 0}),
    ):
        before = story.core.state.counters.fenced
        assert story.do(event) == []
        assert story.core.state.counters.fenced == before + 1
    story.do(make.bye(epoch, {"code": "internal", "message": "old"}))
    again.end(request)
    story.assert_ended(request, "stop", attempt=2)


def test_a_row_of_a_run_that_the_worker_does_not_have_is_fenced(story: Story) -> None:
    worker, request = story.running()
    for strange in (
        deltas.Delta(X, 1, 0, "x", pack_ids([0])),
        deltas.Delta(request, 2, 0, "x", pack_ids([0])),
    ):
        before = story.core.state.counters.fenced
        assert worker.say(strange) == []
        assert story.core.state.counters.fenced == before + 1
    worker.end(request)
    story.assert_ended(request, "stop")
    worker.say(deltas.Delta(request, 1, 0, "", b"", end={"reason": "stop"}))
    assert story.to_client() == []


def test_a_wrong_position_condemns_the_worker(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    bad, good = story.generate(), story.generate(link=2)
    worker.tokens(good, 2)
    worker.tokens(bad, 1)
    worker.tokens(bad, 1, pos=5)
    assert story.stopped() == ["m/0"]
    assert worker.state is WorkerState.CONDEMNED
    assert story.to_client() == []
    # All frames of the worker are ignored now. Its slot is refilled after its process has ended.
    assert worker.tokens(good) == []
    waiting = story.generate()
    assert story.started() == []
    worker.die("stopped")
    cause = story.core.state.registry.slots["m/0"].last_exit
    assert cause == "it sent position 5 where 1 was due"
    again = story.ready_worker(sequences=3)
    for request, have in ((bad, 1), (good, 2), (waiting, 0)):
        assert again.runs[request].pos == have
        again.end(request, count=1)
        story.assert_ended(request, "stop")
    story.assert_conserved()


# ---- batches -------------------------------------------------------------------------------------


def test_deltas_are_grouped_for_each_link_that_asked_for_it(story: Story) -> None:
    worker = story.ready_worker(sequences=4)
    a, b = (story.generate(link=1, batch=True) for _ in range(2))
    c = story.generate(link=2, batch=True)
    d = story.generate(link=1)
    worker.say(*(worker.row(r, n) for r, n in ((a, 1), (b, 2), (c, 3), (d, 4))))
    grouped = story.assert_sent(1, "deltas")
    assert [row[0] for row in body_of(grouped)["rows"]] == [a, b]
    assert len(grouped.message.blobs()[0]) == 4 * 3
    assert [row[0] for row in body_of(story.assert_sent(2, "deltas"))["rows"]] == [c]
    story.assert_sent(1, "delta", id=d)


def test_the_end_of_a_batched_stream_comes_after_its_tokens(story: Story) -> None:
    worker = story.ready_worker()
    a, b = (story.generate(batch=True) for _ in range(2))
    worker.say(
        worker.row(a, 1), worker.row(b, 2, end={"reason": "stop", "usage": {}}, text="<0><1>")
    )
    story.assert_ended(b, "stop")
    assert story.heard[b, 1].ids == [0, 1]
    assert story.heard[a, 1].ids == [0]


def test_two_entries_of_one_batched_stream_in_a_frame_stay_in_order(story: Story) -> None:
    worker, request = story.running(batch=True)
    worker.say(worker.row(request, 1), worker.row(request, 1, end={"reason": "stop"}))
    story.assert_ended(request, "stop")
    assert story.heard[request, 1].ids == [0, 1]


def test_a_second_hello_fences_the_first_connection_and_moves_its_runs(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    old, late = worker.epoch, worker.row(request, 1)
    worker.hello()
    assert worker.epoch > old
    assert worker.state is WorkerState.LOADING
    assert story.request(request).state is RequestState.QUEUED
    worker.credit(2)
    assert worker.runs[request].pos == 2
    assert worker.say(late, epoch=old) == []
    worker.end(request, count=1)
    story.assert_ended(request, "stop")
    assert story.heard[request, 1].ids == [0, 1, 2]
    story.assert_idle()


def test_a_condemned_worker_sends_nothing_more(story: Story) -> None:
    worker = story.ready_worker()
    good, bad = story.generate(batch=True), story.generate(batch=True)
    worker.say(worker.row(good, 2), worker.row(bad, 1, pos=7), worker.row(good, 1))
    assert story.heard[good, 1].ids == [0, 1]
    assert story.request(good).run.taken == 2


def test_the_runs_of_a_condemned_worker_go_to_another_at_once() -> None:
    story = Story({"m": model(replicas=2)})
    first, second = story.ready_worker(sequences=2), story.ready_worker(sequences=1, replica=1)
    request = story.generate()
    first.tokens(request, 2)
    first.tokens(request, 1, pos=7)
    assert second.runs[request].pos == 2


def test_accepted_of_an_equal_attempt_tells_where_the_stream_is(story: Story) -> None:
    story.generate(X)
    story.generate(X, link=2)
    story.assert_sent(2, "accepted", link=1)


def test_a_client_that_was_frozen_goes_on_from_what_it_has(story: Story) -> None:
    worker, request = story.running(sequences=1)
    worker.tokens(request, 2)
    story.later(11)
    worker.confirm(request)
    worker.credit()
    story.generate(request, link=2, attempt=2, resume={"count": 2}, blobs=[pack_ids([0, 1])])
    worker.end(request, count=1)
    story.assert_ended(request, "stop", attempt=2)
    assert story.heard[request, 2].ids == [2]


def test_a_link_without_streams_is_forgotten_in_silence(story: Story) -> None:
    story.hear(4)
    assert story.later(11) == []
    assert not story.core.state.links
