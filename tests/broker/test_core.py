"""The core as stories: who says what, and who then gets to hear what."""

from __future__ import annotations

from typing import Any

import pytest

from core_harness import (
    BOOT,
    ENTROPY,
    OWNER,
    FakeWorker,
    Story,
    model,
    request_id,
)
from mlxpool.broker import events as ev
from mlxpool.broker.requests import State
from mlxpool.broker.workers import WorkerState
from mlxpool.common import wire
from mlxpool.common.wire import pack_ids

X = request_id(900)  # an id chosen by a test
BOB = "uid:2"


@pytest.fixture
def story() -> Story:
    return Story()


# ---- a request's life ----------------------------------------------------------------------------


def test_a_request_from_the_queue_to_its_end(story: Story) -> None:
    request = story.generate()
    assert story.started() == ["m/0"]
    assert story.request(request).state is State.QUEUED
    worker = story.ready_worker()
    assert story.request(request).state is State.ASSIGNED
    worker.tokens(request, 2)
    story.assert_sent(1, "delta", id=request, pos=0, text="<0><1>", n=2)
    assert story.request(request).state is State.STREAMING
    worker.end(request, "length", count=1, rest="tail")
    story.assert_sent(1, "delta", pos=2, n=1)
    story.assert_sent(1, "done", id=request, pos=3, reason="length", text="tail", attempts=1)
    assert story.heard[request, 1].ids == [0, 1, 2]
    assert story.heard[request, 1].text == "<0><1><2>tail"
    story.assert_idle()
    story.assert_conserved()


def test_accepted_says_where_the_request_stands(story: Story) -> None:
    story.generate()
    request = story.generate(link=5, options={"seed": 9})
    frame = story.assert_sent(
        5, "accepted", boot=BOOT, link=5, queue_position=1, seed=9, id=request
    )
    assert frame.header.attempt == 1


def test_a_request_without_a_seed_gets_one_from_outside(story: Story) -> None:
    request = story.generate()
    story.assert_sent(1, "accepted", seed=ENTROPY)
    worker = story.ready_worker()
    assert worker.runs[request].body["seed"] == ENTROPY


def test_work_carries_prompt_options_and_what_is_left_of_the_deadline(story: Story) -> None:
    request = story.generate(
        tokens=True, blobs=[pack_ids([5, 6])], options={"num_predict": 3}, deadline_ms=8000
    )
    story.later(3)
    run = story.ready_worker().runs[request]
    assert run.body["tokens"] is True
    assert run.blobs == (pack_ids([5, 6]),)
    assert run.body["options"]["max_tokens"] == 3
    assert run.body["deadline_ms"] == 5000
    assert run.attempt == 1


def test_usage_and_timings_of_done(story: Story) -> None:
    request = story.generate()
    story.later(2)
    worker = story.ready_worker()
    story.later(1)
    worker.tokens(request)
    story.later(1)
    worker.end(request, "stop", count=4)
    body = story.assert_ended(request, "stop").body
    assert body["usage"] == {"completion_tokens": 4}
    assert body["timings_ms"] == {"queue": 2000.0, "first_token": 3000.0, "total": 4000.0}


def test_the_log_line_of_a_request_has_no_text(story: Story) -> None:
    worker, request = story.running(prompt="a secret")
    worker.tokens(request, 1, facts={"prompt_tokens": 3})
    worker.end(request, rest="private")
    notes = [a for a in story.last if isinstance(a, ev.Note) and a.event == "request"]
    assert len(notes) == 1
    assert notes[0].fields["tokens"] == 1
    assert notes[0].fields["prompt_tokens"] == 3
    assert notes[0].fields["worker"] == "m/0"
    assert "secret" not in str(notes[0].fields)
    assert "private" not in str(notes[0].fields)


def test_the_oldest_of_the_highest_priority_goes_first(story: Story) -> None:
    low, first, second = (story.generate(priority=p) for p in (0, 2, 2))
    worker = story.ready_worker(sequences=1)
    order = []
    for _ in range(3):
        (running,) = worker.runs
        order.append(running)
        worker.end(running)
        worker.credit()
    assert order == [first, second, low]


