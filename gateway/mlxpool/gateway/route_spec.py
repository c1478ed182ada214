"""The description of a route: its method, path and interface, and the method that answers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field
from starlette.requests import Request

from mlxpool.gateway.anthropic.bodies import error_body as anthropic_body
from mlxpool.gateway.anthropic.bodies import error_event as anthropic_event
from mlxpool.gateway.anthropic.routes import MessageRoutes
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.jobs.routes import JobRoutes
from mlxpool.gateway.ollama.routes import ModelRoutes, OllamaRoutes
from mlxpool.gateway.openai.batches.routes import BatchRoutes, FileRoutes
from mlxpool.gateway.openai.responses import error_event
from mlxpool.gateway.openai.responses_api.routes import KeptResponseRoutes, ResponseRoutes
from mlxpool.gateway.openai.routes import OpenAIRoutes
from mlxpool.gateway.openai.token_routes import TokenRoutes
from mlxpool.gateway.openai.vector_routes import VectorRoutes
from mlxpool.gateway.operation_routes import OperationRoutes

Work: TypeAlias = Coroutine[Any, Any, None]


class Interface(Struct, frozen=True):
    """An interface and its encoding of an error: as a whole response, and at a stream's end."""

    name: str
    error_body: Callable[[HttpError], dict[str, Any]]
    error_event: Callable[[HttpError], bytes]
    error_schema: str  # the name of the schema of an error
    id_header: str | None = None  # header that has the request's id too


OPENAI = Interface("OpenAI", HttpError.openai_body, error_event, "Error")
ANTHROPIC = Interface(
    "Anthropic", anthropic_body, anthropic_event, "AnthropicError", id_header="request-id"
)
OLLAMA = Interface(
    "Ollama",
    HttpError.ollama_body,
    lambda error: f"{json.dumps(error.ollama_body())}\n".encode(),
    "OllamaError",
)
OPERATIONS = Interface("Operations", HttpError.openai_body, error_event, "Error")


class Services(Struct, frozen=True):
    """The objects whose methods answer requests."""

    openai: OpenAIRoutes
    responses: ResponseRoutes
    kept_responses: KeptResponseRoutes
    files: FileRoutes
    batches: BatchRoutes
    jobs: JobRoutes
    vectors: VectorRoutes
    tokens: TokenRoutes
    anthropic: MessageRoutes
    ollama: OllamaRoutes
    ollama_models: ModelRoutes
    operations: OperationRoutes


class Call(Struct, frozen=True):
    """A request with its body, empty for GET, and the writer of its response."""

    request: Request
    body: Mapping[str, Any]
    response: ResponseWriter
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The path parameter `id`: the id of a job, response, file or batch."""
        return str(self.request.path_params["id"])

    @property
    def idempotency(self) -> str | None:
        """The header Idempotency-Key, by which a repeated request is recognised."""
        return self.request.headers.get("idempotency-key")


class RouteSpec(Struct, frozen=True):
    """A method and a path. `answer` is the name of the response's schema.

    `stream`: the content type of a streamed response, whose events or lines have the schema
    `event`. `public`: the route needs no key. `operator`: the route needs the key of an operator.
    `in_drain`: the route answers while the gateway drains. `reads_body`: the method reads the body
    itself, as a form. `watched`: the handler is cancelled when its client disconnects. For streams
    and for requests with a JSON body this holds even without `watched`.
    """

    method: str  # GET, which answers HEAD too, POST or DELETE
    path: str
    interface: Interface
    summary: str
    serve: Callable[[Services, Call], Work]
    answer: str
    body: Body | None = None
    query: Body | None = None
    content_type: str = "application/json"
    stream: str | None = None
    event: str = ""
    public: bool = False
    operator: bool = False
    in_drain: bool = False
    reads_body: bool = False
    watched: bool = False

    @property
    def shown_path(self) -> str:
        """The path as documents and logs show it."""
        return self.path.replace(":path}", "}")


class Routes(Struct, frozen=True):
    """Makes the routes of an interface."""

    interface: Interface

    def get(
        self,
        path: str,
        summary: str,
        method: Callable[[Services], Callable[[ResponseWriter], Work]],
        answer: str,
        **more: Any,
    ) -> RouteSpec:
        """Makes a route of GET whose method needs no part of the request."""
        return self.get_with(path, summary, lambda to, c: method(to)(c.response), answer, **more)

    def get_with(
        self,
        path: str,
        summary: str,
        serve: Callable[[Services, Call], Work],
        answer: str,
        **more: Any,
    ) -> RouteSpec:
        """Makes a route of GET; `serve` gets the Call, with the request."""
        return RouteSpec("GET", path, self.interface, summary, serve, answer, **more)

    def delete(
        self, path: str, summary: str, serve: Callable[[Services, Call], Work], answer: str
    ) -> RouteSpec:
        """Makes a route of DELETE."""
        return RouteSpec("DELETE", path, self.interface, summary, serve, answer)

    def post_with(
        self,
        path: str,
        summary: str,
        serve: Callable[[Services, Call], Work],
        answer: str,
        **more: Any,
    ) -> RouteSpec:
        """Makes a route of POST; `serve` gets the Call, with request and body (empty if unread)."""
        return RouteSpec("POST", path, self.interface, summary, serve, answer, **more)

    def post(
        self,
        path: str,
        summary: str,
        method: Callable[[Services], Callable[[Mapping[str, Any], ResponseWriter], Work]],
        body: Body,
        answer: str,
        **more: Any,
    ) -> RouteSpec:
        """Makes a route of POST whose method needs the body."""

        def serve(to: Services, call: Call) -> Work:
            return method(to)(call.body, call.response)

        return RouteSpec("POST", path, self.interface, summary, serve, answer, body, **more)
