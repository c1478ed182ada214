"""What /health says of the states of the pool's models."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.operation_routes import OperationRoutes
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.exchange import Exchange


class Models:
    def __init__(self, states: list[str]) -> None:
        self._models = [SimpleNamespace(state=state) for state in states]

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
    pool = cast(Any, SimpleNamespace(models=Models(states)))
    routes = OperationRoutes(pool, Drain(), cast(Any, None), {})

    async def send(message: Message) -> None:
        pass

    exchange = Exchange("id", "GET", "/health", 0.0)
    asyncio.run(routes.health(ResponseWriter(send, exchange)))
    assert exchange.status == status
