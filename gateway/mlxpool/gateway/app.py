"""The ASGI application: its routes, how each is served, and the client of the pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.auth import AccessControl, ApiKeys, ConcurrencyLimit
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import PoolAccess
from mlxpool.gateway.http import ResponseWriter, cancel_on_disconnect, read_json
from mlxpool.gateway.ollama.routes import OllamaRoutes
from mlxpool.gateway.openai.responses import error_event
from mlxpool.gateway.openai.routes import OpenAIRoutes
from mlxpool.gateway.openai.vector_routes import VectorRoutes
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

Work: TypeAlias = Coroutine[Any, Any, None]
Handler: TypeAlias = Callable[[Request, ResponseWriter], Work]
GetHandler: TypeAlias = Callable[[ResponseWriter], Work]
PostHandler: TypeAlias = Callable[[Mapping[str, Any], ResponseWriter], Work]

READ = ("GET", "HEAD")
ANY = (*READ, "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NOT_BUILT = "is not supported by mlxpool"
# path -> what to do instead; these answer 501
OPENAI_NOT_BUILT = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/moderations": "models complete text only",
    "/v1/images/generations": "models complete text only",
    "/v1/audio/speech": "models complete text only",
    "/v1/audio/transcriptions": "models complete text only",
}
CONFIGURED_MODELS = "models are folders that the pool is configured with (docs/models.md)"
OLLAMA_NOT_BUILT = {
    "/api/pull": CONFIGURED_MODELS,
    "/api/push": CONFIGURED_MODELS,
    "/api/create": CONFIGURED_MODELS,
    "/api/copy": CONFIGURED_MODELS,
    "/api/delete": CONFIGURED_MODELS,
    "/api/blobs/{digest}": CONFIGURED_MODELS,
}


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


class Gateway:
    """The application, the keys it accepts, and its client of the pool."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for a file of keys that cannot be used."""
        self.settings = settings
        self.keys = ApiKeys(settings.keys)
        self._access = AccessControl(self.keys, ConcurrencyLimit(settings.per_key))
        self.app = Starlette(lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self.settings
        async with AsyncClient(
            settings.run_dir,
            settings.endpoint,
            server_key=settings.server_key,
            key=settings.key,
            broker_grace=settings.broker_grace,
        ) as client:
            pool = PoolAccess(settings, client)
            app.router.routes[:] = self.routes(pool)
            probe = asyncio.create_task(_log_broker(pool))
            yield
            probe.cancel()
            await pool.models.close()

    def routes(self, pool: PoolAccess) -> list[Route]:
        """All paths, in the order in which they are matched."""
        return [
            *self._openai_routes(OpenAIRoutes(pool)),
            *self._vector_routes(VectorRoutes(pool)),
            *self._ollama_routes(OllamaRoutes(pool)),
            Route("/health", Endpoint(None, READ, _health(pool))),
            Route("/", Endpoint(None, READ, _index)),
            Route("/{path:path}", Endpoint(None, ANY, _unknown_path)),
        ]

    def _openai_routes(self, openai: OpenAIRoutes) -> list[Route]:
        async def model(request: Request, response: ResponseWriter) -> None:
            await openai.model(str(request.path_params["name"]), response)

        return [
            self._get("/v1/models", openai.models),
            Route("/v1/models/{name:path}", Endpoint(self._access, READ, model)),
            self._post("/v1/chat/completions", openai.chat),
            self._post("/v1/completions", openai.completion),
            *(self._not_built(path, advice) for path, advice in OPENAI_NOT_BUILT.items()),
        ]

    def _vector_routes(self, texts: VectorRoutes) -> list[Route]:
        return [
            self._post("/v1/embeddings", texts.embeddings),
            self._post("/v1/rerank", texts.rerank),
            self._post("/v1/score", texts.score),
            self._post("/v1/classify", texts.classify),
        ]

    def _ollama_routes(self, ollama: OllamaRoutes) -> list[Route]:
        return [
            self._get("/api/version", ollama.version, OLLAMA_ERRORS),
            self._get("/api/tags", ollama.tags, OLLAMA_ERRORS),
            self._get("/api/ps", ollama.ps, OLLAMA_ERRORS),
            self._post("/api/show", ollama.show, OLLAMA_ERRORS),
            self._post("/api/generate", ollama.generate, OLLAMA_ERRORS),
            self._post("/api/chat", ollama.chat, OLLAMA_ERRORS),
            self._post("/api/embed", ollama.embed, OLLAMA_ERRORS),
            self._post("/api/embeddings", ollama.embeddings, OLLAMA_ERRORS),
            *(
                self._not_built(path, advice, OLLAMA_ERRORS)
                for path, advice in OLLAMA_NOT_BUILT.items()
            ),
        ]

    def _get(
        self, path: str, answer: GetHandler, error_format: ErrorFormat = OPENAI_ERRORS
    ) -> Route:
        async def handle(_: Request, response: ResponseWriter) -> None:
            await answer(response)

        return Route(path, Endpoint(self._access, READ, handle, error_format))

    def _post(
        self, path: str, answer: PostHandler, error_format: ErrorFormat = OPENAI_ERRORS
    ) -> Route:
        any_type = error_format is OLLAMA_ERRORS  # its clients need not say that they send JSON

        async def handle(request: Request, response: ResponseWriter) -> None:
            max_bytes, seconds = self.settings.max_body, self.settings.body_time
            body = await read_json(request, max_bytes, seconds, any_type=any_type)
            await cancel_on_disconnect(request.receive, lambda: answer(body, response))

        return Route(path, Endpoint(self._access, ("POST",), handle, error_format))

    def _not_built(
        self, path: str, advice: str, error_format: ErrorFormat = OPENAI_ERRORS
    ) -> Route:
        async def handle(request: Request, response: ResponseWriter) -> None:
            message = f"{request.url.path} {NOT_BUILT}: {advice}"
            raise HttpError(501, message, "not_supported", retry=False)

        return Route(path, Endpoint(self._access, ANY, handle, error_format))


async def _log_broker(pool: PoolAccess) -> None:
    """Log the broker's endpoint, and whether it answers."""
    endpoint = pool.settings.broker
    log.info("asking for a broker", extra={"endpoint": endpoint})
    try:
        await pool.models.all()
    except PoolError as error:
        message = "no broker yet: until there is one, requests are answered 503"
        log.warning(message, extra={"endpoint": endpoint, "why": error.message})
    else:
        log.info("a broker answers", extra={"endpoint": endpoint})


def _health(pool: PoolAccess) -> Handler:
    """200 when the pool answers, else the status of its error."""

    async def handle(_: Request, response: ResponseWriter) -> None:
        await pool.models.all()
        await response.json({"status": "ok"})

    return handle


async def _index(request: Request, response: ResponseWriter) -> None:
    """Ollama's clients request this path to see whether a server is there."""
    await response.json({"name": "mlxpool gateway"})


async def _unknown_path(request: Request, response: ResponseWriter) -> None:
    message = (
        f"there is no {request.method} {request.url.path}; docs/gateway.md lists what there is"
    )
    raise HttpError(404, message, "unknown_url", retry=False)
