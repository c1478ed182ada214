"""Ids of requests, and the fields of a request in the access log."""

from __future__ import annotations

import pytest

from mlxpool.gateway.operations.exchange import Exchange, request_id, shown_path


@pytest.mark.parametrize(
    "given",
    [
        "a",
        "7f9c2ba4-e88f-4a3b-9c1d-0123456789ab",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "Root=1-67891233-abcdef012345678912345678",
        "105445aa7843bc8bf206b12000100000/1;o=1",
        "x" * 128,
    ],
)
def test_a_sane_id_is_taken(given: str) -> None:
    assert request_id(given, "made") == given


@pytest.mark.parametrize(
    "given", [None, "", " ", "a b", "a\tb", 'a"b', "-a", "ä", "x" * 129, "a\n"]
)
def test_another_one_is_replaced(given: str | None) -> None:
    assert request_id(given, "made") == "made"


def test_the_fields_of_a_line() -> None:
    exchange = Exchange("id", "POST", "/v1/completions", started=10.0, key="alice", model="m")
    exchange.status, exchange.first_token = 200, 10.25
    usage = {"prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": 3}
    exchange.count(usage)
    exchange.count(usage, prompt=False)
    fields = exchange.fields(11.5)
    assert fields == {
        "request_id": "id",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "duration_ms": 1500.0,
        "client": None,
        "key": "alice",
        "path": None,
        "model": "m",
        "streamed": False,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 6,
        "first_token_ms": 250.0,
        "pool_id": None,
        "error": None,
    }


def test_a_request_without_tokens_has_none() -> None:
    fields = Exchange("id", "GET", "/health", started=0.0).fields(1.0)
    assert fields["prompt_tokens"] is None and fields["first_token_ms"] is None
    counted = Exchange("id", "POST", "/v1/embeddings", started=0.0)
    counted.count({"prompt_tokens": 4, "total_tokens": 4})
    assert (counted.prompt_tokens, counted.completion_tokens) == (4, None)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/chat/completion", "/v1/chat/completion"),
        ("/favicon.ico", "/favicon.ico"),
        ("http://example.com:443/v1/models", "http://example.com:443/v1/models"),
        (f"/v1/{'k' * 16}", "/v1/…"),
        ("/v1/chat/sk-5d0c3ad2/x", "/v1/chat/…/x"),
        ("/aB3dEf/9b41f60e/gh", "/…/…/gh"),  # a key in base64 may have slashes
        ("/correct-horse-battery-staple", "/…"),
        ("/a\nb", "/…"),
    ],
)
def test_parts_of_a_path_that_may_be_a_key_are_not_shown(path: str, shown: str) -> None:
    assert shown_path(path) == shown
