"""Serves one route: checks method, key and drain, runs the handler, logs and counts the request.

Also logs and counts requests that reach no route: preflights, and bytes that are not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeAlias

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpool.common.errors import PoolError
from mlxpool.common.trace_context import HEADER, parent_of
from mlxpool.gateway import errors
from mlxpool.gateway.auth import AccessControl, KeyRevoked
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.http import HeadersOnly, ResponseWriter
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.exchange import (
    CLIENT_DISCONNECTED,
    DISCONNECTED,
    NOT_HTTP,
    OTHER_ROUTE,
    PREFLIGHT,
    REQUEST_ID,
    UNPARSABLE,
    Exchange,
    request_id,
    shown_path,
)
from mlxpool.gateway.operations.metrics import Metrics
from mlxpool.gateway.route_spec import OPENAI, Interface

log = logging.getLogger("mlxpool.gateway")
access_log = logging.getLogger("mlxpool.gateway.access")

Handler: TypeAlias = Callable[[Request, ResponseWriter], Coroutine[Any, Any, bool]]

READ = ("GET", "HEAD")
KNOWN_METHODS = (*READ, "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE")
OTHER_METHOD = "other"
MAX_LOGGED_PATH = 200  # characters
ABORT_TIME = 1.0  # seconds for writing the error of a request that is cancelled
ENDING = "the gateway is ending"


class Surroundings(Struct, frozen=True):
    """The state that endpoints share. `logged`: each request gets a line of the access log."""

    access: AccessControl
    drain: Drain
    metrics: Metrics
    logged: bool = True

    def exchange_of(self, scope: Scope, route: str) -> Exchange:
        """Returns the record of a new request, with its path if `route` is OTHER_ROUTE."""
        method, client, headers = scope["method"], scope.get("client"), Headers(scope=scope)
        traceparent = headers.get(HEADER)
        return Exchange(
            id=request_id(headers.get(REQUEST_ID), uuid.uuid4().hex),
            method=method if method in KNOWN_METHODS else OTHER_METHOD,
            route=route,
            started=time.monotonic(),
            client=client and client[0],
            path=shown_path(scope["path"][:MAX_LOGGED_PATH]) if route == OTHER_ROUTE else None,
            traceparent=traceparent if parent_of(traceparent) else None,
        )

    def unparsable(self, client: str | None) -> Exchange:
        """Counts and logs the response 400 to bytes that are not HTTP.

        Returns the response's record.
        """
        exchange = Exchange(
            id=uuid.uuid4().hex, method=OTHER_METHOD, route=UNPARSABLE, started=time.monotonic(),
            client=client, status=400, failure=NOT_HTTP,
        )  # fmt: skip
        with self.observed(exchange):
            return exchange

    @contextlib.contextmanager
    def observed(self, exchange: Exchange) -> Iterator[None]:
        """Counts and logs the exchange when it has ended."""
        self.metrics.begun(exchange)
        try:
            yield
        finally:
            now = time.monotonic()
            self.metrics.ended(exchange, now)
            if self.logged:
                access_log.info("request", extra=exchange.fields(now))


class Endpoint:
    """Runs a handler, and answers with the handler's error if it fails.

    It is its own ASGI application, so that no middleware copies the pieces of a stream.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        route: str,
        methods: tuple[str, ...] | None,
        handler: Handler,
        interface: Interface = OPENAI,
        *,
        public: bool = False,
        operator: bool = False,
        in_drain: bool = False,
    ) -> None:
        """`handler` returns whether the client disconnected before the end of the response.

        If `methods` is None, the endpoint answers every method.
        """
        self._surroundings = surroundings
        self._route = route
        self._methods = methods
        self._handler = handler
        self._interface = interface
        self._public = public
        self._operator = operator
        self._in_drain = in_drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        exchange = self._surroundings.exchange_of(scope, self._route)
        response = ResponseWriter(send, exchange, self._interface.id_header)
        with self._surroundings.observed(exchange):
            await self._answer(request, response)

    async def _answer(self, request: Request, response: ResponseWriter) -> None:
        try:
            if await self._handle(request, response):
                _note_disconnect(response)
        except HeadersOnly:
            pass
        except KeyRevoked as error:
            await self._end(response, error)
        except HttpError as error:
            await self._fail(response, error)
        except PoolError as error:
            await self._fail(response, errors.from_pool_error(error))
        except ClientDisconnect:  # before the body was complete
            _note_disconnect(response)
        except asyncio.CancelledError:  # the drain's time, or uvicorn's, is over
            ending = HttpError(503, ENDING, "draining", retry_after=1.0, close=True)
            await self._end(response, ending)
        except Exception as error:
            if response.started and isinstance(error, OSError):
                return _note_disconnect(response)  # while the response was written
            log.exception("a request to %s failed", self._route)
            failure = HttpError(500, "the gateway failed", "internal", retry=False)
            await self._fail(response, failure)

    async def _handle(self, request: Request, response: ResponseWriter) -> bool:
        around = self._surroundings
        check_length(request.headers)
        around.access.check_origin(request)
        if self._methods is not None and request.method not in self._methods:
            return await self._other_method(request, response, self._methods)
        if self._in_drain:
            return await self._admitted(request, response)
        around.drain.check_open()
        with around.drain.request():
            return await self._admitted(request, response)

    async def _other_method(
        self, request: Request, response: ResponseWriter, methods: tuple[str, ...]
    ) -> bool:
        """Answers OPTIONS with the methods of the path. Raises HttpError for another method."""
        allowed = {"allow": ", ".join((*methods, "OPTIONS"))}
        if request.method == "OPTIONS":
            await response.data(b"", "text/plain", headers=allowed)
            return False
        message = f"{request.url.path} takes {' and '.join(methods)}, not {request.method}"
        raise HttpError(405, message, "method_not_allowed", retry=False, more_headers=allowed)

    async def _admitted(self, request: Request, response: ResponseWriter) -> bool:
        if self._public:
            return await self._handler(request, response)
        with self._surroundings.access.admitted(request) as owner:
            response.exchange.key = owner.name
            request.state.owner_digest = owner.digest
            if self._operator and not owner.operator:
                message = f"{self._route} is for operators: the line of the key in the file of keys"
                raise HttpError(
                    403, f"{message} has to end with `operator`", "operator_only", retry=False
                )
            return await self._handler(request, response)

    async def _end(self, response: ResponseWriter, error: HttpError) -> None:
        """Sends an error as the response, or as the last event of an open stream.

        Called when the handler has ended.
        """
        with contextlib.suppress(TimeoutError):  # a client that does not read would block this
            async with asyncio.timeout(ABORT_TIME):
                await self._fail(response, error)
                if response.streaming:
                    ended = self._interface.error_event(response.identified(error))
                    await response.write_aside(ended)
                    await response.close()

    async def _fail(self, response: ResponseWriter, error: HttpError) -> None:
        response.identified(error)
        if not response.started:
            body = self._interface.error_body(error)
            await response.json(body, error.status, error.headers())


