"""Events that end all streams of a model or of the pool end each stream once, in portions."""

from __future__ import annotations

import pytest

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import dispatcher
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.endings import MAX_ENDED
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers import placement
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.core_harness import Story, wake_until_idle

MANY = 3 * MAX_ENDED + 1


def streams(story: Story, count: int = MANY, link: int = 1) -> list[bytes]:
    return [story.generate(link=link) for _ in range(count)]


def terminals(actions: list[act.Action]) -> list[bytes | None]:
    """Returns the ids of the streams and calls that these actions end, in order."""
    frames = [each for each in actions if isinstance(each, act.ToClient)]
    return [frame.header.id for frame in frames if frame.header.kind == "error"]


def ended_by_all(story: Story, first: list[act.Action]) -> list[bytes | None]:
    """Returns the ids of the streams that end in the actions `first`, and in later due events.

    Checks that no event ends more than MAX_ENDED streams.
    """
    ids = terminals(first)
    assert len(ids) <= MAX_ENDED
    while story.core.next_wake() <= story.now:
        more = terminals(story.do(ev.Wake()))
        assert len(more) <= MAX_ENDED
        ids += more
    return ids


def test_the_streams_and_calls_of_a_model_that_fails_end_in_portions_and_in_order() -> None:
    story = Story(restart_limit=1)
    story.ready_worker(sequences=0)
    waiting = streams(story)
    asked = [story.ask(kinds.TOKENIZE, 1, model="m", text="a") for _ in range(MANY)]
    other = story.generate(name="other", link=2)
    worker = story.workers["m/0"]
    story.do(ev.WorkerExited(worker.slot, "killed by SIGSEGV", own=True))
    ended = ended_by_all(story, story.last)
    assert ended[:MANY] == waiting and set(ended[MANY:]) == set(asked)
    assert len(ended) == MANY + len(asked)
    for each in waiting:
        story.assert_ended(each, "model_unavailable")
    assert list(story.core.state.requests) == [other]
    story.assert_conserved()


def test_what_a_worker_takes_of_a_model_that_failed_goes_on() -> None:
    story = Story(restart_limit=1)
    story.ready_worker(sequences=0)
    waiting = streams(story)
    story.do(ev.WorkerExited("m/0", "killed by SIGSEGV", own=True))
    story.do(ev.LoadModel("m"))
    story.workers["m/0"].hello().credit(1)
    (taken,) = story.workers["m/0"].runs
    assert taken in waiting
    wake_until_idle(story)
    assert list(story.core.state.requests) == [taken]
    story.workers["m/0"].end(taken)
    story.assert_ended(taken, "stop")
    story.assert_conserved()
    story.assert_idle()


