"""`POST /jobs` of the broker's HTTP server: allowed requests, and the form of answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpool.broker.http.loop_exchange import LoopQueue
from mlxpool.broker.http.operator_routes import JobsRoute, Question
from mlxpool.common.errors import BadRequest

ID = "0a" * 16


@pytest.fixture
def route() -> Iterator[JobsRoute]:
    with LoopQueue[Question]() as queue:
        yield JobsRoute(queue, b"digest")


@pytest.mark.parametrize(
    ("asked", "question"),
    [
        ({"ask": "jobs"}, ("jobs", {})),
        ({"ask": "jobs", "state": "dead", "batch": ID}, ("jobs", {"state": "dead", "batch": ID})),
        ({"ask": "job", "job": ID}, ("job", {"job": ID})),
        ({"ask": "retry", "owner": "uid:1", "key": "a"}, ("retry", {"owner": "uid:1", "key": "a"})),
        ({"ask": "notices", "after": 3}, ("notices", {"after": 3})),
    ],
)
def test_questions(route: JobsRoute, asked: dict[str, Any], question: tuple[str, Any]) -> None:
    kind, body = route.parse(asked, "peer")
    shown = {k: v.hex() if isinstance(v, bytes) else v for k, v in body.items()}
    assert (kind, shown) == question


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"ask": "export_jobs"},
        {"ask": "verify_jobs"},
        {"ask": "stop"},
        {"ask": ["jobs"]},
        {"ask": "jobs", "state": "none"},
        {"ask": "jobs", "limit": 5000},
        {"ask": "job"},
        {"ask": "job", "job": "0a"},
        {"ask": "job", "job": 5},
        {"ask": "job", "job": ID, "key": "a"},
        {"ask": "jobs", "batch": "xx"},
    ],
)
def test_what_cannot_be_asked_is_refused(route: JobsRoute, asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        route.parse(asked, "peer")


def test_bytes_become_text(route: JobsRoute) -> None:
    answer = {"jobs": [{"job": b"\x0a" * 16, "batch": None, "data": b"ab"}]}
    assert route.shown(answer) == {"jobs": [{"job": ID, "batch": None, "data": "YWI="}]}


def test_the_log_says_what_was_asked_of_which_job(
    route: JobsRoute, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        route.parse({"ask": "cancel_job", "job": ID}, "127.0.0.1")
        route.parse({"ask": "jobs"}, "127.0.0.1")
    (record,) = caplog.records
    assert (record.__dict__["command"], record.__dict__["job"]) == ("cancel_job", ID)
