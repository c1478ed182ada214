"""The endpoints for token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import chat_ids
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.tokens import requests
from mlxpool.gateway.openai.tokens.requests import TokenizeRequest


class TokenRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def tokenize(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /tokenize."""
        request = requests.tokenize(body)
        model = await self._get(request.model, response)
        ids = await self._ids(request, model)
        client = self._pool.client
        strings = await client.token_texts(model.name, ids) if request.strings else None
        await response.json(
            {
                "count": len(ids),
                "max_model_len": model.context or None,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /detokenize."""
        request = requests.detokenize(body)
        model = await self._get(request.model, response)
        text = await self._pool.client.detokenize(model.name, request.ids)
        await response.json({"prompt": text})

    async def _get(self, name: str, response: ResponseWriter) -> ModelInfo:
        model = await self._pool.models.get(name)
        response.exchange.model = model.name
        return model

    async def _ids(self, request: TokenizeRequest, model: ModelInfo) -> list[int]:
        if request.chat is not None:
            return await chat_ids(self._pool.client, request.chat, model)
        assert request.prompt is not None
        client = self._pool.client
        ids = await client.tokenize(model.name, request.prompt)
        if request.special:
            return ids
        # A text that does not begin with the special tokens gets them in front.
        added = await client.tokenize(model.name, "")
        written = await client.detokenize(model.name, added)
        return ids if request.prompt.startswith(written) else ids[len(added) :]