def test_never_more_work_than_credit(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    requests = [story.generate() for _ in range(5)]
    assert list(worker.runs) == requests[:2]
    worker.credit()
    assert len(worker.runs) == 2
    worker.end(requests[0])
    assert len(worker.runs) == 1, "the place is known to be free when the worker says so"
    worker.credit()
    assert list(worker.runs) == requests[1:3]


def test_credit_that_crossed_work_is_not_counted_twice(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    story.generate()
    # Sent before the work arrived: two places free, no work seen.
    story.do(ev.WorkerCredit(worker.epoch, {"sequences": 2, "works": 0}))
    story.generate()
    third = story.generate()
    assert story.request(third).state is State.QUEUED


def test_work_goes_to_the_worker_with_most_places() -> None:
    story = Story({"m": model(replicas=2)})
    small, big = story.ready_worker(sequences=1), story.ready_worker(sequences=3, replica=1)
    for _ in range(4):
        story.generate()
    assert (len(small.runs), len(big.runs)) == (1, 3)


def test_an_error_of_the_worker_is_the_terminal(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    worker.fail(request, "context_exceeded", "2049 tokens, at most 2048")
    story.assert_sent(1, "error", id=request, pos=2, code="context_exceeded")
    assert story.core.counters.failures["context_exceeded"] == 1
    story.assert_conserved()


# ---- refused before accepted ---------------------------------------------------------------------


def test_an_unknown_model_is_told_the_nearest(story: Story) -> None:
    story.generate(name="othr")
    story.assert_refused("unknown_model", "'othr'", "did you mean 'other'?")
    assert story.core.counters.rejected["unknown_model"] == 1
    story.assert_idle()


def test_a_model_like_no_other_is_told_all(story: Story) -> None:
    story.generate(name="zzzz")
    story.assert_refused("unknown_model", "known: m, other")


def test_a_full_queue_says_its_numbers() -> None:
    story = Story(queue_limit=2)
    story.generate(), story.generate()
    story.generate()
    frame = story.assert_refused("queue_full", "2 requests", "at most 2")
    assert frame.body["retryable"] is True
    assert frame.body["retry_after_ms"] > 0
    assert len(story.core.requests) == 2
    story.generate(name="other")
    story.assert_sent(1, "accepted")


def test_a_queue_is_bounded_in_bytes_too() -> None:
    story = Story(queue_bytes=1024)
    story.generate(prompt=True, blobs=[b"x" * 1000])
    story.generate(prompt=True, blobs=[b"x" * 100])
    story.assert_refused("queue_full", "1000 bytes", "1024")
    story.generate(prompt="x" * 24)
    story.assert_sent(1, "accepted", queue_position=1)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"options": {"temprature": 1}}, "did you mean 'temperature'?"),
        ({"options": {"top_p": 2}}, "'top_p' is 2"),
        ({"options": {"seed": True}}, "'seed'"),
        ({"options": [1]}, "options must be a map"),
        ({"name": ""}, "model"),
        ({"name": 3}, "model"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "prompt must be text or true"),
        ({"prompt": None}, "got none"),
        ({"prompt": "a", "tokens": True}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"prompt": True}, "blob is missing"),
        ({"tokens": True}, "blob is missing"),
        ({"tokens": True, "blobs": [b""]}, "empty"),
        ({"tokens": True, "blobs": [b"12345"]}, "no multiple of 4"),
        ({"tokens": [1, 2]}, "tokens must be true with a blob"),
        ({"blobs": [b"1234"]}, "nothing in the body names"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": 1, "content": ""}]}, "role"),
        ({"window": 0}, "window must be an integer from 1"),
        ({"window": True}, "window"),
        ({"priority": 3}, "priority must be an integer from 0 to 2"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"queue_ms": -1}, "queue_ms"),
        ({"batch": 1}, "batch must be true or false"),
        ({"durable": "no"}, "durable"),
        ({"session": 4}, "session"),
        ({"session": "x" * 257}, "session"),
        ({"resume": 1}, "resume must be a map"),
        ({"resume": {"count": 2}, "blobs": [b"1234"]}, "resume.count is 2"),
        ({"resume": {"count": -1}}, "count"),
    ],
)
def test_a_bad_request_names_what_is_wrong(story: Story, body: dict[str, Any], word: str) -> None:
    story.generate(**body)
    story.assert_refused("bad_request", word)
    assert not story.core.requests
    assert not story.core.tombstones


def test_unknown_top_level_keys_are_ignored(story: Story) -> None:
    story.generate(of_a_later_version={"a": 1})
    story.assert_sent(1, "accepted")


@pytest.mark.parametrize(
    "body",
    [
        {"name": b"\0" * 100_000},
        {"options": {"\0" * 100_000: 1}},
        {"prompt": b"\0" * 100_000},
        {"session": b"\0" * 100_000},
        {"options": {"seed": b"\0" * 100_000}},
    ],
)
def test_an_error_about_something_huge_still_travels(story: Story, body: dict[str, Any]) -> None:
    story.generate(**body)
    assert len(story.assert_refused("bad_request").body["message"]) <= 2000


