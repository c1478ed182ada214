"""The endpoints whose answers are numbers: vectors and scores of texts, and decisions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from mlxpool.client import Ranking
from mlxpool.common.errors import ContextExceeded
from mlxpool.gateway.errors import from_pool_error
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import JSON, ResponseWriter
from mlxpool.gateway.json_parts import encode_in_parts
from mlxpool.gateway.openai import decisions, vectors
from mlxpool.gateway.openai.vectors import EmbeddingRequest, ScoreRequest

AT_ONCE = 16  # most calls of one /v1/score at a time

Answer = TypeVar("Answer")


class VectorRoutes:
    """The handlers of the endpoints whose answers are numbers.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def embeddings(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/embeddings with the vectors of the inputs."""
        request = vectors.embeddings(body)
        model, late = await self._model(request.model, response)
        settings = {**request.settings, **await self._prompt(request)}
        call = self._pool.client.embed(model, request.inputs, **settings, **late)
        vectors_found = await _answer(call, "input")
        response.exchange.count(vectors_found.usage)
        data = await asyncio.to_thread(
            lambda: encode_in_parts(vectors.embeddings_body(request, vectors_found))
        )
        await response.data(data, JSON)

    async def _prompt(self, request: EmbeddingRequest) -> dict[str, str]:
        """Returns the option that names the model's prompt for this type of input.

        Returns an empty map if the model has no such prompt.
        """
        if not request.input_type:
            return {}
        about = (await self._pool.models.described(request.model)).about
        name = vectors.prompt_of_type(request.input_type, about.get("prompts") or ())
        return {} if name is None else {"prompt_name": name}

    async def rerank(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/rerank with the documents, best first, and their scores."""
        request = vectors.rerank(body)
        model, late = await self._model(request.model, response)
        call = self._pool.client.rerank(
            model, request.query, request.documents, **request.settings, **late
        )
        ranking = await _answer(call, "documents")
        response.exchange.count(ranking.usage)
        await response.json(vectors.rerank_body(request, ranking, _new_id("rerank")))

    async def score(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/score with the scores of pairs of texts."""
        request = vectors.score(body)
        rankings = await _answer(self._rate(request, response), "text_2")
        scores = [
            result.score
            for part in rankings
            for result in sorted(part, key=lambda result: result.index)
        ]
        usage = {key: sum(part.usage[key] for part in rankings) for key in rankings[0].usage}
        response.exchange.count(usage)
        await response.json(vectors.score_body(request, scores, usage, _new_id("score")))

    async def _rate(self, request: ScoreRequest, response: ResponseWriter) -> list[Ranking]:
        """Returns the scores of the documents.

        A single query is compared with all documents; otherwise each query is compared with the
        document at the same position.
        """
        model, late = await self._model(request.model, response)
        groups = [(request.queries[0], request.documents)]
        if len(request.queries) > 1:
            pairs = zip(request.queries, request.documents, strict=True)
            groups = [(query, [document]) for query, document in pairs]
        places = asyncio.Semaphore(AT_ONCE)

        async def rate(query: str, documents: list[str]) -> Ranking:
            async with places:
                return await self._pool.client.rerank(
                    model, query, documents, **request.settings, **late
                )

        tasks = [asyncio.ensure_future(rate(*group)) for group in groups]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def classify(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/classify with the labels of texts and their probabilities."""
        request = vectors.classify(body)
        model, late = await self._model(request.model, response)
        call = self._pool.client.classify(model, request.inputs, **request.settings, **late)
        labelled = await _answer(call, "input")
        response.exchange.count(labelled.usage)
        await response.json(vectors.classify_body(request, labelled, _new_id("classify")))

    async def decisions(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/decisions with the answers to questions about a text."""
        request = decisions.decisions(body)
        model, late = await self._model(request.model, response)
        call = self._pool.client.decide_all(
            model, request.prompt, request.questions, **request.settings, **late
        )
        decided = await _answer(call, "prompt")
        response.exchange.count(decided.usage)
        await response.json(decisions.decisions_body(request, decided, _new_id("decide")))

    async def _model(self, name: str, response: ResponseWriter) -> tuple[str, dict[str, Any]]:
        """Returns the pool's name of a model, and the deadline as a keyword argument of calls."""
        model = await self._pool.models.get(name)
        response.exchange.model = model.name
        return model.name, {"deadline_ms": self._pool.deadline_ms}


async def _answer(call: Awaitable[Answer], param: str) -> Answer:
    """Awaits the answer to a call. `param`: the request's field to name if a text is too long."""
    try:
        return await call
    except ContextExceeded as error:
        raise from_pool_error(error, prompt_field=param) from None


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"
