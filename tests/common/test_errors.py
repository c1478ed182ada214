"""The hierarchy of exceptions, and the bodies of error messages."""

from __future__ import annotations

import pytest

from mlxpool.common import errors
from mlxpool.common.errors import BY_CODE, ClientFault, PoolError, PoolFault, from_body

CLIENTS = {
    "bad_request",
    "unknown_model",
    "context_exceeded",
    "unauthorized",
    "version_mismatch",
    "too_large",
    "duplicate_id",
    "slow_consumer",
    "poisoned",
    "unknown_job",
    "gone",
    "job_restarted",
    "jobs_off",
}
POOLS = {
    "queue_full",
    "over_quota",
    "deadline_exceeded",
    "worker_lost",
    "broker_lost",
    "model_unavailable",
    "model_load_failed",
    "out_of_memory",
    "draining",
    "store_full",
    "store_unavailable",
    "damaged",
    "internal",
}


def test_the_codes_are_complete_and_split_by_fault() -> None:
    assert set(BY_CODE) == CLIENTS | POOLS
    assert {c for c, kind in BY_CODE.items() if issubclass(kind, ClientFault)} == CLIENTS
    assert {c for c, kind in BY_CODE.items() if issubclass(kind, PoolFault)} == POOLS


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for code, kind in BY_CODE.items():
        line = next(line for line in errors.__doc__.splitlines() if f" {code}" in line)
        assert kind.__name__ in line
        assert ("retryable" in line) is kind.retryable


def test_no_client_fault_is_retryable() -> None:
    assert not any(kind.retryable for kind in BY_CODE.values() if issubclass(kind, ClientFault))


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_a_body_comes_back_as_the_same_error(code: str) -> None:
    error = BY_CODE[code]("why", details={"a": 1}, retry_after_ms=5)
    again = from_body(error.body())
    assert type(again) is type(error)
    assert again.body() == error.body()
    assert str(again) == again.message == "why"
    assert error.body()["retryable"] is BY_CODE[code].retryable


def test_what_is_not_known_is_left_out() -> None:
    body = PoolError("why").body()
    assert body == {"code": "internal", "message": "why", "retryable": False}


def test_a_message_has_a_bound() -> None:
    assert len(errors.BadRequest("x" * 10**6).body()["message"]) == errors.MAX_MESSAGE
    assert len(errors.BadRequest("\udcff" * 10**6).body()["message"]) == errors.MAX_MESSAGE


def test_the_words_are_unicode_whatever_they_quote() -> None:
    assert errors.BadRequest("no file model\udcff, né").body()["message"] == (
        "no file model\\udcff, né"
    )


def test_an_unknown_code_keeps_its_code() -> None:
    error = from_body({"code": "of_tomorrow", "message": "m", "retryable": True})
    assert type(error) is PoolError
    assert error.body() == {"code": "of_tomorrow", "message": "m", "retryable": True}
    assert PoolError.code == "internal", "the class stays as it is"


@pytest.mark.parametrize("body", [{}, {"code": 1}, {"details": 3, "retry_after_ms": "x"}])
def test_a_poor_body_is_an_error_all_the_same(body: dict[str, object]) -> None:
    error = from_body(body)
    assert isinstance(error, PoolError)
    assert (error.details, error.retry_after_ms) == ({}, None)
