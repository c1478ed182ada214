"""The life of a request: each message, and the messages that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core import actions as act
from mlxpool.broker.requests.request import RequestState
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.token_ids import pack_ids
from support import core_events as make
from support.core_harness import (
    BOOT,
    ENTROPY,
    Story,
    body_of,
    model,
)

# ---- a request's life ----------------------------------------------------------------------------


def test_a_request_from_the_queue_to_its_end(story: Story) -> None:
    request = story.generate()
    assert story.started() == ["m/0"]
    assert story.request(request).state is RequestState.QUEUED
    worker = story.ready_worker()
    assert story.request(request).state is RequestState.ASSIGNED
    worker.tokens(request, 2)
    story.assert_sent(1, "delta", id=request, pos=0, text="<0><1>", n=2)
    assert story.request(request).state is RequestState.STREAMING
    worker.end(request, "length", count=1, rest="tail")
    story.assert_sent(1, "delta", pos=2, n=1)
    story.assert_sent(1, "done", id=request, pos=3, reason="length", text="tail", attempts=1)
    assert story.heard[request, 1].ids == [0, 1, 2]
    assert story.heard[request, 1].text == "<0><1><2>tail"
    story.assert_idle()
    story.assert_conserved()


def test_accepted_has_the_position_in_the_queue(story: Story) -> None:
    story.generate()
    request = story.generate(link=5, options={"seed": 9})
    frame = story.assert_sent(
        5, "accepted", boot=BOOT, link=5, queue_position=1, seed=9, id=request
    )
    assert frame.header.attempt == 1


def test_accepted_has_a_warning_for_a_key_that_is_ignored(story: Story) -> None:
    story.generate(later=1)
    story.assert_sent(1, "accepted", warnings=["the unknown key 'later' is ignored"])


def test_a_request_without_a_seed_gets_the_entropy_of_its_event(story: Story) -> None:
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


def test_a_prompt_that_is_cancelled_while_it_is_read_has_its_tokens_in_usage(story: Story) -> None:
    request = story.generate()
    worker = story.ready_worker()
    number = worker.runs[request].attempt
    story.do(make.prompts(worker.epoch, (request, number + 1, 7)))  # a report of another run
    story.do(make.prompts(worker.epoch + 1, (request, number, 8)))  # of another worker
    story.do(make.prompts(worker.epoch, (request, number, 300), (b"x" * 16, 1, 5)))
    story.cancel(request)
    usage = body_of(story.assert_sent(1, "done", id=request))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (300, 0)
    assert usage["total_tokens"] == 300


def test_usage_and_timings_of_done(story: Story) -> None:
    request = story.generate()
    story.later(2)
    worker = story.ready_worker()
    story.later(1)
    worker.tokens(request)
    story.later(1)
    worker.end(request, "stop", count=4)
    body = body_of(story.assert_ended(request, "stop"))
    assert body["usage"] == {"completion_tokens": 4}
    assert body["timings_ms"] == {"queue": 2000.0, "first_token": 3000.0, "total": 4000.0}


def test_the_log_line_of_a_request_has_no_text(story: Story) -> None:
    worker, request = story.running(prompt="a secret")
    worker.tokens(request, 1, facts={"prompt_tokens": 3})
    worker.end(request, rest="private")
    notes = [a for a in story.last if isinstance(a, act.Note) and a.event == "request"]
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


def test_a_worker_never_gets_more_work_than_it_has_credit_for(story: Story) -> None:
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
    # The worker sent this credit before the work arrived: two free sequences, no work received.
    story.do(make.credit(worker.epoch, {"sequences": 2, "works": 0}))
    story.generate()
    third = story.generate()
    assert story.request(third).state is RequestState.QUEUED


def test_work_goes_to_the_worker_with_most_credit() -> None:
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
    assert story.core.state.counters.failures["context_exceeded"] == 1
    story.assert_conserved()


# ---- refused before accepted ---------------------------------------------------------------------


def test_an_error_about_an_unknown_model_names_the_nearest(story: Story) -> None:
    story.generate(name="othr")
    story.assert_refused("unknown_model", "'othr'", "did you mean 'other'?")
    assert story.core.state.counters.rejected["unknown_model"] == 1
    story.assert_idle()


def test_an_error_about_a_model_like_no_other_names_all(story: Story) -> None:
    story.generate(name="zzzz")
    story.assert_refused("unknown_model", "known: m, other")


def test_the_error_of_a_full_queue_has_its_numbers() -> None:
    story = Story(queue_limit=2)
    story.generate(), story.generate()
    story.generate()
    frame = story.assert_refused("queue_full", "2 requests", "at most 2")
    assert body_of(frame)["retryable"] is True
    assert body_of(frame)["retry_after_ms"] > 0
    assert len(story.core.state.requests) == 2
    story.generate(name="other")
    story.assert_sent(1, "accepted")


def test_a_queue_is_bounded_in_bytes_too() -> None:
    story = Story(queue_bytes=1024)
    story.generate(prompt=True, blobs=[b"x" * 1000])
    story.generate(prompt=True, blobs=[b"x" * 100])
    story.assert_refused("queue_full", "1000 bytes", "1024")
    story.generate(prompt="x" * 24)
    story.assert_sent(1, "accepted", queue_position=1)


def test_formats_count_in_the_bytes_of_a_queue() -> None:
    story, choice = Story(queue_bytes=1024), {"type": "choice", "choices": ["x" * 970]}
    story.generate(prompt="ab", options={"format": choice})
    story.generate(prompt="x" * 100)
    story.assert_refused("queue_full", "1004 bytes", "1024")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"options": {"temprature": 1}}, "did you mean 'temperature'?"),
        ({"options": {"top_p": 2}}, "'top_p' is 2"),
        ({"options": {"seed": True}}, "'seed'"),
        ({"options": [1]}, "options must be a map"),
        ({"name": ""}, "model"),
        ({"name": 3}, "model"),
        ({"prompt": 3}, "prompt must be text or true"),
        ({"prompt": None}, "got none"),
        ({"prompt": "a", "tokens": True}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"prompt": True}, "blob is missing"),
        ({"tokens": True}, "blob is missing"),
        ({"tokens": True, "blobs": [b""]}, "empty"),
        ({"tokens": True, "blobs": [b"12345"]}, "no multiple of 4"),
        ({"tokens": [1, 2]}, "tokens must be true with a blob"),
        ({"blobs": [b"1234"]}, "the body does not mention"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": 1, "content": ""}]}, "role"),
        ({"messages": [{"role": "robot", "content": ""}]}, "must be one of system"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": ""}], "tools": "x"}, "tools must be a list"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "tools go with messages"),
        ({"prompt": "a", "think": False}, "think goes with messages"),
        ({"messages": [{"role": "user", "content": "a"}], "think": "much"}, "think must be true"),
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
    assert not story.core.state.requests
    assert not story.core.state.tombstones


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
def test_an_error_about_a_huge_value_fits_into_a_message(
    story: Story, body: dict[str, Any]
) -> None:
    story.generate(**body)
    assert len(body_of(story.assert_refused("bad_request"))["message"]) <= 2000


def test_a_body_of_the_largest_size_can_be_handed_to_a_worker(story: Story) -> None:
    """The size limit applies to the client's `generate`; the longer `work` may exceed it."""
    body: dict[str, Any] = {"model": "m", "options": {}, "prompt": ""}
    room = frames.MAX_BODY - len(frames.encode(frames.Header("generate"), body)[1]) - 4
    worker = story.ready_worker()
    request = story.generate(prompt="x" * room)
    worker.end(request)
    story.assert_ended(request, "stop")


