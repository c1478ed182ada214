"""The ASGI application: which path is answered by what, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.auth import Keys, Places
from mlxpool.gateway.errors import Fault
from mlxpool.gateway.http import Reply, read_json, unless_gone
from mlxpool.gateway.ollama.routes import Ollama
from mlxpool.gateway.openai.answers import sse
from mlxpool.gateway.openai.routes import OpenAI
from mlxpool.gateway.responses import Serving
from mlxpool.gateway.settings import LOOPBACK, Settings

log = logging.getLogger("mlxpool.gateway")

Work = Coroutine[Any, Any, None]
Handle = Callable[[Request, Reply], Work]
Answer = Callable[[Mapping[str, Any], Reply], Work]

HOST = re.compile(r"\[?([^\]]*?)\]?(?::\d+)?")  # a name or an address, and a port
READ = ("GET", "HEAD")
ANY = (*READ, "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
NOT_BUILT = "is not supported by mlxpool"
OPENAI_LATER = {
    "/v1/embeddings": "embeddings: models complete text only",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/moderations": "models complete text only",
    "/v1/images/generations": "models complete text only",
    "/v1/audio/speech": "models complete text only",
    "/v1/audio/transcriptions": "models complete text only",
}
MANAGED = "models are folders that the pool is configured with (docs/models.md)"
OLLAMA_LATER = {
    "/api/embed": "embeddings: models complete text only",
    "/api/embeddings": "embeddings: models complete text only",
    "/api/pull": MANAGED,
    "/api/push": MANAGED,
    "/api/create": MANAGED,
    "/api/copy": MANAGED,
    "/api/delete": MANAGED,
    "/api/blobs/{digest}": MANAGED,
}


class Door:
    """Lets in who has a key, and of each no more than its places.

    Without keys it is for this machine alone, and a page in a browser must not come in by a name
    that somebody else has given to this address.
    """

    def __init__(self, keys: Keys, places: Places) -> None:
        self._keys = keys
        self._places = places

    def passed(self, request: Request) -> AbstractContextManager[None]:
        """For as long as the request takes. Raises Fault."""
        host = HOST.fullmatch(request.headers.get("host", ""))
        if not self._keys.wanted and (host is None or host[1].lower() not in LOOPBACK):
            words = f"without keys it is asked as {' or '.join(LOOPBACK)} only; see --keys"
            raise Fault(403, words, "host_not_allowed", retry=False)
        who = self._keys.who(request.headers.get("authorization"))
        if who is None:
            words = "a known key is wanted: Authorization: Bearer KEY"
            raise Fault(401, words, "invalid_api_key", retry=False)
        return self._places.taken(who)


class Endpoint:
    """One path: the key, the work as long as the sender stays, and faults in its interface's form.

    An ASGI application, so that nothing stands between the pool's stream and the socket.
    """

    def __init__(
        self, door: Door | None, methods: tuple[str, ...], handle: Handle, *, ollama: bool = False
    ) -> None:
        self._door = door
        self._methods = methods
        self._handle = handle
        self._ollama = ollama

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, reply = Request(scope, receive), Reply(send)
        try:
            if request.method not in self._methods:
                path, methods = request.url.path, " and ".join(self._methods)
                words = f"{path} takes {methods}, not {request.method}"
                raise Fault(405, words, "method_not_allowed", retry=False)
            with self._door.passed(request) if self._door else contextlib.nullcontext():
                await self._handle(request, reply)
        except Fault as fault:
            await self._fail(reply, fault)
        except PoolError as error:
            await self._fail(reply, errors.of(error))
        except ClientDisconnect:  # the sender has left before it said all
            pass
        except asyncio.CancelledError:  # the gateway ends, and this has had its time
            await self._cut_off(reply)
        except Exception as error:
            if reply.started and isinstance(error, OSError):
                return  # the sender has left while something was written
            log.exception("a request to %s failed", scope["path"])
            await self._fail(reply, Fault(500, "the gateway failed", "internal", retry=False))

    async def _cut_off(self, reply: Reply) -> None:
        """The last word of a request whose end the gateway does not live to see."""
        fault = Fault(503, "the gateway is ending", "draining", retry_after=1.0)
        await self._fail(reply, fault)
        if reply.streaming:
            line = (json.dumps(fault.ollama()) + "\n").encode()
            await reply.write(line if self._ollama else sse(fault.openai(), "error"))
            await reply.close()

    async def _fail(self, reply: Reply, fault: Fault) -> None:
        if not reply.started:
            body = fault.ollama() if self._ollama else fault.openai()
            await reply.json(body, fault.status, fault.headers())


class Gateway:
    """The application, the pool's client behind it, and the keys before it."""

    def __init__(self, settings: Settings) -> None:
        """Raises ValueError for a file of keys that cannot be used."""
        self.settings = settings
        self.keys = Keys(settings.keys)
        self._door = Door(self.keys, Places(settings.per_key))
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
            serving = Serving(settings, client)
            app.router.routes[:] = self.routes(serving)
            look = asyncio.create_task(_look_for_a_pool(serving))
            yield
            look.cancel()
            await serving.models.close()

    def routes(self, serving: Serving) -> list[Route]:
        """Every path."""
        openai, ollama = OpenAI(serving), Ollama(serving)
        return [
            self._get("/v1/models", openai.models),
            Route("/v1/models/{name:path}", Endpoint(self._door, READ, _model(openai))),
            self._post("/v1/chat/completions", openai.chat),
            self._post("/v1/completions", openai.completion),
            *(self._later(path, why) for path, why in OPENAI_LATER.items()),
            self._get("/api/version", ollama.version, ollama=True),
            self._get("/api/tags", ollama.tags, ollama=True),
            self._get("/api/ps", ollama.ps, ollama=True),
            self._post("/api/show", ollama.show, ollama=True),
            self._post("/api/generate", ollama.generate, ollama=True),
            self._post("/api/chat", ollama.chat, ollama=True),
            *(self._later(path, why, ollama=True) for path, why in OLLAMA_LATER.items()),
            Route("/health", Endpoint(None, READ, _health(serving))),
            Route("/", Endpoint(None, READ, _hello)),
            Route("/{path:path}", Endpoint(None, ANY, _unknown)),
        ]

    def _get(self, path: str, answer: Callable[[Reply], Work], *, ollama: bool = False) -> Route:
        async def handle(_: Request, reply: Reply) -> None:
            await answer(reply)

        return Route(path, Endpoint(self._door, READ, handle, ollama=ollama))

    def _post(self, path: str, answer: Answer, *, ollama: bool = False) -> Route:
        async def handle(request: Request, reply: Reply) -> None:
            most, seconds = self.settings.max_body, self.settings.body_time
            body = await read_json(request, most, seconds, any_type=ollama)
            await unless_gone(request.receive, lambda: answer(body, reply))

        return Route(path, Endpoint(self._door, ("POST",), handle, ollama=ollama))

    def _later(self, path: str, why: str, *, ollama: bool = False) -> Route:
        async def handle(request: Request, reply: Reply) -> None:
            words = f"{request.url.path} {NOT_BUILT}: {why}"
            raise Fault(501, words, "not_supported", retry=False)

        return Route(path, Endpoint(self._door, ANY, handle, ollama=ollama))


def _model(openai: OpenAI) -> Handle:
    async def handle(request: Request, reply: Reply) -> None:
        await openai.model(str(request.path_params["name"]), reply)

    return handle


async def _look_for_a_pool(serving: Serving) -> None:
    """Tell the log which broker is asked, and whether there is one."""
    endpoint = serving.settings.broker
    log.info("asking for a broker", extra={"endpoint": endpoint})
    try:
        await serving.models.all()
    except PoolError as error:
        words = "no broker yet: until there is one, requests are answered 503"
        log.warning(words, extra={"endpoint": endpoint, "why": error.message})
    else:
        log.info("a broker answers", extra={"endpoint": endpoint})


def _health(serving: Serving) -> Handle:
    """200 when the pool answers, else the fault's status."""

    async def handle(_: Request, reply: Reply) -> None:
        await serving.models.all()
        await reply.json({"status": "ok"})

    return handle


async def _hello(request: Request, reply: Reply) -> None:
    """Ollama's clients ask so whether somebody is there."""
    await reply.json({"name": "mlxpool gateway"})


async def _unknown(request: Request, reply: Reply) -> None:
    words = f"there is no {request.method} {request.url.path}; docs/gateway.md lists what there is"
    raise Fault(404, words, "unknown_url", retry=False)
