"""Messages about jobs: valid bodies, and errors that name the faulty key."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept import job_messages as jobs
from mlxpool.common.protocol.kept.job_messages import (
    Fetch,
    JobAccepted,
    JobList,
    JobName,
    ListJobs,
    Submit,
    names_a_job,
    parse_question,
)

BODY = {"model": "m", "prompt": "hello", "key": "k"}


def test_a_submission_has_the_request_without_the_keys_of_the_job() -> None:
    body = {**BODY, "keep_ms": 5, "not_before": 7, "priority": -1, "tenant": "t"}
    submit = Submit.parse({**body, "options": {"max_tokens": 3}}, ())
    assert submit.request == {"model": "m", "prompt": "hello", "options": {"max_tokens": 3}}
    assert (submit.keep_ms, submit.not_before, submit.priority, submit.tenant) == (5, 7.0, -1, "t")
    assert isinstance(submit.work, Generate) and submit.work.options.max_tokens == 3


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"key": None}, "key must be 1 to 256 printable characters, got None"),
        ({"key": ""}, "key must be"),
        ({"key": "x" * 257}, "key must be"),
        ({"key": "a\nb"}, "key must be"),
        ({"resume": {}}, "resume is of streams"),
        ({"queue_ms": 1}, "queue_ms is of streams"),
        ({"first_token_ms": 1}, "first_token_ms is of streams"),
        ({"window": 1}, "window is of streams"),
        ({"batch": True}, "batch is of streams"),
        ({"durable": False}, "durable is of streams"),
        ({"choice": {}}, "choice is of streams"),
        ({"options": {"echo": True}}, "echo and prompt_logprobs are of streams"),
        ({"keep_ms": -1}, "keep_ms must be an integer from 0"),
        ({"priority": 3}, "priority must be an integer from -1 to 2"),
        ({"not_before": "soon"}, "not_before must be a time"),
        ({"not_before": float("nan")}, "not_before must be a time"),
        ({"tenant": 5}, "tenant must be text"),
        ({"tenant": "t\0"}, "tenant must be printable characters"),
        ({"model": ""}, "model must be a name"),
    ],
)
def test_what_is_no_submission_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        Submit.parse({**BODY, **changed}, ())


def test_a_job_has_one_name() -> None:
    assert JobName.parse({"key": "k"}) == JobName("k")
    assert JobName.parse({"job": bytes(16), "tenant": "t"}) == JobName("", bytes(16), "t")
    for body in ({}, {"key": "k", "job": bytes(16)}, {"job": b"short"}, {"key": 5}):
        with pytest.raises(BadRequest):
            JobName.parse(body)


@pytest.mark.parametrize("name", [JobName("k"), JobName("", bytes(16), "t")])
def test_questions_come_back_as_they_were_sent(name: JobName) -> None:
    fetch = Fetch(name, 5, 2, 77)
    assert Fetch.parse(fetch.body()) == fetch
    for asked in (ListJobs(after=0), ListJobs(None, 7, "dead", "t", 5)):
        assert ListJobs.parse(asked.body()) == asked
    for kind in jobs.JOB_CALLS:
        assert parse_question(kind, name.body(), ()) == jobs.AboutJob(kind, name)


def test_lists_are_of_ends_or_of_a_state() -> None:
    with pytest.raises(BadRequest, match="one of after and state"):
        ListJobs.parse({"after": 1, "state": "done"})
    with pytest.raises(BadRequest, match="state must be one of waiting"):
        ListJobs.parse({"state": "lost"})


def test_a_cancel_of_a_job_names_one() -> None:
    assert names_a_job(Message(Header("cancel"), {"key": "k"}))
    assert not names_a_job(Message(Header("cancel", bytes(16)), {}))
    assert not names_a_job(Message(Header("generate"), {"key": "k"}))


def test_answers_come_back_as_they_were_sent() -> None:
    accepted = JobAccepted(1, 2, bytes(16), "k", 3, 4, "waiting", ("w",))
    assert JobAccepted.parse(accepted.body()) == accepted
    listed = JobList([{"key": "k"}], 9)
    assert JobList.parse(listed.body()) == listed
