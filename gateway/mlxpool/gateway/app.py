"""The ASGI application: serves all routes, also under alternative paths (such as without /v1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxpool.client import AsyncClient
from mlxpool.common.config.bounds import ANY_ORIGIN
from mlxpool.common.errors import PoolError
from mlxpool.common.version import VERSION
from mlxpool.gateway.anthropic.routes import MessageRoutes
from mlxpool.gateway.auth import AccessControl, ApiKeys, ConcurrencyLimit
from mlxpool.gateway.endpoint import READ, ByMethod, Endpoint, PreflightRecords, Surroundings
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import queries
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter, cancel_on_disconnect, read_json
from mlxpool.gateway.jobs.routes import JobRoutes
from mlxpool.gateway.ollama.routes import ModelRoutes, OllamaRoutes
from mlxpool.gateway.openai.batches.routes import BatchRoutes, FileRoutes
from mlxpool.gateway.openai.responses_api.routes import KeptResponseRoutes, ResponseRoutes
from mlxpool.gateway.openai.routes import OpenAIRoutes
from mlxpool.gateway.openai.token_routes import TokenRoutes
from mlxpool.gateway.openai.vector_routes import VectorRoutes
from mlxpool.gateway.openapi import document
from mlxpool.gateway.operation_routes import OperationRoutes
from mlxpool.gateway.operations.drain import Drain
from mlxpool.gateway.operations.exchange import OTHER_ROUTE, REQUEST_ID
from mlxpool.gateway.operations.metrics import Metrics
from mlxpool.gateway.resumption import resumption_of
from mlxpool.gateway.route_spec import ANTHROPIC, Call, RouteSpec, Services
from mlxpool.gateway.route_table import NOT_BUILT, ROUTES
from mlxpool.gateway.settings import Broker, Settings

log = logging.getLogger("mlxpool.gateway")

UNSUPPORTED = "is not supported by mlxpool"
EXPOSED_HEADERS = (  # response headers that scripts of web pages may read
    REQUEST_ID,
    str(ANTHROPIC.id_header),
    "retry-after",
    "x-should-retry",
)
V1 = "v1"
OTHER_PATHS: Mapping[str, str] = {
    "/v2/rerank": "/v1/rerank",  # Cohere's
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}


class Gateway:
    """The ASGI application with its state: API keys, running requests, metrics, pool clients."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for a file of keys that cannot be used."""
        self.settings = settings
        self.keys = ApiKeys(settings.keys)
        self.drain = Drain()
        self.metrics = Metrics(VERSION, (route.shown_path for route in ROUTES))
        limit = ConcurrencyLimit(settings.per_key)
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop while serving
        self.access = AccessControl(
            self.keys,
            limit,
            names_owners=settings.names_owners,
            cors_origins=settings.cors_origins,
        )
        self.surroundings = Surroundings(self.access, self.drain, self.metrics, settings.access_log)
        self.app = Starlette(lifespan=self._lifespan, middleware=self._middleware())
        self.app.router.redirect_slashes = False
        self.app.router.default = Endpoint(
            self.surroundings, OTHER_ROUTE, None, _unknown_path, public=True
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(self._client(broker))
                for broker in self.settings.brokers
            ]
            pool = PoolAccess(self.settings, *clients)
            app.router.routes[:] = self.routes(pool)
            pool.models.start()
            probe = asyncio.create_task(_log_broker(pool))
            yield
            probe.cancel()
            await pool.close()

    def _client(self, broker: Broker) -> AsyncClient:
        return AsyncClient(
            endpoint=broker.endpoint,
            server_key=broker.server_key,
            key=None if broker.endpoint.startswith("ipc:") else self.settings.key,
            broker_grace=self.settings.broker_grace,
        )

    def reload_keys(self) -> None:
        """Reads the keys again and ends the requests of removed keys. Any thread may call it."""
        self.keys.reload()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.access.end_revoked)

    async def finish(self) -> None:
        """Refuses new requests, and waits at most the drain time for the running requests."""
        self.metrics.drain_begun()
        seconds = self.settings.drain_timeout
        log.info("draining", extra={"running": self.drain.running, "seconds": seconds})
        await self.drain.finish(seconds)
        log.info("drained", extra={"running": self.drain.running})

    def routes(self, pool: PoolAccess) -> list[Route]:
        """Returns the routes of all paths, in the order in which paths are matched."""
        described = document(ROUTES, VERSION, keys=self.keys.required)
        kept_responses = KeptResponseRoutes(pool)
        services = Services(
            OpenAIRoutes(pool),
            ResponseRoutes(pool, kept_responses),
            kept_responses,
            FileRoutes(pool),
            BatchRoutes(pool),
            JobRoutes(pool),
            VectorRoutes(pool),
            TokenRoutes(pool),
            MessageRoutes(pool),
            OllamaRoutes(pool),
            ModelRoutes(pool),
            OperationRoutes(pool, self.drain, self.metrics, described),
        )
        paths: dict[str, list[RouteSpec]] = {}
        for route in ROUTES:
            paths.setdefault(route.path, []).append(route)
        return [
            *(Route(path, self._served(specs, services)) for path, specs in paths.items()),
            *(self._not_built(path) for path in NOT_BUILT),
        ]

    def _served(self, specs: Sequence[RouteSpec], services: Services) -> ByMethod:
        """Returns the ASGI application of one path; `specs`: the path's routes, one per method."""
        methods = tuple(name for spec in specs for name in methods_of(spec))
        endpoints: dict[str, Endpoint] = {}
        for spec in specs:
            endpoint = self._endpoint(spec, methods, services)
            endpoints |= dict.fromkeys(methods_of(spec), endpoint)
        return ByMethod(endpoints)

    def _endpoint(self, spec: RouteSpec, methods: tuple[str, ...], services: Services) -> Endpoint:
        async def answer(request: Request, response: ResponseWriter) -> bool:
            query = {} if spec.query is None else queries.checked(request.query_params, spec.query)
            call = Call(request, {}, response, query)
            if spec.stream is None and not spec.watched:
                await spec.serve(services, call)
                return False
            return await cancel_on_disconnect(request.receive, lambda: spec.serve(services, call))

        async def answer_body(request: Request, response: ResponseWriter) -> bool:
            body = await read_json(request, self.settings.max_body, self.settings.body_time)
            if spec.stream is not None:
                response.resumption = await resumption_of(request, body)
            call = Call(request, body, response)
            return await cancel_on_disconnect(request.receive, lambda: spec.serve(services, call))

        return Endpoint(
            self.surroundings,
            spec.shown_path,
            methods,
            answer if spec.body is None else answer_body,
            spec.interface,
            public=spec.public,
            operator=spec.operator,
            in_drain=spec.in_drain,
        )

    def _not_built(self, path: str) -> Route:
        interface, advice = NOT_BUILT[path]

        async def refuse(request: Request, response: ResponseWriter) -> bool:
            message = f"{request.url.path} {UNSUPPORTED}: {advice}"
            raise HttpError(501, message, "not_supported", retry=False)

        return Route(path, Endpoint(self.surroundings, OTHER_ROUTE, None, refuse, interface))

    def _middleware(self) -> list[Middleware]:
        """Returns the middleware: alternative paths of routes, and CORS if origins are allowed.

        With CORS, a page of an allowed origin may use the gateway from a browser. The page itself
        sends the API key.
        """
        canonical = canonical_paths(spec.path for spec in ROUTES)
        paths = Middleware(CanonicalPaths, canonical=canonical)
        origins = self.settings.cors_origins
        if not origins:
            return [paths]
        if ANY_ORIGIN in origins:
            log.warning("pages of every origin may use the gateway", extra={"cors_origins": "*"})
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
        return [paths, Middleware(PreflightRecords, surroundings=self.surroundings), cors]


