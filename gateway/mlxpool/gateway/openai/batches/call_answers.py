"""The bodies of answers that are numbers, of the lines of a batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.client import DecisionList, Result, Vectors
from mlxpool.client.vectors import ranked
from mlxpool.gateway.openai import decisions, vectors
from mlxpool.gateway.openai.batches.fields import CLASSIFY, DECISIONS, EMBEDDINGS, RERANK, SCORE
from mlxpool.gateway.openai.batches.lines import Asked
from mlxpool.gateway.openai.decisions import DecisionRequest
from mlxpool.gateway.openai.vectors import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)

Line = Mapping[str, Any]  # of the pool, see lines.pool_line


def call_body(endpoint: str, line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    """What an endpoint of fields.CALLS answers. `name`: of the job, in hexadecimal digits.

    Raises ValueError for the result of another kind of job.
    """
    return BODIES[endpoint](line, asked, name, result)


def _embeddings(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    request = EmbeddingRequest(asked.model, [], asked.as_base64, {})
    return vectors.embeddings_body(request, Vectors.of(result))


def _rerank(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    documents = list(line["documents"])
    found = ranked(Vectors.of(result), documents, asked.top)
    request = RerankRequest(asked.model, line["query"], documents, asked.with_documents, {})
    return vectors.rerank_body(request, found, f"rerank-{name}")


def _score(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    found = ranked(Vectors.of(result), line["documents"])
    scores = [one.score for one in sorted(found, key=lambda one: one.index)]
    request = ScoreRequest(asked.model, [], [])
    return vectors.score_body(request, scores, found.usage, f"score-{name}")


def _classify(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    request = ClassifyRequest(asked.model, [])
    return vectors.classify_body(request, Vectors.of(result), f"classify-{name}")


def _decisions(line: Line, asked: Asked, name: str, result: Result) -> dict[str, Any]:
    found = DecisionList.of(result, line["questions"])
    return decisions.decisions_body(
        DecisionRequest(asked.model, "", [], {}), found, f"decide-{name}"
    )


BODIES: Mapping[str, Callable[[Line, Asked, str, Result], dict[str, Any]]] = {
    EMBEDDINGS: _embeddings,
    RERANK: _rerank,
    SCORE: _score,
    CLASSIFY: _classify,
    DECISIONS: _decisions,
}
