"""The table of all routes. The application serves it, and openapi.json is made of it.

To add a route: its line here, and its method in openai/, ollama/ or operation_routes.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.requests import Request

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.ollama import fields as ollama
from mlxpool.gateway.ollama.model_routes import ModelRoutes
from mlxpool.gateway.ollama.responses import NDJSON
from mlxpool.gateway.ollama.routes import OllamaRoutes
from mlxpool.gateway.openai import fields as openai
from mlxpool.gateway.openai.responses import error_event
from mlxpool.gateway.openai.routes import EVENT_STREAM, OpenAIRoutes
from mlxpool.gateway.openai.vector_routes import VectorRoutes
from mlxpool.gateway.operation_routes import OperationRoutes

Work: TypeAlias = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface, and how it encodes an error: as a whole response, and at a stream's end."""

    name: str
    error_body: Callable[[HttpError], dict[str, Any]]
    error_event: Callable[[HttpError], bytes]
    error_schema: str  # the name of its schema
    any_content_type: bool = False  # its clients need not say that they send JSON


OPENAI = Interface("OpenAI", HttpError.openai_body, error_event, "Error")
OLLAMA = Interface(
    "Ollama",
    HttpError.ollama_body,
    lambda error: f"{json.dumps(error.ollama_body())}\n".encode(),
    "OllamaError",
    any_content_type=True,
)
OPERATIONS = Interface("Operations", HttpError.openai_body, error_event, "Error")


@dataclass(frozen=True, slots=True)
class Services:
    """The objects whose methods answer requests."""

    openai: OpenAIRoutes
    vectors: VectorRoutes
    ollama: OllamaRoutes
    ollama_models: ModelRoutes
    operations: OperationRoutes


@dataclass(frozen=True, slots=True)
class Call:
    """One request with its body, empty for GET, and what answers it."""

    request: Request
    body: Mapping[str, Any]
    response: ResponseWriter


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """A method and a path. `answer` names the schema of the response.

    `stream`: the content type of a streamed response, whose events or lines have the schema
    `event`. `public`: needs no key. `in_drain`: is answered while the gateway drains.
    """

    method: str  # GET, which answers HEAD too, or POST
    path: str
    interface: Interface
    summary: str
    serve: Callable[[Services, Call], Work]
    answer: str
    body: Body | None = None
    content_type: str = "application/json"
    stream: str | None = None
    event: str = ""
    public: bool = False
    in_drain: bool = False

    @property
    def shown_path(self) -> str:
        """The path as documents and logs show it."""
        return self.path.replace(":path}", "}")


def _get(
    path: str,
    interface: Interface,
    summary: str,
    serve: Callable[[Services, Call], Work],
    answer: str,
    **more: Any,
) -> RouteSpec:
    return RouteSpec("GET", path, interface, summary, serve, answer, **more)


def _post(
    path: str,
    interface: Interface,
    summary: str,
    serve: Callable[[Services, Call], Work],
    answer: str,
    body: Body,
    **more: Any,
) -> RouteSpec:
    return RouteSpec("POST", path, interface, summary, serve, answer, body, **more)


