"""One path of the gateway as an ASGI application: access, the handler, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.auth import AccessControl
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.responses import error_event

log = logging.getLogger("mlxpool.gateway")

Work: TypeAlias = Coroutine[Any, Any, None]
Handler: TypeAlias = Callable[[Request, ResponseWriter], Work]


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How an interface encodes an error: as a whole response, and at the end of a stream."""

    body: Callable[[HttpError], dict[str, Any]]
    stream: Callable[[HttpError], bytes]


OPENAI_ERRORS = ErrorFormat(HttpError.openai_body, error_event)
OLLAMA_ERRORS = ErrorFormat(
    HttpError.ollama_body, lambda error: f"{json.dumps(error.ollama_body())}\n".encode()
)


class Endpoint:
    """Checks the method and the access, runs the handler, and answers with its error if it fails.

    It is an ASGI application of its own, so that no middleware copies the pieces of a stream.
    """

    def __init__(
        self,
        access: AccessControl | None,
        methods: tuple[str, ...],
        handler: Handler,
        error_format: ErrorFormat = OPENAI_ERRORS,
    ) -> None:
        """`access`: None for a path that everybody may read."""
        self._access = access
        self._methods = methods
        self._handler = handler
        self._error_format = error_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, response = Request(scope, receive), ResponseWriter(send)
        try:
            if request.method not in self._methods:
                path, methods = request.url.path, " and ".join(self._methods)
                message = f"{path} takes {methods}, not {request.method}"
                raise HttpError(405, message, "method_not_allowed", retry=False)
            with self._access.admitted(request) if self._access else contextlib.nullcontext():
                await self._handler(request, response)
        except HttpError as error:
            await self._fail(response, error)
        except PoolError as error:
            await self._fail(response, errors.from_pool_error(error))
        except ClientDisconnect:  # before the body was complete
            pass
        except asyncio.CancelledError:  # uvicorn's shutdown timeout has passed
            await self._abort(response)
        except Exception as error:
            if response.started and isinstance(error, OSError):
                return  # the client disconnected while the response was written
            log.exception("a request to %s failed", scope["path"])
            failure = HttpError(500, "the gateway failed", "internal", retry=False)
            await self._fail(response, failure)

    async def _abort(self, response: ResponseWriter) -> None:
        """Answer with an error, or end the open stream with one: the gateway is shutting down."""
        error = HttpError(503, "the gateway is ending", "draining", retry_after=1.0)
        await self._fail(response, error)
        if response.streaming:
            await response.write(self._error_format.stream(error))
            await response.close()

    async def _fail(self, response: ResponseWriter, error: HttpError) -> None:
        if not response.started:
            body = self._error_format.body(error)
            await response.json(body, error.status, error.headers())