def methods_of(spec: RouteSpec) -> tuple[str, ...]:
    """Returns the HTTP methods that a route answers."""
    return READ if spec.method == "GET" else (spec.method,)


async def _log_broker(pool: PoolAccess) -> None:
    """Logs the brokers' endpoints, and whether a broker answers."""
    endpoint = " ".join(broker.endpoint for broker in pool.settings.brokers)
    log.info("asking for a broker", extra={"endpoint": endpoint})
    try:
        await pool.models.all()
    except PoolError as error:
        message = "no broker yet: until there is one, requests are answered 503"
        log.warning(message, extra={"endpoint": endpoint, "why": error.message})
    else:
        log.info("a broker answers", extra={"endpoint": endpoint})


async def _unknown_path(request: Request, response: ResponseWriter) -> bool:
    path = request.scope["path"]
    message = f"there is no {request.method} {path!r:.200}; docs/gateway.md lists what there is"
    raise HttpError(404, message, "unknown_url", retry=False)


def canonical_paths(routes: Iterable[str]) -> Callable[[str], str]:
    """Returns a function from a requested path to the path of a route.

    `routes`: the paths of all routes.
    """
    all_parts = [path.split("/") for path in routes]
    of_v1 = {parts[2] for parts in all_parts if parts[1] == V1 and len(parts) > 2}
    others = {parts[1] for parts in all_parts if parts[1] != V1}

    def canonical(path: str) -> str:
        if path == "*":  # OPTIONS for the whole server
            return "/"
        if not path.startswith("/"):  # CONNECT or an absolute URL: the gateway is not a proxy
            return path
        parts = [part for part in path.split("/") if part]
        if parts[:2] == [V1, V1]:
            del parts[0]
        if parts and parts[0] in of_v1 and parts[0] not in others:
            parts.insert(0, V1)
        short = "/" + "/".join(parts)
        return OTHER_PATHS.get(short, short)

    return canonical


class CanonicalPaths:
    """An ASGI middleware that replaces an alternative path of a route by the route's path."""

    def __init__(self, app: ASGIApp, canonical: Callable[[str], str]) -> None:
        self._app = app
        self._canonical = canonical

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = self._canonical(scope["path"])
        await self._app(scope, receive, send)