ROUTES: tuple[RouteSpec, ...] = (
    _get(
        "/v1/models", OPENAI, "The pool's models.",
        lambda to, call: to.openai.models(call.response), "ModelList",
    ),
    _get(
        "/v1/models/{name:path}", OPENAI, "One model.",
        lambda to, call: to.openai.model(str(call.request.path_params["name"]), call.response),
        "Model",
    ),
    _post(
        "/v1/chat/completions", OPENAI, "The next message of a chat.",
        lambda to, call: to.openai.chat(call.body, call.response),
        "ChatCompletion", openai.CHAT, stream=EVENT_STREAM, event="ChatCompletionChunk",
    ),
    _post(
        "/v1/completions", OPENAI, "The continuation of a text or of token ids.",
        lambda to, call: to.openai.completion(call.body, call.response),
        "Completion", openai.COMPLETION, stream=EVENT_STREAM, event="Completion",
    ),
    _post(
        "/v1/embeddings", OPENAI, "A vector for each text.",
        lambda to, call: to.vectors.embeddings(call.body, call.response),
        "Embeddings", openai.EMBEDDINGS,
    ),
    _post(
        "/v1/rerank", OPENAI, "Documents in the order of their relevance for a query.",
        lambda to, call: to.vectors.rerank(call.body, call.response),
        "Ranking", openai.RERANK,
    ),
    _post(
        "/v1/score", OPENAI, "The relevance of texts for a text.",
        lambda to, call: to.vectors.score(call.body, call.response),
        "Scores", openai.SCORE,
    ),
    _post(
        "/v1/classify", OPENAI, "A label for each text.",
        lambda to, call: to.vectors.classify(call.body, call.response),
        "Classes", openai.CLASSIFY,
    ),
    _post(
        "/v1/decisions", OPENAI, "Probabilities of given answers to questions about a text.",
        lambda to, call: to.vectors.decisions(call.body, call.response),
        "Decisions", openai.DECISIONS,
    ),
    _post(
        "/api/generate", OLLAMA, "The answer to a prompt; without a prompt the model is loaded.",
        lambda to, call: to.ollama.generate(call.body, call.response),
        "OllamaGenerated", ollama.GENERATE, stream=NDJSON, event="OllamaGenerated",
    ),
    _post(
        "/api/chat", OLLAMA, "The next message of a chat; without messages the model is loaded.",
        lambda to, call: to.ollama.chat(call.body, call.response),
        "OllamaChat", ollama.CHAT, stream=NDJSON, event="OllamaChat",
    ),
    _post(
        "/api/embed", OLLAMA, "A vector of the length 1 for each text.",
        lambda to, call: to.ollama.embed(call.body, call.response),
        "OllamaEmbed", ollama.EMBED,
    ),
    _post(
        "/api/embeddings", OLLAMA, "One vector as the model made it (the older form).",
        lambda to, call: to.ollama.embeddings(call.body, call.response),
        "OllamaEmbedding", ollama.EMBEDDINGS,
    ),
    _get(
        "/api/tags", OLLAMA, "The pool's models.",
        lambda to, call: to.ollama_models.tags(call.response), "OllamaTags",
    ),
    _get(
        "/api/ps", OLLAMA, "The models that are loaded.",
        lambda to, call: to.ollama_models.ps(call.response), "OllamaRunning",
    ),
    _post(
        "/api/show", OLLAMA, "What is known of a model.",
        lambda to, call: to.ollama_models.show(call.body, call.response),
        "OllamaShow", ollama.SHOW,
    ),
    _post(
        "/api/pull", OLLAMA, "Success for a model that is there; nothing is downloaded.",
        lambda to, call: to.ollama_models.pull(call.body, call.response),
        "OllamaStatus", ollama.PULL, stream=NDJSON, event="OllamaStatus",
    ),
    _get(
        "/api/version", OLLAMA, "The version of mlxpool.",
        lambda to, call: to.ollama_models.version(call.response), "OllamaVersion",
    ),
    _get(
        "/health", OPERATIONS, "Whether requests are taken; 503 during a drain.",
        lambda to, call: to.operations.health(call.response), "Health",
        public=True, in_drain=True,
    ),
    _get(
        "/metrics", OPERATIONS, "Metrics for Prometheus.",
        lambda to, call: to.operations.metrics(
            call.request.headers.get("accept", ""), call.response
        ),
        "", content_type="text/plain", in_drain=True,
    ),
    _get(
        "/openapi.json", OPERATIONS, "This document.",
        lambda to, call: to.operations.openapi(call.response), "Document", public=True,
    ),
    _get(
        "/", OPERATIONS, "The name of the server.",
        lambda to, call: to.operations.index(call.response), "Index", public=True,
    ),
)  # fmt: skip

# path -> (its interface, what to do instead); these answer 501
_TEXT_ONLY = "models give text and vectors only"
_CONFIGURED = "models are folders that the pool is configured with (docs/models.md)"
NOT_BUILT: Mapping[str, tuple[Interface, str]] = {
    "/v1/responses": (OPENAI, "use /v1/chat/completions"),
    "/v1/moderations": (OPENAI, "use /v1/classify with a model that classifies texts"),
    "/v1/images/generations": (OPENAI, _TEXT_ONLY),
    "/v1/audio/speech": (OPENAI, _TEXT_ONLY),
    "/v1/audio/transcriptions": (OPENAI, _TEXT_ONLY),
    "/api/push": (OLLAMA, _CONFIGURED),
    "/api/create": (OLLAMA, _CONFIGURED),
    "/api/copy": (OLLAMA, _CONFIGURED),
    "/api/delete": (OLLAMA, _CONFIGURED),
    "/api/blobs/{digest}": (OLLAMA, _CONFIGURED),
}
