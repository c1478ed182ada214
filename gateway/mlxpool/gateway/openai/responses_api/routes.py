"""The endpoint of OpenAI's Responses."""

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
from mlxpool.gateway.openai.responses_api.stream import ResponseEvents
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE


class ResponseRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def create(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /v1/responses."""
        request = requests.response(body)
        model = await self._pool.models.get(request.chat.model)
        if request.truncates:
            chat = await fitted(self._pool, request.chat, model, "truncation")
            request = replace(request, chat=chat)
        choice = request.chat.choice(model)
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
