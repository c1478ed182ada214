"""The endpoint of OpenAI's Responses that makes a response; kept_routes.py has the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxpool.client import Result
from mlxpool.gateway.generation.choice_streams import PoolAccess, StreamFormat, write_stream
from mlxpool.gateway.generation.fitting import fitted
from mlxpool.gateway.generation.output_blocks import OutputBlocks
from mlxpool.gateway.generation.token_counts import thought_tokens
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.responses_api import requests
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame
from mlxpool.gateway.openai.responses_api.kept_routes import KeptResponseRoutes
from mlxpool.gateway.openai.responses_api.stream import ResponseEvents
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE


class ResponseRoutes:
    """Makes responses. Raises HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess, kept: KeptResponseRoutes) -> None:
        self._pool = pool
        self._kept = kept

    async def create(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """POST /v1/responses. `idempotency`: the header Idempotency-Key, for what is kept."""
        previous = requests.previous_id(body)
        earlier = None if previous is None else await self._kept.earlier(previous)
        request = requests.response(body, earlier)
        model = await self._pool.models.get(request.chat.model)
        if request.truncates:
            chat = await fitted(self._pool, request.chat, model, "truncation")
            request = replace(request, chat=chat)
        choice = request.chat.choice(model)
        if request.store:
            return await self._kept.create(request, choice, response, idempotency)
        async with self._pool.generate([choice], response.exchange, "input") as generation:
            frame = ResponseFrame(generation.id, int(time.time()), request.echoed, request.summary)
            output = OutputBlocks()

            async def ended(result: Result) -> dict[str, Any]:
                client = self._pool.client
                thoughts = await thought_tokens(client, generation, model, output, result)
                return frame.ended(output.blocks, result, thoughts)

            if not request.stream:
                result = await output.read(generation)
                return await response.json(await ended(result))
            events = ResponseEvents(frame, output)
            interval = self._pool.settings.keep_alive
            encoding = StreamFormat(
                EVENT_STREAM, events.update, events.failed, events.head(), KEEP_ALIVE, interval
            )
            results = await write_stream(response, generation, encoding)
            if results is not None:
                await response.write(events.tail(await ended(results[0])))
                await response.close()
