"""An endpoint whose handler raises an unexpected error, or whose client disconnects.

The tests need no network.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.requests import Request

from mlxpool.gateway.auth import AccessControl, ApiKeys, ConcurrencyLimit
from mlxpool.gateway.endpoint import Endpoint, Handler, Surroundings
from mlxpool.gateway.http import ResponseWriter, cancel_on_disconnect
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.metrics import Metrics

SCOPE = {"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""}


async def disconnected() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def messages_sent(error: Exception, *, started: bool) -> list[dict[str, Any]]:
    """Returns the ASGI messages of a handler that raises `error`, maybe after it has `started`."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def work(request: Request, response: ResponseWriter) -> bool:
        if started:
            await response.open("text/plain")
        raise error

    asyncio.run(endpoint(work)(dict(SCOPE), disconnected, send))
    return sent


def endpoint(work: Handler) -> Endpoint:
    """Returns a route that needs no key."""
    access = AccessControl(ApiKeys(), ConcurrencyLimit(None))
    surroundings = Surroundings(access, Drain(), Metrics("0", ["/x"]), logged=False)
    return Endpoint(surroundings, "/x", ("GET",), work, public=True)


@pytest.mark.parametrize("error", [ValueError("a secret"), OSError("a secret")])
def test_an_unexpected_error_is_500_and_only_the_log_has_its_message(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    start, body = messages_sent(error, started=False)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal"
    assert b"secret" not in body["body"] and "a secret" in caplog.text


def test_a_client_that_disconnects_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mlxpool"):
        assert len(messages_sent(ConnectionResetError(), started=True)) == 1
    assert not [record for record in caplog.records if record.name.startswith("mlxpool")]


def test_work_is_cancelled_when_the_client_disconnects() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.run(cancel_on_disconnect(disconnected, work))
    assert ended == [True]


def test_an_error_of_the_work_is_raised() -> None:
    async def connected() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def work() -> None:
        raise ValueError("raised")

    with pytest.raises(ValueError, match="raised"):
        asyncio.run(cancel_on_disconnect(connected, work))