def test_an_option_with_endless_digits_is_refused(story: Story) -> None:
    story.generate(options={"logit_bias": {"1" * 5000: 1.0}})
    story.assert_refused("bad_request", "logit_bias")


def test_two_streams_of_one_worker_are_kept_apart(story: Story) -> None:
    worker = story.ready_worker()
    first, second = story.generate(link=1), story.generate(link=2)
    worker.say(worker.row(first, 1), worker.row(second, 1))
    for _ in range(3):
        worker.say(worker.row(second, 1))
        assert [frame.link for frame in story.to_client()] == [2]
        worker.say(worker.row(first, 1))
        assert [frame.link for frame in story.to_client()] == [1]


# ---- the default of max_tokens -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "own", "named", "given"),
    [
        (0, 0, None, -1),
        (100, 0, None, 100),
        (100, 7, None, 7),
        (100, 7, 3, 3),
        (100, 7, 0, 0),  # named = 0: up to the context
        (100, 7, -1, 7),
    ],
)
def test_a_request_that_names_no_max_tokens_gets_that_of_the_settings(
    pool: int, own: int, named: int | None, given: int
) -> None:
    story = Story({"m": model(default_max_tokens=own)}, default_max_tokens=pool)
    request = story.generate(options={} if named is None else {"max_tokens": named})
    worker = story.ready_worker()
    assert worker.runs[request].body["options"]["max_tokens"] == given