def test_a_drained_model_stops_its_workers_after_the_last_stream(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    ids = streams(story)
    story.do(ev.StartDrain(None, "m", 0))
    story.do(ev.Wake())
    assert len(story.core.state.requests) == MANY - MAX_ENDED and not worker.stopped
    wake_until_idle(story)
    assert worker.stopped
    for each in ids:
        story.assert_ended(each, "draining")
    assert not story.core.state.requests and not story.core.state.calls


def test_a_drained_model_that_is_opened_again_keeps_its_workers(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    ids = streams(story)
    story.do(ev.StartDrain(None, "m", 0))
    story.do(ev.Wake())
    story.do(ev.LoadModel("m"))
    later = story.generate(link=2)
    wake_until_idle(story)
    assert not worker.stopped
    assert list(story.core.state.requests) == [later]
    for each in ids:
        story.assert_ended(each, "draining")
    story.assert_conserved()


def test_a_model_that_is_opened_and_drained_again_has_the_time_of_its_second_drain(
    story: Story,
) -> None:
    worker = story.ready_worker(sequences=2)
    streams(story)
    story.do(ev.StartDrain(None, "m", 0))
    story.do(ev.Wake())
    story.do(ev.LoadModel("m"))
    later = story.generate(link=2)
    story.do(ev.StartDrain(None, "m", 2))
    wake_until_idle(story)
    assert list(story.core.state.requests) == [later] and not worker.stopped
    story.later(2)
    story.assert_ended(later, "draining")
    assert worker.stopped


def test_the_end_of_the_broker_in_the_middle_of_a_drain_ends_each_stream_once(
    story: Story,
) -> None:
    worker = story.ready_worker(sequences=2)
    ids = streams(story)
    worker.tokens(ids[0], 2)
    story.do(ev.StartDrain(None, None, 0))
    story.do(ev.Wake())
    story.do(ev.Shutdown(final=True))
    assert story.core.ends_more and not worker.stopped
    assert sum(wake_until_idle(story)) == MANY - 2 * MAX_ENDED
    assert worker.stopped and not story.core.ends_more
    for each in ids:  # the harness refuses a second end of a stream, and a gap in `pos`
        story.assert_ended(each, "draining")
    story.assert_conserved()
    assert not story.core.state.requests and not story.core.state.calls


def test_an_end_of_the_broker_takes_nothing_new_and_gives_no_worker_anything(
    story: Story,
) -> None:
    worker = story.ready_worker(sequences=1)
    ids = streams(story)
    asked = [story.ask(kinds.TOKENIZE, 1, model="m", text="a") for _ in range(MANY)]
    story.do(ev.Shutdown())
    runs = dict(worker.runs)
    worker.credit(4)
    assert worker.runs == runs
    story.generate(link=2)
    story.assert_refused("draining", link=2)
    story.ask(kinds.TOKENIZE, 2, model="m", text="a")
    story.assert_sent(2, "error", code="draining")
    wake_until_idle(story)
    for each in ids:
        story.assert_ended(each, "draining")
    assert not story.core.state.calls and len(asked) == MANY
    assert worker.stopped
    assert not story.core.state.requests and not story.core.state.calls


def test_a_stream_that_is_sent_again_while_the_broker_ends_ends_on_its_new_link(
    story: Story,
) -> None:
    story.ready_worker(sequences=1)
    ids = streams(story)
    story.do(ev.Shutdown())
    story.generate(ids[-1], link=2, attempt=2)
    wake_until_idle(story)
    story.assert_ended(ids[-1], "draining", attempt=2)
    story.assert_conserved()
    assert not story.core.state.requests and not story.core.state.calls


def test_a_worker_that_dies_while_the_broker_ends_disturbs_no_end(story: Story) -> None:
    worker = story.ready_worker(sequences=4)
    ids = streams(story)
    story.do(ev.Shutdown())
    worker.die(own=True)
    assert story.started() == []
    wake_until_idle(story)
    for each in ids:
        story.assert_ended(each, "draining")
    story.assert_conserved()
    story.assert_idle()


def test_workers_that_are_killed_while_the_broker_ends_change_no_error(story: Story) -> None:
    """Workers are killed while the broker ends their streams: each still ends as `draining`."""
    worker = story.ready_worker(sequences=MANY)
    ids = [story.generate(durable=False) for _ in range(MANY)]
    assert len(worker.runs) == MANY
    story.do(ev.Shutdown())
    worker.die("killed by SIGKILL", own=False)
    wake_until_idle(story)
    for each in ids:
        story.assert_ended(each, "draining")
    story.assert_conserved()
    story.assert_idle()


def test_a_stream_whose_end_raises_costs_no_other_its_end(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = streams(story)
    fail, broken = Delivery.fail, ids[3]

    def raising(self: Delivery, request: Request, error: PoolError, now: float) -> None:
        if request.id == broken:
            raise RuntimeError("a bug")
        fail(self, request, error, now)

    monkeypatch.setattr(Delivery, "fail", raising)
    with pytest.raises(RuntimeError):
        story.do(ev.Shutdown())
    wake_until_idle(story)
    assert list(story.core.state.requests) == [broken]
    assert not story.core.ends_more


def test_a_stream_that_is_sent_again_after_its_end_is_not_of_the_bulk_that_ended_it(
    story: Story,
) -> None:
    """A stream that a drain has ended is accepted again, although the drain is not finished."""
    worker = story.ready_worker(sequences=1)
    streams(story)
    running = story.generate(priority=2)
    first = next(iter(worker.runs))
    worker.end(first)
    worker.credit(1)
    assert list(worker.runs)[-1] == running
    story.do(ev.StartDrain(None, "m", 0))
    story.do(ev.Wake())
    story.assert_ended(running, "draining")
    story.do(ev.LoadModel("m"))
    story.generate(running, link=2, attempt=2, priority=2)
    wake_until_idle(story)
    assert list(story.core.state.requests) == [running], "accepted after the model was opened"
    story.assert_conserved()


def test_a_timer_that_raises_costs_no_other_timer_of_the_same_wake(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one timer raises, the other timers of the same wake-up fire in the next wake-up."""
    story.ready_worker(sequences=1)
    late = story.generate(deadline_ms=1000)
    ids = streams(story)
    story.do(ev.Shutdown())
    fail = Delivery.fail

    def raising(self: Delivery, request: Request, error: PoolError, now: float) -> None:
        if request.id == broken:
            raise RuntimeError("a bug")
        fail(self, request, error, now)

    broken = ids[-1]
    story.core.state.timers.set(broken, story.now - 1)
    story.core.state.requests[broken].deadline = story.now - 1
    monkeypatch.setattr(Delivery, "fail", raising)
    with pytest.raises(RuntimeError):
        story.do(ev.Wake())
    broken = b""
    wake_until_idle(story)
    assert not story.core.ends_more and not story.core.state.requests
    story.assert_ended(late, "draining")


# ---- streams of other weights --------------------------------------------------------------------


def resumed(story: Story, digest: str, count: int = MANY) -> list[bytes]:
    """Queues streams that started under another broker, with weights of this digest."""
    resume = {"count": 1, "facts": {"digest": digest, "context": 2048}}
    return [
        story.generate(attempt=2, resume=resume, blobs=[pack_ids([0])], link=3)
        for _ in range(count)
    ]


def test_streams_that_began_with_other_weights_end_in_portions(story: Story) -> None:
    old, new = resumed(story, "old"), resumed(story, "new")
    worker = story.ready_worker(sequences=1, digest="new")
    left = len(story.core.state.requests)
    assert left == 2 * MANY - MAX_ENDED
    assert max(wake_until_idle(story)) <= MAX_ENDED
    assert story.core.state.requests.keys() == set(new)
    for each in old:
        story.assert_ended(each, "model_unavailable", attempt=2)
    assert len(worker.runs) == 1
    story.assert_conserved()


def test_a_stream_of_other_weights_ends_though_its_worker_was_suspect_in_between(
    story: Story,
) -> None:
    old = resumed(story, "old")
    worker = story.ready_worker(sequences=1, digest="new")
    core = story.core.state.registry.slots[worker.slot].worker
    assert core is not None and core.state is WorkerState.READY
    core.move("suspect")
    wake_until_idle(story)
    assert story.core.state.requests, "nobody is ready: the next one might have their weights"
    core.move("recover")
    worker.credit()
    wake_until_idle(story)
    assert not story.core.state.requests
    for each in old:
        story.assert_ended(each, "model_unavailable", attempt=2)


def test_waiting_streams_are_compared_once_with_the_workers_of_a_model(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waiting stream is compared with a worker once, even if the worker reports many times."""
    worker = story.ready_worker(sequences=0, digest="new")
    compared: list[bytes] = []
    fits = placement.fits_facts

    def counted(one: object, request: Request) -> bool:
        compared.append(request.id)
        return fits(one, request)  # type: ignore[arg-type]

    monkeypatch.setattr(dispatcher, "fits_facts", counted)
    waiting = resumed(story, "new", 10)
    for _ in range(10):
        worker.credit()
    assert compared == waiting


def test_no_stream_of_other_weights_ends_while_a_worker_comes_that_may_have_them(
    story: Story,
) -> None:
    old = resumed(story, "old")
    story.ready_worker(sequences=1, digest="new")
    left = len(story.core.state.requests)
    assert 0 < left < MANY
    model = story.core.state.registry.models["m"]
    second = story.core.state.registry.remote_slot("far", "m")
    story.core.pool.add_remote("far", "m", 1, story.now)
    assert second.worker is not None and not model.stable
    wake_until_idle(story)
    assert len(story.core.state.requests) == left, "the one that comes may have their weights"
    assert not story.core.ends_more and old
