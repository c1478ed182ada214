"""The table of all routes. The application serves it, and openapi.json is made from it.

To add a route, add a line here, and a method in the folder of its interface or in
operation_routes.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.protocol.kept.job_messages import RELEASE, RETRY
from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.http import NDJSON
from mlxpool.gateway.jobs.requests import EVENTS, JOB, LISTED
from mlxpool.gateway.ollama import fields as ollama
from mlxpool.gateway.openai import fields as openai
from mlxpool.gateway.openai.batches.fields import BATCH, BATCHES, FILES
from mlxpool.gateway.openai.responses_api.fields import INPUT_ITEMS, RESPONSE, RETRIEVED
from mlxpool.gateway.openai.token_routes import DETOKENIZE, TOKENIZE
from mlxpool.gateway.route_spec import (
    ANTHROPIC,
    OLLAMA,
    OPENAI,
    OPERATIONS,
    Interface,
    Routes,
    RouteSpec,
)
from mlxpool.gateway.server_sent_events import EVENT_STREAM

__all__ = ["ANTHROPIC", "NOT_BUILT", "OLLAMA", "OPENAI", "OPERATIONS", "ROUTES", "Interface"]


def _events(event: str) -> dict[str, str]:
    """Returns the options of a route that can stream server-sent events with this schema."""
    return {"stream": EVENT_STREAM, "event": event}


def _lines(event: str) -> dict[str, str]:
    """Returns the options of a route that can stream lines of JSON with this schema."""
    return {"stream": NDJSON, "event": event}


of_openai, of_anthropic = Routes(OPENAI), Routes(ANTHROPIC)
of_ollama, of_operations = Routes(OLLAMA), Routes(OPERATIONS)

# Each route: path, summary, method, fields of the body, schema of the answer.
ROUTES: tuple[RouteSpec, ...] = (
    of_openai.get("/v1/models", "The pool's models.", lambda to: to.openai.models, "ModelList"),
    of_openai.get_with(
        "/v1/models/{name:path}", "One model.",
        lambda to, call: to.openai.model(str(call.request.path_params["name"]), call.response),
        "Model",
    ),
    of_openai.post(
        "/v1/chat/completions", "The next message of a chat.",
        lambda to: to.openai.chat, openai.CHAT, "ChatCompletion", **_events("ChatCompletionChunk"),
    ),
    of_openai.post(
        "/v1/completions", "The continuation of a text or of token ids.",
        lambda to: to.openai.completion, openai.COMPLETION, "Completion", **_events("Completion"),
    ),
    of_openai.post_with(
        "/v1/responses", "The next items of a conversation.",
        lambda to, call: to.responses.create(call.body, call.response, call.idempotency),
        "Response", body=RESPONSE, **_events("ResponseEvent"),
    ),
    of_openai.get_with(
        "/v1/responses/{id}", "A response that is kept.",
        lambda to, call: to.kept_responses.retrieve(call.id, call.query, call.response),
        "Response", query=RETRIEVED, **_events("ResponseEvent"),
    ),
    of_openai.delete(
        "/v1/responses/{id}", "Deletes a response that is kept.",
        lambda to, call: to.kept_responses.delete(call.id, call.response), "Deleted",
    ),
    of_openai.post_with(
        "/v1/responses/{id}/cancel", "Cancels a response in the background.",
        lambda to, call: to.kept_responses.cancel(call.id, call.response), "Response",
    ),
    of_openai.get_with(
        "/v1/responses/{id}/input_items", "The conversation that the model was given.",
        lambda to, call: to.kept_responses.input_items(call.id, call.query, call.response),
        "ResponseItems", query=INPUT_ITEMS,
    ),
    of_openai.post_with(
        "/v1/files", "Keeps a file for a batch.",
        lambda to, call: to.files.upload(call.request, call.response), "File",
        reads_body=True,
    ),
    of_openai.get_with(
        "/v1/files", "The files that were uploaded.",
        lambda to, call: to.files.list(call.query, call.response), "FileList", query=FILES,
    ),
    of_openai.get_with(
        "/v1/files/{id}", "A file.",
        lambda to, call: to.files.retrieve(call.id, call.response), "File",
    ),
    of_openai.delete(
        "/v1/files/{id}", "Deletes a file.",
        lambda to, call: to.files.delete(call.id, call.response), "Deleted",
    ),
    of_openai.get_with(
        "/v1/files/{id}/content", "The bytes of a file.",
        lambda to, call: to.files.content(call.id, call.response), "",
        content_type="application/jsonl", watched=True,
    ),
    of_openai.post_with(
        "/v1/batches", "Has each line of a file answered.",
        lambda to, call: to.batches.create(call.body, call.response, call.idempotency),
        "Batch", body=BATCH,
    ),
    of_openai.get_with(
        "/v1/batches", "Batches, newest first.",
        lambda to, call: to.batches.list(call.query, call.response), "BatchList", query=BATCHES,
    ),
    of_openai.get_with(
        "/v1/batches/{id}", "A batch.",
        lambda to, call: to.batches.retrieve(call.id, call.response), "Batch",
    ),
    of_openai.post_with(
        "/v1/batches/{id}/cancel", "Cancels a batch.",
        lambda to, call: to.batches.cancel(call.id, call.response), "Batch",
    ),
    of_openai.post_with(
        "/v1/jobs", "A completion that is made whoever is there to read it.",
        lambda to, call: to.jobs.submit(call.body, call.response, call.idempotency),
        "Job", body=JOB,
    ),
    of_openai.get_with(
        "/v1/jobs", "Jobs, newest first; with `after` only jobs that ended since.",
        lambda to, call: to.jobs.list(call.query, call.response), "JobList", query=LISTED,
    ),
    of_openai.get_with(
        "/v1/jobs/{id}", "One job, by its id or its key.",
        lambda to, call: to.jobs.read(call.id, call.response), "Job",
    ),
    of_openai.get_with(
        "/v1/jobs/{id}/events", "The output of a job, from any id, while it is made and later.",
        lambda to, call: to.jobs.events(
            call.id, call.query, call.request.headers.get("last-event-id"), call.response
        ),
        "", content_type="text/plain", query=EVENTS, **_events("JobEvent"),
    ),
    of_openai.post_with(
        "/v1/jobs/{id}/cancel", "Cancels a job.",
        lambda to, call: to.jobs.cancel(call.id, call.response), "Job",
    ),
    of_openai.post_with(
        "/v1/jobs/{id}/retry", "Lets a job that is dead or expired be tried again.",
        lambda to, call: to.jobs.change(RETRY, call.id, call.response), "Job",
    ),
    of_openai.post_with(
        "/v1/jobs/{id}/release", "Deletes the result of a job that has ended.",
        lambda to, call: to.jobs.change(RELEASE, call.id, call.response), "Job",
    ),
    of_openai.post(
        "/v1/embeddings", "A vector for each text.",
        lambda to: to.vectors.embeddings, openai.EMBEDDINGS, "Embeddings",
    ),
    of_openai.post(
        "/v1/rerank", "Documents in the order of their relevance for a query.",
        lambda to: to.vectors.rerank, openai.RERANK, "Ranking",
    ),
    of_openai.post(
        "/v1/score", "The relevance of texts for a text.",
        lambda to: to.vectors.score, openai.SCORE, "Scores",
    ),
    of_openai.post(
        "/v1/classify", "A label for each text.",
        lambda to: to.vectors.classify, openai.CLASSIFY, "Classes",
    ),
    of_openai.post(
        "/v1/decisions", "Probabilities of given answers to questions about a text.",
        lambda to: to.vectors.decisions, openai.DECISIONS, "Decisions",
    ),
    of_openai.post(
        "/tokenize", "The token ids of a text or a chat.",
        lambda to: to.tokens.tokenize, TOKENIZE, "Tokens",
    ),
    of_openai.post(
        "/detokenize", "The text of token ids.",
        lambda to: to.tokens.detokenize, DETOKENIZE, "TokenText",
    ),
    of_anthropic.post(
        "/v1/messages", "The next message of a chat.",
        lambda to: to.anthropic.create, anthropic.MESSAGES, "AnthropicMessage",
        **_events("AnthropicEvent"),
    ),
    of_anthropic.post(
        "/v1/messages/count_tokens", "The number of tokens of a chat.",
        lambda to: to.anthropic.count, anthropic.COUNT_TOKENS, "AnthropicCount",
    ),
    of_ollama.post(
        "/api/generate", "The answer to a prompt; without a prompt the model is loaded.",
        lambda to: to.ollama.generate, ollama.GENERATE, "OllamaGenerated",
        **_lines("OllamaGenerated"),
    ),
    of_ollama.post(
        "/api/chat", "The next message of a chat; without messages the model is loaded.",
        lambda to: to.ollama.chat, ollama.CHAT, "OllamaChat", **_lines("OllamaChat"),
    ),
    of_ollama.post(
        "/api/embed", "A vector of the length 1 for each text.",
        lambda to: to.ollama.embed, ollama.EMBED, "OllamaEmbed",
    ),
    of_ollama.post(
        "/api/embeddings", "One vector as the model made it (the older form).",
        lambda to: to.ollama.embeddings, ollama.EMBEDDINGS, "OllamaEmbedding",
    ),
    of_ollama.get(
        "/api/tags", "The pool's models.", lambda to: to.ollama_models.tags, "OllamaTags"
    ),
    of_ollama.get(
        "/api/ps", "The models that are loaded.", lambda to: to.ollama_models.ps, "OllamaRunning"
    ),
    of_ollama.post(
        "/api/show", "The details of a model.",
        lambda to: to.ollama_models.show, ollama.SHOW, "OllamaShow",
    ),
    of_ollama.post(
        "/api/pull", "Success for a model that is there; nothing is downloaded.",
        lambda to: to.ollama_models.pull, ollama.PULL, "OllamaStatus", **_lines("OllamaStatus"),
    ),
    of_ollama.get(
        "/api/version", "The version of mlxpool.",
        lambda to: to.ollama_models.version, "OllamaVersion",
    ),
    of_operations.get(
        "/health", "Whether requests are taken; 503 during a drain.",
        lambda to: to.operations.health, "Health", public=True, in_drain=True,
    ),
    of_operations.get_with(
        "/metrics", "Metrics for Prometheus.",
        lambda to, call: to.operations.metrics(
            call.request.headers.get("accept", ""), call.response
        ),
        "", content_type="text/plain", in_drain=True, operator=True,
    ),
    of_operations.get(
        "/openapi.json", "This document.", lambda to: to.operations.openapi, "Document", public=True
    ),
    of_operations.get(
        "/", "The sentence that Ollama's clients look for.", lambda to: to.operations.index, "",
        content_type="text/plain", public=True,
    ),
)  # fmt: skip

# path answered with 501 -> (its interface, what to do instead)
_TEXT_ONLY = "models give text and vectors only"
_CONFIGURED = "models are folders that the pool is configured with (docs/models.md)"
_ADAPTERS = "LoRA adapters are not applied: merge one into the weights of its model"
_UNKEPT = "go on with previous_response_id of /v1/responses"
NOT_BUILT: Mapping[str, tuple[Interface, str]] = {
    "/v1/conversations": (OPENAI, _UNKEPT),
    "/v1/messages/batches": (ANTHROPIC, "send each request to /v1/messages"),
    "/v1/moderations": (OPENAI, "use /v1/classify with a model that classifies texts"),
    "/v1/images/generations": (OPENAI, _TEXT_ONLY),
    "/v1/audio/speech": (OPENAI, _TEXT_ONLY),
    "/v1/audio/transcriptions": (OPENAI, _TEXT_ONLY),
    "/v1/audio/translations": (OPENAI, _TEXT_ONLY),
    "/v1/videos": (OPENAI, _TEXT_ONLY),
    "/v1/load_lora_adapter": (OPENAI, _ADAPTERS),
    "/v1/unload_lora_adapter": (OPENAI, _ADAPTERS),
    "/api/push": (OLLAMA, _CONFIGURED),
    "/api/create": (OLLAMA, _CONFIGURED),
    "/api/copy": (OLLAMA, _CONFIGURED),
    "/api/delete": (OLLAMA, _CONFIGURED),
    "/api/blobs/{digest}": (OLLAMA, _CONFIGURED),
}