def test_a_body_of_the_largest_size_can_be_handed_to_a_worker(story: Story) -> None:
    """`work` has more fields than `generate` had; the protocol's bound is the client's."""
    body: dict[str, Any] = {"model": "m", "options": {}, "prompt": ""}
    room = wire.MAX_BODY - len(wire.encode(wire.Header("generate"), body)[1]) - 4
    worker = story.ready_worker()
    request = story.generate(prompt="x" * room)
    worker.end(request)
    story.assert_ended(request, "stop")


def test_an_option_with_endless_digits_is_refused(story: Story) -> None:
    story.generate(options={"logit_bias": {"1" * 5000: 1.0}})
    story.assert_refused("bad_request", "logit_bias")


# ---- the same id again ---------------------------------------------------------------------------


def about_duplicate(story: Story, *words: str, link: int = 1) -> None:
    frame = story.assert_sent(link, "error", code="duplicate_id", about=X)
    assert frame.header.id is None, "it must end no stream"
    assert all(word in frame.body["message"] for word in words)


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
    assert story.core.counters.accepted == 1


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
    # What the old run still says is dropped, and its end gives its place back.
    fenced = story.core.counters.fenced
    old = wire.Delta(X, 1, 2, "late", pack_ids([2]))
    assert worker.say(old) == []
    worker.say(wire.Delta(X, 1, 3, "", b"", end={"reason": "cancelled"}))
    assert story.core.counters.fenced == fenced, "the place was still known"
    worker.end(X)
    story.assert_ended(X, "stop", attempt=2)
    assert story.core.counters.accepted == 1
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


def test_an_ended_id_is_remembered(story: Story) -> None:
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
    assert story.core.counters.accepted == 2
    story.assert_conserved()


def test_tombstones_are_forgotten_in_time(story: Story) -> None:
    worker, _ = story.running(request=X)
    worker.end(X)
    assert story.core.tombstones
    story.later(601)
    assert not story.core.tombstones
    story.cancel(X)
    story.assert_sent(1, "fate", state="unknown", pos=0)


