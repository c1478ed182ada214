"""The answer of /health for each state of the pool's models."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.operation_routes import OperationRoutes
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.exchange import Exchange


class Models:
    def __init__(self, states: list[str], trouble: str = "") -> None:
        self._models = [SimpleNamespace(state=state, trouble=trouble) for state in states]

    async def all(self) -> list[Any]:
        return self._models


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["draining", "drained"], 503),
        (["drained", "cold"], 200),
        (["failed"], 200),
        ([], 200),
    ],
)
def test_health_is_503_if_no_model_takes_requests(states: list[str], status: int) -> None:
    assert health(Models(states))[0] == status


def test_health_says_why_no_worker_can_come() -> None:
    status, body = health(Models(["ready"], "files of the run directory are gone"))
    assert (status, json.loads(body)) == (
        200,
        {"status": "degraded", "why": "files of the run directory are gone"},
    )


def health(models: Models) -> tuple[int | None, bytes]:
    """Returns the status and the body of the answer."""
    routes = OperationRoutes(
        cast(Any, SimpleNamespace(models=models)), Drain(), cast(Any, None), {}
    )
    data = b""

    async def send(message: Message) -> None:
        nonlocal data
        data += message.get("body", b"")

    exchange = Exchange("id", "GET", "/health", 0.0)
    asyncio.run(routes.health(ResponseWriter(send, exchange)))
    return exchange.status, data
