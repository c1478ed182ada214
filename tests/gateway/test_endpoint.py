"""What an endpoint does with work that fails in a way nobody thought of. No network."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.requests import Request

from mlxpool.gateway.app import Endpoint
from mlxpool.gateway.http import Reply, unless_gone

SCOPE = {"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""}


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def answered(error: Exception, *, began: bool) -> list[dict[str, Any]]:
    """What is sent when the work raises this, before or after its reply has begun."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def work(request: Request, reply: Reply) -> None:
        if began:
            await reply.open("text/plain")
        raise error

    asyncio.run(Endpoint(None, ("GET",), work)(dict(SCOPE), gone, send))
    return sent


@pytest.mark.parametrize("error", [ValueError("a secret"), OSError("a secret")])
def test_a_failure_of_ours_is_500_and_its_words_stay_in_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    start, body = answered(error, began=False)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal"
    assert b"secret" not in body["body"] and "a secret" in caplog.text


def test_a_reader_who_left_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mlxpool"):
        assert len(answered(ConnectionResetError(), began=True)) == 1
    assert not [one for one in caplog.records if one.name.startswith("mlxpool")]


def test_work_ends_with_its_sender() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.run(unless_gone(gone, work))
    assert ended == [True]


def test_the_error_of_the_work_is_heard() -> None:
    async def stays() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def work() -> None:
        raise ValueError("heard")

    with pytest.raises(ValueError, match="heard"):
        asyncio.run(unless_gone(stays, work))