class ByMethod:
    """The ASGI application of a path, with an endpoint for each method.

    For all other methods, the first endpoint answers with the list of allowed methods.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints
        self._other = next(iter(endpoints.values()))  # answers other methods with a list of methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoints.get(scope["method"], self._other)(scope, receive, send)


def _note_disconnect(response: ResponseWriter) -> None:
    exchange = response.exchange
    exchange.failure = CLIENT_DISCONNECTED
    if not response.started:
        exchange.status = DISCONNECTED


def check_length(headers: Headers) -> None:
    """Raises an HttpError, which closes the connection, for a body with two lengths.

    This check comes before all others, to prevent request smuggling: a proxy may treat bytes as the
    body of this request that the server treats as the next request.
    """
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "Transfer-Encoding and Content-Length are both there; send one of them"
        raise HttpError(400, message, "bad_request", retry=False, close=True)


def is_preflight(scope: Scope) -> bool:
    """Whether a request is a preflight, by which a browser asks if a page may send a request."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers


class PreflightRecords:
    """An ASGI middleware that logs each preflight, and adds a request id to the response to it."""

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
            try:
                check_length(Headers(scope=scope))
            except HttpError as error:
                response = ResponseWriter(send, exchange)
                body = response.identified(error).openai_body()
                return await response.json(body, error.status, error.headers())
            await self._app(scope, receive, noted)