def test_tombstones_are_bounded(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.broker.books.TOMBSTONES", 3)
    worker = story.ready_worker()
    for _ in range(5):
        worker.end(story.generate())
        worker.credit()
    assert list(story.core.tombstones) == [request_id(n) for n in (3, 4, 5)]


# ---- cancel --------------------------------------------------------------------------------------


def test_cancel_while_queued(story: Story) -> None:
    request = story.generate()
    story.cancel(request)
    story.assert_sent(1, "fate", id=request, state="queued", pos=0)
    story.assert_sent(1, "done", id=request, reason="cancelled")
    story.assert_idle()
    story.assert_conserved()


def test_cancel_while_assigned(story: Story) -> None:
    worker, request = story.running()
    story.cancel(request)
    story.assert_sent(1, "fate", state="assigned", pos=0)
    story.assert_sent(1, "done", reason="cancelled", pos=0)
    assert worker.cancelled == [(request, 1)]


def test_cancel_while_streaming_keeps_the_place_until_confirmed(story: Story) -> None:
    worker, request = story.running(sequences=1)
    worker.tokens(request, 3)
    story.cancel(request)
    story.assert_sent(1, "fate", state="streaming", pos=3)
    body = story.assert_sent(1, "done", reason="cancelled", pos=3).body
    assert body["usage"]["completion_tokens"] == 3
    waiting = story.generate()
    assert story.request(waiting).state is State.QUEUED
    worker.tokens(request)
    assert story.to_client() == [], "nothing after the terminal"
    worker.confirm(request)
    assert story.to_client() == []
    worker.credit()
    assert waiting in worker.runs


def test_cancel_after_the_end_changes_nothing(story: Story) -> None:
    worker, request = story.running()
    worker.end(request, count=2)
    story.cancel(request)
    story.assert_sent(1, "fate", id=request, state="done", pos=2)
    assert len(story.last) == 1


def test_cancel_twice(story: Story) -> None:
    request = story.generate()
    story.cancel(request)
    story.cancel(request)
    story.assert_sent(1, "fate", state="cancelled")
    assert story.to_client("done") == []


def test_cancel_of_an_unknown_id(story: Story) -> None:
    story.cancel(X)
    story.assert_sent(1, "fate", id=X, state="unknown", pos=0)


def test_what_belongs_to_another_owner_is_unknown(story: Story) -> None:
    _worker, request = story.running()
    story.cancel(request, link=2, owner=BOB)
    story.assert_sent(2, "fate", state="unknown", pos=0)
    assert story.request(request).live
    story.cancel(request)
    story.cancel(request, link=2, owner=BOB)
    story.assert_sent(2, "fate", state="unknown")


def test_the_admin_may_cancel_anything(story: Story) -> None:
    _worker, request = story.running()
    assert story.core.fate(request) == {"state": "assigned", "pos": 0}
    story.cancel(request, link=None, owner=None)
    assert story.to_client("fate") == []
    story.assert_sent(1, "done", reason="cancelled")


def test_a_stranger_cannot_learn_of_a_request(story: Story) -> None:
    request = story.generate()
    assert story.core.fate(request, BOB)["state"] == "unknown"
    assert story.core.fate(request, OWNER)["state"] == "queued"


# ---- workers die ---------------------------------------------------------------------------------


def test_death_in_load_keeps_the_queue_and_restarts_after_the_back_off(story: Story) -> None:
    request = story.generate()
    worker = story.workers["m/0"].hello()
    worker.die("killed by SIGSEGV")
    assert story.started() == []
    assert story.to_client() == []
    story.later(0.9)
    assert story.started() == []
    story.later(0.2)
    assert story.started() == ["m/0"]
    story.ready_worker().end(request)
    story.assert_ended(request, "stop")


def test_death_before_the_first_token_is_told_at_once(story: Story) -> None:
    worker, request = story.running()
    worker.die("killed by SIGKILL")
    frame = story.assert_sent(1, "error", id=request, code="worker_lost", pos=0, retryable=True)
    assert "killed by SIGKILL" in frame.body["message"]
    assert frame.body["details"] == {"worker": "m/0", "cause": "killed by SIGKILL"}
    story.assert_idle()
    story.assert_conserved()


def test_death_in_mid_stream_ends_its_requests_and_no_others(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    requests = [story.generate(link=n) for n in (1, 2, 3)]
    for request in requests[:2]:
        worker.tokens(request, 2)
    elsewhere = story.ready_worker("other")
    other = story.generate(name="other", link=4)
    worker.die()
    for link, request in ((1, requests[0]), (2, requests[1])):
        story.assert_sent(link, "error", id=request, code="worker_lost", pos=2)
    assert story.to_client(link=3) == story.to_client(link=4) == []
    elsewhere.end(other)
    story.assert_ended(other, "stop")
    story.later(1)
    story.ready_worker().end(requests[2])
    story.assert_ended(requests[2], "stop")
    story.assert_conserved()


def test_a_worker_that_had_served_is_restarted_at_once(story: Story) -> None:
    worker, request = story.running(sequences=1)
    worker.end(request)
    worker.credit()
    running, waiting = story.generate(), story.generate()
    worker.die()
    assert story.started() == ["m/0"]
    story.assert_ended(running, "worker_lost")
    story.ready_worker().end(waiting)
    story.assert_ended(waiting, "stop")


def test_a_wanted_model_comes_back_without_a_request(story: Story) -> None:
    worker, _request = story.running()
    worker.die()
    story.later(1)
    assert story.started() == ["m/0"]


def test_a_second_replica_comes_back_too() -> None:
    story = Story({"m": model(replicas=2)})
    story.ready_worker()
    other = story.ready_worker(replica=1)
    other.die()
    story.later(2)
    assert story.started() == ["m/1"]


def fail_in_a_row(story: Story, times: int) -> list[float]:
    """Let the model's workers die in their load; the pauses before each restart."""
    pauses = []
    for number in range(times):
        story.workers["m/0"].die("exit code 3")
        before = story.now
        if number < times - 1:
            while not story.started():
                story.hear()
                story.later(0.5)
            pauses.append(story.now - before)
    return pauses


def test_the_breaker_opens_after_five_failures(story: Story) -> None:
    request = story.generate()
    assert fail_in_a_row(story, 5) == [1, 2, 4, 8]
    frame = story.assert_ended(request, "model_unavailable")
    assert "5 times in a row" in frame.body["message"]
    assert "exit code 3" in frame.body["message"]
    assert frame.body["retry_after_ms"] == 300_000
    assert story.core.model_list()[0]["state"] == "broken"
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


def test_the_operator_closes_the_breaker(story: Story) -> None:
    story.generate()
    fail_in_a_row(story, 5)
    story.do(ev.Load("m"))
    assert story.started() == ["m/0"]
    story.generate()
    story.assert_sent(1, "accepted")


def test_the_back_off_has_a_bound() -> None:
    story = Story(restart_limit=100, restart_delay_max=3.0)
    story.do(ev.Load("m"))
    assert fail_in_a_row(story, 6) == [1, 2, 3, 3, 3]


def test_a_load_failure_tells_all_that_wait_in_the_same_words(story: Story) -> None:
    requests = [story.generate(link=n) for n in (1, 2)]
    asked = story.ask(wire.TOKENIZE, 3, model="m", text="a")
    worker = story.workers["m/0"].hello()
    why = "model.embed_tokens.weight is missing"
    worker.bye("model_load_failed", why)
    assert story.to_client() == []
    worker.die("exit code 1")
    for link, request in ((1, requests[0]), (2, requests[1]), (3, asked)):
        story.assert_sent(link, "error", id=request, code="model_load_failed", message=why)
    story.generate(link=4)
    story.assert_refused("model_load_failed", why, link=4)
    story.ask(wire.TOKENIZE, 5, model="m", text="a")
    story.assert_sent(5, "error", code="model_load_failed", message=why)
    assert story.started() == []
    story.later(1)
    assert story.started() == [], "nobody waits for it"
    story.generate()
    story.assert_sent(1, "accepted")
    assert story.started() == ["m/0"]


def test_a_worker_that_cannot_be_started_is_a_load_failure(story: Story) -> None:
    request = story.generate()
    story.do(ev.SpawnFailed("m/0", "cannot start the worker of 'm': no more processes"))
    story.assert_sent(1, "error", id=request, code="model_load_failed")
    assert story.model().workers == []


def test_the_pid_of_a_worker_is_known_once_it_is_started(story: Story) -> None:
    story.do(ev.Load("m"))
    story.do(ev.Spawned("m/0", 4711))
    assert story.model().workers[0].pid == 4711


# ---- time ----------------------------------------------------------------------------------------


def test_deadline_in_the_queue(story: Story) -> None:
    request = story.generate(deadline_ms=1500)
    story.later(1.4)
    assert story.to_client() == []
    story.hear()
    story.later(0.1)
    story.assert_sent(1, "error", id=request, code="deadline_exceeded")
    story.assert_idle()


def test_deadline_in_mid_stream_stops_the_run(story: Story) -> None:
    worker, request = story.running(deadline_ms=2000)
    worker.tokens(request, 3)
    story.later(2)
    frame = story.assert_sent(1, "error", code="deadline_exceeded", pos=3)
    assert "2.000 s" in frame.body["message"] and "3 tokens" in frame.body["message"]
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
    assert "queue_ms" in frame.body["message"]
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
    assert worker.state is WorkerState.DRAINING
    worker.die("stopped")
    story.later(100)
    assert story.started() == []
    assert story.core.model_list()[0]["state"] == "cold"


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
def test_keep_alive_for_ever_and_not_at_all(keep_alive: float, stopped: bool) -> None:
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


def test_past_the_window_deltas_merge_until_an_ack(story: Story) -> None:
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


def test_tail_and_terminal_pass_a_shut_window(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    assert worker.tokens(request, 2) == []
    worker.end(request, count=1)
    assert [a.header.kind for a in story.to_client()] == ["delta", "done"]
    story.assert_sent(1, "done", pos=4)
    assert story.heard[request, 1].ids == [0, 1, 2, 3]


def test_what_waits_goes_out_before_the_error_of_a_lost_worker(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 5)
    worker.die()
    story.assert_sent(1, "error", code="worker_lost", pos=6)


def test_logprobs_and_facts_survive_the_merging(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1, facts={"prompt_tokens": 2})
    assert story.assert_sent(1, "delta").body["facts"] == {"prompt_tokens": 2}
    for number in (1, 2):
        worker.tokens(request, 1, logprobs=[{"logprob": -number}])
    story.ack(request, 1)
    frame = story.assert_sent(1, "delta", n=2)
    assert frame.body["logprobs"] == [{"logprob": -1}, {"logprob": -2}]


def test_no_ack_behind_a_shut_window_is_a_slow_consumer(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 2)
    worker.tokens(request, 2)
    for _ in range(29):
        story.later(1)
        story.hear()
    assert request in story.core.requests
    story.later(1)
    frame = story.assert_sent(1, "error", id=request, code="slow_consumer", pos=2)
    assert "no ack for 30 s" in frame.body["message"]
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
    assert request in story.core.requests
    story.ack(request, 3)
    story.assert_sent(1, "delta", pos=3)


def test_an_open_window_needs_no_ack(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 3)
    for _ in range(100):
        story.later(1)
        story.hear()
    assert request in story.core.requests


def test_too_much_unread_is_a_slow_consumer() -> None:
    story = Story(unread_bytes=4096)
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 1, text="x" * 1000)
    assert story.to_client() == []
    worker.tokens(request, 1, text="x" * 1000)
    frame = story.assert_sent(1, "error", code="slow_consumer", pos=1)
    assert "4096" in frame.body["message"]


def test_an_ack_beyond_what_was_sent_ends_no_stream(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    story.ack(request, 3)
    frame = story.assert_sent(1, "error", code="bad_request")
    assert frame.header.id is None and "about" in frame.body
    assert "2 sent" in frame.body["message"]
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
def test_an_ack_that_makes_no_sense(story: Story, have: Any) -> None:
    story.generate()
    story.do(ev.Ack(1, have))
    frame = story.assert_sent(1, "error", code="bad_request")
    assert frame.header.id is None and "about" in frame.body


def test_acks_of_ended_or_foreign_streams_are_nothing(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 1)
    assert story.ack(request, 1, link=9) == []
    worker.end(request)
    assert story.ack(request, 2) == []
    assert story.ack(X, 2) == []


# ---- links ---------------------------------------------------------------------------------------


def test_a_silent_links_streams_are_cancelled_after_the_grace(story: Story) -> None:
    worker, streaming = story.running(sequences=1)
    worker.tokens(streaming)
    queued = story.generate()
    other = story.generate(link=2)
    for _ in range(3):
        story.later(3)
        story.hear(2)
    assert story.to_client("done") == []
    story.later(1)
    for request in (streaming, queued):
        story.assert_ended(request, "cancelled")
    assert worker.cancelled == [(streaming, 1)]
    assert other in story.core.requests
    assert list(story.core.links) == [2]


def test_a_link_that_is_heard_lives_on(story: Story) -> None:
    request = story.generate()
    for _ in range(10):
        story.later(5)
        story.hear()
    assert request in story.core.requests


def test_nothing_is_sent_on_a_lost_link_and_its_streams_end_in_time(story: Story) -> None:
    worker, request = story.running()
    story.do(ev.LinkLost(1))
    story.do(ev.LinkLost(1))
    assert story.core.counters.links_lost == 1
    worker.tokens(request)
    assert story.to_client() == []
    story.later(10)
    assert story.to_client() == []
    assert worker.cancelled == [(request, 1)]
    assert story.core.counters.cancelled == 1
    story.assert_conserved()


def test_the_loss_of_an_unknown_link_is_nothing(story: Story) -> None:
    assert story.do(ev.LinkLost(4)) == []


def test_a_links_end_and_a_deadline_at_one_wake(story: Story) -> None:
    """As after a suspend of the machine: everything is due at once."""
    requests = [story.generate(deadline_ms=20_000) for _ in range(2)]
    story.now += 100
    story.do(ev.Wake())
    for request in requests:
        assert story.heard[request, 1].ended is not None
    story.assert_conserved()
    story.assert_idle()


# ---- what no longer counts -----------------------------------------------------------------------


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
        ev.WorkerBeat(epoch, {}),
        ev.WorkerCredit(epoch, {"sequences": 9, "works": 0}),
    ):
        before = story.core.counters.fenced
        assert story.do(event) == []
        assert story.core.counters.fenced == before + 1
    story.do(ev.WorkerBye(epoch, {"code": "internal", "message": "old"}))
    again.end(request)
    story.assert_ended(request, "stop", attempt=2)


def test_a_place_that_the_worker_does_not_have_is_fenced(story: Story) -> None:
    worker, request = story.running()
    for strange in (
        wire.Delta(X, 1, 0, "x", pack_ids([0])),
        wire.Delta(request, 2, 0, "x", pack_ids([0])),
    ):
        before = story.core.counters.fenced
        assert worker.say(strange) == []
        assert story.core.counters.fenced == before + 1
    worker.end(request)
    story.assert_ended(request, "stop")
    worker.say(wire.Delta(request, 1, 0, "", b"", end={"reason": "stop"}))
    assert story.to_client() == []


def test_a_second_hello_is_not_welcomed(story: Story) -> None:
    worker = story.ready_worker()
    assert story.do(ev.WorkerHello("m/0", {})) == []
    assert worker.state is WorkerState.READY


def test_a_wrong_position_condemns_the_worker(story: Story) -> None:
    worker = story.ready_worker(sequences=2)
    bad, good = story.generate(), story.generate(link=2)
    worker.tokens(good, 2)
    worker.tokens(bad, 1)
    worker.tokens(bad, 1, pos=5)
    assert story.stopped() == ["m/0"]
    assert worker.state is WorkerState.CONDEMNED
    frame = story.assert_sent(1, "error", id=bad, code="worker_lost", pos=1)
    assert "position 5 where 1 was due" in frame.body["message"]
    story.assert_sent(2, "error", id=good, code="worker_lost", pos=2)
    # Whatever it says now is fenced; its slot is refilled when the process is gone.
    assert worker.tokens(good) == []
    waiting = story.generate()
    assert story.started() == []
    worker.die("stopped")
    while not story.started():
        story.later(0.5)
    story.ready_worker().end(waiting)
    story.assert_ended(waiting, "stop")
    story.assert_conserved()


# ---- batches -------------------------------------------------------------------------------------


def test_deltas_are_grouped_for_each_link_that_asked_for_it(story: Story) -> None:
    worker = story.ready_worker(sequences=4)
    a, b = (story.generate(link=1, batch=True) for _ in range(2))
    c = story.generate(link=2, batch=True)
    d = story.generate(link=1)
    worker.say(*(worker.row(r, n) for r, n in ((a, 1), (b, 2), (c, 3), (d, 4))))
    grouped = story.assert_sent(1, "deltas")
    assert [row[0] for row in grouped.body["rows"]] == [a, b]
    assert len(grouped.blobs[0]) == 4 * 3
    assert [row[0] for row in story.assert_sent(2, "deltas").body["rows"]] == [c]
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


def test_a_condemned_worker_sends_nothing_after_its_streams_ends(story: Story) -> None:
    worker = story.ready_worker()
    good, bad = story.generate(batch=True), story.generate(batch=True)
    worker.say(worker.row(good, 2), worker.row(bad, 1, pos=7))
    story.assert_ended(good, "worker_lost")
    assert story.heard[good, 1].ids == [0, 1]


# ---- questions -----------------------------------------------------------------------------------


def test_ping(story: Story) -> None:
    story.ask(wire.PING, 6)
    story.assert_sent(6, "pong", boot=BOOT, link=6, version=1, attempt=3)


def test_models(story: Story) -> None:
    story.ready_worker()
    story.ask(wire.MODELS)
    models = story.assert_sent(1, "models").body["models"]
    assert models == [
        {"name": "m", "state": "ready", "queued": 0, "context": 2048},
        {"name": "other", "state": "cold", "queued": 0, "context": 0},
    ]


@pytest.mark.parametrize("kind", [wire.TOKENIZE, wire.DETOKENIZE])
def test_a_question_for_a_worker_starts_it_and_is_forwarded(story: Story, kind: str) -> None:
    ident = story.ask(kind, 1, b"blob", model="m", text="a")
    assert story.started() == ["m/0"]
    worker = story.ready_worker()
    (asked,) = worker.asked
    assert (asked.header.kind, asked.header.id, asked.blobs) == (kind, ident, (b"blob",))
    story.do(ev.WorkerTokens(worker.epoch, ident, {"text": "a"}, (b"1234",)))
    frame = story.assert_sent(1, "tokens", id=ident, attempt=3, text="a")
    assert frame.blobs == (b"1234",)
    assert story.do(ev.WorkerTokens(worker.epoch, ident, {}, ())) == []
    story.assert_idle()


def test_a_question_that_the_worker_refuses(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(wire.TOKENIZE, model="m", text="a")
    story.do(ev.WorkerTokens(worker.epoch, ident, {"code": "bad_request", "message": "no"}, ()))
    story.assert_sent(1, "error", id=ident, code="bad_request")


@pytest.mark.parametrize(
    ("body", "code"),
    [({"model": "x"}, "unknown_model"), ({}, "bad_request"), ({"model": 3}, "bad_request")],
)
def test_a_question_about_no_model(story: Story, body: dict[str, Any], code: str) -> None:
    ident = story.ask(wire.TOKENIZE, **body)
    story.assert_sent(1, "error", id=ident, code=code)


def test_a_question_with_an_id_that_is_under_way_is_refused(story: Story) -> None:
    worker = story.ready_worker()
    for _ in range(2):
        story.do(ev.Ask(1, wire.TOKENIZE, X, 3, {"model": "m", "text": "a"}, ()))
    story.assert_sent(1, "error", id=X, code="duplicate_id")
    assert len(worker.asked) == 1


def test_questions_that_wait_are_bounded() -> None:
    story = Story(queue_limit=2)
    for _ in range(3):
        story.ask(wire.TOKENIZE, model="m", text="a")
    story.assert_sent(1, "error", code="queue_full")


def test_a_question_ends_with_its_worker(story: Story) -> None:
    worker = story.ready_worker()
    ident = story.ask(wire.TOKENIZE, model="m", text="a")
    worker.die()
    story.assert_sent(1, "error", id=ident, code="worker_lost")
    story.assert_idle()


def test_a_question_for_a_draining_model_is_answered_by_the_next_worker(story: Story) -> None:
    worker = story.ready_worker()
    story.do(ev.Unload("m"))
    ident = story.ask(wire.TOKENIZE, model="m", text="a")
    worker.die("stopped")
    assert story.started() == ["m/0"]
    assert story.ready_worker().asked[0].header.id == ident


def test_a_model_without_keep_alive_answers_a_question_before_it_goes() -> None:
    story = Story({"m": model(keep_alive=0)})
    ident = story.ask(wire.TOKENIZE, model="m", text="a")
    worker = story.ready_worker()
    story.later(1)
    assert not worker.stopped
    story.do(ev.WorkerTokens(worker.epoch, ident, {}, (b"1234",)))
    story.assert_sent(1, "tokens", id=ident)
    story.later(1)
    assert worker.stopped


def test_a_beat_is_answered_and_kept(story: Story) -> None:
    worker = story.ready_worker()
    story.do(ev.WorkerBeat(worker.epoch, {"phase": "decode"}))
    assert worker.heard == 1
    assert story.model().workers[0].beat["phase"] == "decode"


# ---- operations ----------------------------------------------------------------------------------


def everything_at_once(story: Story) -> tuple[FakeWorker, dict[str, bytes]]:
    """A stream, an assigned, a queued request and two questions."""
    worker = story.ready_worker(sequences=2)
    streaming = story.generate(link=1)
    worker.tokens(streaming, 2)
    assigned, queued = story.generate(link=2), story.generate(link=3)
    waiting = story.ask(wire.TOKENIZE, 4, model="other", text="a")
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
    story.ask(wire.TOKENIZE, 6, model="m", text="a")
    story.assert_sent(6, "error", code="draining")
    worker.die("stopped")
    story.workers["other/0"].die("stopped")
    story.later(1000)
    assert story.started() == []
    story.assert_idle()


def test_nothing_starts_a_worker_once_the_broker_goes_down(story: Story) -> None:
    story.do(ev.Shutdown())
    story.do(ev.Load("m"))
    assert story.started() == []


def test_unload_by_the_operator_ends_what_runs(story: Story) -> None:
    worker, request = story.running()
    story.do(ev.Unload("m"))
    frame = story.assert_sent(1, "error", id=request, code="worker_lost")
    assert "unloaded by the operator" in frame.body["message"]
    assert story.stopped() == ["m/0"]
    story.do(ev.Unload("m"))
    assert story.stopped() == []
    worker.die("stopped")
    story.later(1000)
    assert story.started() == []
    assert story.model().failures == 0


def test_unload_leaves_what_waits_to_the_next_worker(story: Story) -> None:
    worker, _running = story.running(sequences=1)
    waiting = story.generate()
    story.do(ev.Unload("m"))
    assert waiting in story.core.requests
    worker.die("stopped")
    assert story.started() == ["m/0"]
    story.ready_worker().end(waiting)
    story.assert_ended(waiting, "stop")


def test_a_worker_that_is_unloaded_while_it_starts_is_not_welcomed(story: Story) -> None:
    story.do(ev.Load("m"))
    story.do(ev.Unload("m"))
    assert story.stopped() == ["m/0"]
    assert story.do(ev.WorkerHello("m/0", {})) == []


def test_load_by_the_operator(story: Story) -> None:
    story.do(ev.Load("m"))
    assert story.started() == ["m/0"]
    story.do(ev.Load("m"))
    assert story.started() == []


def test_an_end_that_nobody_knows_is_nothing(story: Story) -> None:
    assert story.do(ev.WorkerExited("m/0", "killed")) == []
    assert story.do(ev.Spawned("m/0", 1)) == []
    assert story.do(ev.SpawnFailed("m/0", "no")) == []
