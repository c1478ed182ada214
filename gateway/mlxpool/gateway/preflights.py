"""Notes the preflights of browsers, which the middleware of CORS answers before any endpoint."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpool.gateway.endpoint import Surroundings
from mlxpool.gateway.operations.exchange import PREFLIGHT, REQUEST_ID


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may send a request."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers


class PreflightRecords:
    """An ASGI application around that middleware: its answers get a line of the log and an id."""

    def __init__(self, app: ASGIApp, surroundings: Surroundings) -> None:
        self._app = app
        self._surroundings = surroundings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_preflight(scope):
            return await self._app(scope, receive, send)
        exchange = self._surroundings.exchange_of(scope, PREFLIGHT)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"].append((REQUEST_ID.encode(), exchange.id.encode()))
            await send(message)

        with self._surroundings.observed(exchange):
            await self._app(scope, receive, noted)
