"""The gateway's parser of each path that takes JSON, with its fields and a minimal body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.jobs import requests as jobs
from mlxpool.gateway.ollama import fields as ollama_fields
from mlxpool.gateway.ollama import requests as ollama
from mlxpool.gateway.openai import decisions, token_routes, vectors
from mlxpool.gateway.openai import fields as openai_fields
from mlxpool.gateway.openai import requests as openai
from mlxpool.gateway.openai.batches import fields as batch_fields
from mlxpool.gateway.openai.batches import requests as batches
from mlxpool.gateway.openai.responses_api import fields as response_fields
from mlxpool.gateway.openai.responses_api import requests as responses

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
COUNT, EMBED, JOBS, OLLAMA = (
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/jobs", "/api/chat",
)  # fmt: skip
GENERATE = "/api/generate"


class Parser(NamedTuple):
    """The parser of a path: `read` parses a body, `fields` are the known fields.

    `least` is a body with only the required fields.
    """

    read: Callable[[Mapping[str, Any]], Any]
    fields: Body
    least: dict[str, Any]

    def __call__(self, /, **more: Any) -> Any:
        """Parses the minimal body with additional fields."""
        return self.read({**self.least, **more})


MODEL = {"model": "m"}
CHATS = {**MODEL, "messages": HI}
BATCH = {"input_file_id": "f", "endpoint": TEXT, "completion_window": "24h"}
ASKED = {**MODEL, "prompt": "x", "questions": [{}]}
PARSERS: Mapping[str, Parser] = {
    CHAT: Parser(openai.chat, openai_fields.CHAT, CHATS),
    TEXT: Parser(openai.completion, openai_fields.COMPLETION, {**MODEL, "prompt": "x"}),
    RESPONSES: Parser(responses.response, response_fields.RESPONSE, {**MODEL, "input": "x"}),
    MESSAGES: Parser(anthropic.message, anthropic.MESSAGES, {**CHATS, "max_tokens": 5}),
    COUNT: Parser(anthropic.counted, anthropic.COUNT_TOKENS, CHATS),
    JOBS: Parser(jobs.job, jobs.JOB, {**MODEL, "prompt": "x"}),
    "/v1/batches": Parser(batches.new_batch, batch_fields.BATCH, BATCH),
    "/tokenize": Parser(token_routes.tokenize, token_routes.TOKENIZE, {**MODEL, "prompt": "x"}),
    "/detokenize": Parser(
        token_routes.detokenize, token_routes.DETOKENIZE, {**MODEL, "tokens": [1]}
    ),
    EMBED: Parser(vectors.embeddings, openai_fields.EMBEDDINGS, {**MODEL, "input": "x"}),
    "/v1/rerank": Parser(
        vectors.rerank, openai_fields.RERANK, {**MODEL, "query": "x", "documents": ["y"]}
    ),
    "/v1/score": Parser(
        vectors.score, openai_fields.SCORE, {**MODEL, "text_1": "x", "text_2": "y"}
    ),
    "/v1/classify": Parser(vectors.classify, openai_fields.CLASSIFY, {**MODEL, "input": "x"}),
    "/v1/decisions": Parser(decisions.decisions, openai_fields.DECISIONS, ASKED),
    GENERATE: Parser(ollama.generate, ollama_fields.GENERATE, MODEL),
    OLLAMA: Parser(ollama.chat, ollama_fields.CHAT, CHATS),
    "/api/embed": Parser(ollama.embed, ollama_fields.EMBED, MODEL),
    "/api/embeddings": Parser(ollama.embeddings, ollama_fields.EMBEDDINGS, MODEL),
    "/api/show": Parser(ollama.show, ollama_fields.SHOW, MODEL),
    "/api/pull": Parser(ollama.pull, ollama_fields.PULL, MODEL),
}
