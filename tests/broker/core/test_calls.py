"""`ping`, `models`, tokenizer calls, and commands of operators, while streams run."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.calls import MAX_IN_WORKER
from mlxpool.common.protocol.frames import Header
from support import core_events as make
from support import kinds
from support.core_harness import (
    BOB,
    BOOT,
    FakeWorker,
    Story,
    X,
    body_of,
    model,
)

# ---- questions -----------------------------------------------------------------------------------


def test_a_ping_is_answered_with_boot_link_and_version(story: Story) -> None:
    story.ask(kinds.PING, 6)
    story.assert_sent(6, "pong", boot=BOOT, link=6, version=1, attempt=3)


def test_models_are_listed_with_their_states(story: Story) -> None:
    story.ready_worker()
    story.ask(kinds.MODELS)
    models = body_of(story.assert_sent(1, "models"))["models"]
    assert [(m["name"], m["state"], m["queued"], m["context"]) for m in models] == [
        ("m", "ready", 0, 2048),
        ("other", "cold", 0, 0),
    ]


@pytest.mark.parametrize("kind", [kinds.TOKENIZE, kinds.DETOKENIZE])
def test_a_tokenizer_call_starts_a_worker_and_is_forwarded(story: Story, kind: str) -> None:
    ident = story.ask(kind, 1, b"blob", model="m", text="a")
    assert story.started() == ["m/0"]
    worker = story.ready_worker()
    (asked,) = worker.asked
    assert (asked.header.kind, asked.header.id, asked.message.blobs()) == (kind, ident, (b"blob",))
    story.do(make.tokens(worker.epoch, ident, {"text": "a"}, (b"1234",)))
    frame = story.assert_sent(1, "tokens", id=ident, attempt=3, text="a")
    assert frame.message.blobs() == (b"1234",)
    assert story.do(make.tokens(worker.epoch, ident, {}, ())) == []
    story.assert_idle()


def test_an_error_of_the_worker_is_the_answer_of_a_call(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.do(make.tokens(worker.epoch, ident, {"code": "bad_request", "message": "no"}, ()))
    story.assert_sent(1, "error", id=ident, code="bad_request")


@pytest.mark.parametrize(
    ("body", "code"),
    [({"model": "x"}, "unknown_model"), ({}, "bad_request"), ({"model": 3}, "bad_request")],
)
def test_a_call_for_an_unknown_model_is_refused(
    story: Story, body: dict[str, Any], code: str
) -> None:
    ident = story.ask(kinds.TOKENIZE, **body)
    story.assert_sent(1, "error", id=ident, code=code)


def test_a_call_sent_twice_is_answered_on_the_newest_link(story: Story) -> None:
    worker = story.ready_worker()
    for link in (1, 2):
        story.do(make.call(link, kinds.TOKENIZE, X, link, {"model": "m", "text": "a"}, ()))
    assert len(worker.asked) == 1
    story.do(make.tokens(worker.epoch, X, {"text": "a"}, ()))
    story.assert_sent(2, "tokens", id=X, attempt=2)
    assert not story.to_client(link=1)


def test_a_waiting_call_sent_twice_is_answered_on_the_newest_link(story: Story) -> None:
    for link in (1, 2):
        story.do(make.call(link, kinds.TOKENIZE, X, link, {"model": "m", "text": "a"}, ()))
    worker = story.ready_worker()
    assert len(worker.asked) == 1
    story.do(make.tokens(worker.epoch, X, {"text": "a"}, ()))
    story.assert_sent(2, "tokens", id=X, attempt=2)


def test_waiting_calls_are_bounded_by_count_and_bytes() -> None:
    story = Story(queue_limit=2)
    for _ in range(3):
        story.ask(kinds.TOKENIZE, model="m", text="a")
    story.assert_sent(1, "error", code="queue_full")


def test_calls_in_work_are_bounded_as_well() -> None:
    story = Story(queue_limit=2, queue_bytes=1024)
    worker = story.ready_worker()
    first = story.ask(kinds.TOKENIZE, 1, bytes(600), model="m", text=True)
    story.ask(kinds.TOKENIZE, 1, bytes(600), model="m", text=True)
    story.assert_sent(1, "error", code="queue_full")
    story.ask(kinds.TOKENIZE, model="m", text="a")
    story.ask(kinds.TOKENIZE, model="m", text="a")
    story.assert_sent(1, "error", code="queue_full")
    story.do(make.tokens(worker.epoch, first, {}, (b"1234",)))
    story.ask(kinds.TOKENIZE, model="m", text="a")
    assert not story.to_client()
    assert len(worker.asked) == 3


# ---- cancels of calls ----------------------------------------------------------------------------


def test_a_cancelled_call_has_no_answer_and_its_worker_is_told(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.cancel(ident, owner="")
    story.assert_sent(1, "fate", id=ident, state="assigned", pos=0)
    assert len(story.to_client()) == 1
    assert worker.cancelled == [(ident, 0)]
    story.assert_idle()
    assert story.do(make.tokens(worker.epoch, ident, {}, (b"1234",))) == []
    story.cancel(ident, owner="")
    story.assert_sent(1, "fate", id=ident, state="unknown")
    assert len(worker.cancelled) == 1


def test_a_waiting_call_can_be_cancelled(story: Story) -> None:
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.cancel(ident, owner="")
    story.assert_sent(1, "fate", id=ident, state="queued", pos=0)
    story.assert_idle()
    worker = story.ready_worker()
    assert not worker.asked and not worker.cancelled


def test_a_call_of_another_owner_cannot_be_cancelled(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.cancel(ident, link=2, owner=BOB)
    story.assert_sent(2, "fate", id=ident, state="unknown")
    assert not worker.cancelled
    story.do(make.tokens(worker.epoch, ident, {}, (b"1234",)))
    story.assert_sent(1, "tokens", id=ident)


def test_a_call_of_another_owner_cannot_be_taken_over(story: Story) -> None:
    story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    header = Header(kinds.TOKENIZE, ident, 0, 9)
    story.do(make.client(2, BOB, header, {"model": "m", "text": "a"}))
    story.assert_sent(2, "error", id=ident, code="duplicate_id")


def test_a_silent_links_calls_are_cancelled_after_the_grace(story: Story) -> None:
    worker = story.ready_worker()
    in_work = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.ask(kinds.TOKENIZE, model="other", text="a")
    other = story.ask(kinds.TOKENIZE, 2, model="m", text="a")
    for _ in range(3):
        story.later(3)
        story.hear(2)
    assert act.ForgetLink(1) not in story.last
    assert act.ForgetLink(1) in story.later(1)
    assert story.to_client() == []
    assert worker.cancelled == [(in_work, 0)]
    assert list(story.core.state.calls) == [other]
    assert not story.model("other").calls


def test_a_call_sent_again_outlives_the_link_of_its_first_sending(story: Story) -> None:
    worker = story.ready_worker()
    for link in (1, 2):
        story.do(make.call(link, kinds.TOKENIZE, X, link, {"model": "m", "text": "a"}, ()))
    for _ in range(5):
        story.later(3)
        story.hear(2)
    assert list(story.core.state.links) == [2]
    assert not worker.cancelled
    story.do(make.tokens(worker.epoch, X, {}, (b"1234",)))
    story.assert_sent(2, "tokens", id=X)


def test_the_calls_of_a_revoked_owner_end(story: Story) -> None:
    worker = story.ready_worker()
    header = Header(kinds.TOKENIZE, X, 0, 1)
    story.do(make.client(2, BOB, header, {"model": "m", "text": "a"}))
    kept = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.do(ev.Revoked(BOB))
    story.assert_sent(2, "error", id=X, code="unauthorized")
    assert worker.cancelled == [(X, 0)]
    assert list(story.core.state.calls) == [kept]


def test_a_drained_worker_ends_with_the_cancel_of_its_last_call(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.do(ev.RestartWorker("m/0"))
    story.later(0.01)
    assert not worker.stopped
    story.cancel(ident, owner="")
    assert worker.stopped


def test_a_call_for_a_draining_worker_is_answered_by_the_next(story: Story) -> None:
    worker = story.ready_worker()
    story.do(ev.UnloadModel("m"))
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    worker.die("stopped")
    assert story.started() == ["m/0"]
    assert story.ready_worker().asked[0].header.id == ident


def test_a_model_without_keep_alive_answers_a_call_before_it_is_unloaded() -> None:
    story = Story({"m": model(keep_alive=0)})
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    worker = story.ready_worker()
    story.later(1)
    assert not worker.stopped
    story.do(make.tokens(worker.epoch, ident, {}, (b"1234",)))
    story.assert_sent(1, "tokens", id=ident)
    story.later(1)
    assert worker.stopped


def test_a_beat_is_answered_and_kept(story: Story) -> None:
    worker = story.ready_worker()
    story.do(make.beat(worker.epoch, {"phase": "decode"}))
    assert worker.heard == 1
    assert story.model().workers[0].beat.phase == "decode"


# ---- operations ----------------------------------------------------------------------------------


def everything_at_once(story: Story) -> tuple[FakeWorker, dict[str, bytes]]:
    """Makes a stream with tokens, a request that a worker has got, a queued request and a call."""
    worker = story.ready_worker(sequences=2)
    streaming = story.generate(link=1)
    worker.tokens(streaming, 2)
    assigned, queued = story.generate(link=2), story.generate(link=3)
    waiting = story.ask(kinds.TOKENIZE, 4, model="other", text="a")
    ids = {"streaming": streaming, "assigned": assigned, "queued": queued, "waiting": waiting}
    return worker, ids


def test_shutdown_ends_everything_with_draining(story: Story) -> None:
    worker, ids = everything_at_once(story)
    story.do(ev.Shutdown())
    for link, name in enumerate(("streaming", "assigned", "queued", "waiting"), start=1):
        story.assert_sent(link, "error", id=ids[name], code="draining", retryable=True)
    assert sorted(story.stopped()) == ["m/0", "other/0"]
    assert {request for request, _ in worker.cancelled} == {ids["streaming"], ids["assigned"]}
    story.assert_conserved()
    story.generate(link=5)
    story.assert_refused("draining", link=5)
    story.ask(kinds.TOKENIZE, 6, model="m", text="a")
    story.assert_sent(6, "error", code="draining")
    worker.die("stopped")
    story.workers["other/0"].die("stopped")
    story.later(1000)
    assert story.started() == []
    story.assert_idle()


def test_nothing_starts_a_worker_once_the_broker_goes_down(story: Story) -> None:
    story.do(ev.Shutdown())
    story.do(ev.LoadModel("m"))
    assert story.started() == []


def test_an_unload_fails_what_runs(story: Story) -> None:
    worker, request = story.running()
    story.do(ev.UnloadModel("m"))
    frame = story.assert_sent(1, "error", id=request, code="worker_lost")
    assert "unloaded by the operator" in body_of(frame)["message"]
    assert story.stopped() == ["m/0"]
    story.do(ev.UnloadModel("m"))
    assert story.stopped() == []
    worker.die("stopped")
    story.later(1000)
    assert story.started() == []
    assert story.model().failures == 0


def test_an_unload_leaves_waiting_requests_to_the_next_worker(story: Story) -> None:
    worker, _running = story.running(sequences=1)
    waiting = story.generate()
    story.do(ev.UnloadModel("m"))
    assert waiting in story.core.state.requests
    worker.die("stopped")
    assert story.started() == ["m/0"]
    story.ready_worker().end(waiting)
    story.assert_ended(waiting, "stop")


def test_a_worker_that_is_unloaded_while_it_starts_is_not_welcomed(story: Story) -> None:
    story.do(ev.LoadModel("m"))
    story.do(ev.UnloadModel("m"))
    assert story.stopped() == ["m/0"]
    assert story.do(make.hello("m/0", {})) == []


def test_a_load_starts_a_worker_once(story: Story) -> None:
    story.do(ev.LoadModel("m"))
    assert story.started() == ["m/0"]
    story.do(ev.LoadModel("m"))
    assert story.started() == []


def test_an_exit_of_an_empty_slot_does_nothing(story: Story) -> None:
    assert story.do(ev.WorkerExited("m/0", "killed")) == []
    assert story.do(ev.Spawned("m/0", 1)) == []
    assert story.do(ev.SpawnFailed("m/0", "no")) == []


def test_a_call_of_a_lost_worker_is_sent_to_one_more(story: Story) -> None:
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.ready_worker().die()
    assert story.to_client() == []
    again = story.ready_worker()
    assert [asked.header.id for asked in again.asked] == [ident]
    again.die("killed by SIGSEGV")
    frame = story.assert_sent(1, "error", id=ident, code="worker_lost")
    assert "2 workers" in body_of(frame)["message"] and "SIGSEGV" in body_of(frame)["message"]
    story.assert_idle()


def test_a_call_outlives_any_number_of_drained_workers(story: Story) -> None:
    """Each worker is drained before it answers the call, which the next worker then gets."""
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    for _ in range(3):
        worker = story.ready_worker()
        assert [asked.header.id for asked in worker.asked] == [ident]
        story.do(ev.RestartWorker("m/0"))
        for _ in range(10):
            story.hear()
            story.later(1.0)
        worker.die("stopped")
    worker = story.ready_worker()
    story.do(make.tokens(worker.epoch, ident, {}, (b"1234",)))
    story.assert_sent(1, "tokens", id=ident)


def test_a_call_of_a_lost_worker_goes_to_another_replica_at_once() -> None:
    story = Story({"m": model(replicas=2)})
    first, second = story.ready_worker(), story.ready_worker(replica=1)
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    assert len(first.asked) == 1
    first.die()
    assert [asked.header.id for asked in second.asked] == [ident]


def test_an_answer_of_a_fenced_worker_is_dropped(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    old = worker.epoch
    worker.hello().credit(1)
    fenced = story.core.state.counters.fenced
    assert story.do(make.tokens(old, ident, {"text": "old"}, ())) == []
    assert story.core.state.counters.fenced == fenced + 1
    story.do(make.tokens(worker.epoch, ident, {"text": "new"}, ()))
    story.assert_sent(1, "tokens", id=ident, text="new")


def test_a_call_in_flight_is_answered_at_shutdown(story: Story) -> None:
    story.ready_worker()
    ident = story.ask(kinds.TOKENIZE, model="m", text="a")
    story.do(ev.Shutdown())
    story.assert_sent(1, "error", id=ident, code="draining")
    story.assert_idle()


# ---- calls that a model computes ----------------------------------------------------------------


def asked_of(worker: FakeWorker) -> list[bytes]:
    return [asked.header.id for asked in worker.asked if asked.header.id is not None]


def test_calls_go_to_the_worker_with_the_fewest() -> None:
    story = Story(models={"m": model(replicas=2)})
    story.ask(kinds.EMBED, model="m")
    first, second = story.ready_worker(), story.ready_worker(replica=1)
    for _ in range(3):
        story.ask(kinds.EMBED, model="m")
    assert (len(first.asked), len(second.asked)) == (2, 2)


def test_a_worker_has_a_bounded_number_of_calls_and_owners_have_turns(story: Story) -> None:
    worker = story.ready_worker()
    asked = [story.ask(kinds.EMBED, model="m") for _ in range(MAX_IN_WORKER + 3)]
    assert asked_of(worker) == asked[:MAX_IN_WORKER]
    header = Header(kinds.EMBED, X, 0, 1)
    story.do(make.client(2, BOB, header, {"model": "m"}))
    for ident in asked[:2]:
        story.do(make.vectors(worker.epoch, ident))
    assert set(asked_of(worker)[MAX_IN_WORKER:]) == {asked[MAX_IN_WORKER], X}


def test_a_call_is_late_at_its_deadline_wherever_it_is(story: Story) -> None:
    ident = story.ask(kinds.EMBED, model="m", deadline_ms=2000)
    story.later(1.5)
    assert not story.to_client()
    worker = story.ready_worker()
    (asked,) = worker.asked
    assert "deadline_ms" not in (asked.message.body() or {})
    story.later(0.6)
    frame = story.assert_sent(1, "error", id=ident, code="deadline_exceeded")
    assert "a worker has it" in body_of(frame)["message"]
    assert worker.cancelled == [(ident, 0)]
    story.assert_idle()


@pytest.mark.parametrize("deadline_ms", [0, -1, "soon", 1.5, True])
def test_a_deadline_out_of_bounds_is_refused(story: Story, deadline_ms: object) -> None:
    ident = story.ask(kinds.EMBED, model="m", deadline_ms=deadline_ms)
    story.assert_sent(1, "error", id=ident, code="bad_request")


@pytest.mark.parametrize("kind", [kinds.EMBED, kinds.DECIDE])
def test_a_call_that_ends_two_workers_is_poison_and_the_others_are_answered(
    story: Story, kind: str
) -> None:
    worker = story.ready_worker()
    bad, good = (story.ask(kind, model="m") for _ in range(2))
    worker.die("killed by SIGSEGV", own=True)
    worker = story.ready_worker()
    assert sorted(asked_of(worker)) == sorted([bad, good])
    assert all((asked.message.body() or {})["alone"] for asked in worker.asked)
    worker.die("killed by SIGSEGV", own=True, prefill=bad)
    worker = story.ready_worker()
    worker.die("killed by SIGSEGV", own=True, prefill=bad)
    frame = story.assert_sent(1, "error", id=bad, code="poisoned")
    assert "ended two workers" in body_of(frame)["message"]
    worker = story.ready_worker()
    assert asked_of(worker) == [good]
    story.do(make.vectors(worker.epoch, good))
    story.assert_sent(1, "vectors", id=good)


def test_kills_from_outside_charge_no_call(story: Story) -> None:
    ident = story.ask(kinds.EMBED, model="m")
    for _ in range(6):
        worker = story.ready_worker()
        (asked,) = worker.asked
        assert "alone" not in (asked.message.body() or {})
        worker.die("killed by SIGKILL")
    worker = story.ready_worker()
    story.do(make.vectors(worker.epoch, ident))
    story.assert_sent(1, "vectors", id=ident)


@pytest.mark.parametrize(
    ("features", "kind", "said"),
    [
        (["embed"], kinds.RERANK, "does not rerank: it is a model for embed"),
        (["rerank"], kinds.EMBED, "does not embed: it is a model for rerank"),
        (["embed"], kinds.DECIDE, "does not decide: it is a model for embed"),
        (["batching", "tree"], kinds.EMBED, "does not embed: it generates text"),
    ],
)
def test_what_a_model_is_not_for_is_refused_without_loading_it(
    story: Story, features: list[str], kind: str, said: str
) -> None:
    story.do(ev.ModelDescribed("m", {"features": features, "problems": []}))
    ident = story.ask(kind, model="m")
    frame = story.assert_sent(1, "error", id=ident, code="bad_request")
    assert said in body_of(frame)["message"]
    assert not story.started()


def test_a_model_that_generates_decides(story: Story) -> None:
    story.do(ev.ModelDescribed("m", {"features": ["batching", "tree"], "problems": []}))
    ident = story.ask(kinds.DECIDE, model="m")
    assert asked_of(story.ready_worker()) == [ident]


def test_a_model_that_embeds_refuses_to_generate(story: Story) -> None:
    story.do(ev.ModelDescribed("m", {"features": ["embed"], "problems": []}))
    story.generate(X)
    frame = story.assert_sent(1, "error", id=X, code="bad_request")
    assert "does not generate: it is a model for embed" in body_of(frame)["message"]
