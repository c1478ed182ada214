"""The endpoint of OpenAI's Responses that makes a response; kept_routes.py has the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.client import Result
from mlxpool.common.errors import JobsOff
from mlxpool.gateway.errors import unsupported_parameter
from mlxpool.gateway.generation.choice_streams import StreamFormat, write_stream
from mlxpool.gateway.generation.fitting import fitted
from mlxpool.gateway.generation.output_blocks import OutputBlocks
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import thought_tokens
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.openai.responses_api import requests
from mlxpool.gateway.openai.responses_api.bodies import ResponseFrame
from mlxpool.gateway.openai.responses_api.kept_routes import KeptResponseRoutes
from mlxpool.gateway.openai.responses_api.stream import ResponseEvents
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE

UNKEPT = "nothing is kept, for this pool keeps no jobs"
INSTEAD = {  # field that needs a pool which keeps jobs -> what to do in one that does not
    "background": f"{UNKEPT}; leave it out: the answer comes with this request",
    "store": f"{UNKEPT}; leave it out",
    "previous_response_id": f"{UNKEPT}: send the whole conversation in `input`",
}


@contextlib.contextmanager
def _needs_store(field: str) -> Iterator[None]:
    """Raises HttpError naming the field in place of JobsOff."""
    try:
        yield
    except JobsOff:
        raise unsupported_parameter(field, INSTEAD[field]) from None


class ResponseRoutes:
    """Makes responses. Raises HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess, kept: KeptResponseRoutes) -> None:
        self._pool = pool
        self._kept = kept

    async def create(
        self, body: Mapping[str, Any], response: ResponseWriter, idempotency: str | None
    ) -> None:
        """POST /v1/responses. `idempotency`: the header Idempotency-Key, for what is kept."""
        request = requests.response(body)
        previous = requests.previous_id(body)
        if previous is not None:
            with _needs_store("previous_response_id"):
                earlier = await self._kept.earlier(previous)
            request = requests.response(body, earlier)
        if request.store:
            with _needs_store("background" if request.background else "store"):
                model = await self._kept.model(request.chat.model, idempotency)
        else:
            model = await self._pool.model(request.chat.model, response)
        if request.truncates:
            chat = await fitted(self._pool, request.chat, model, "truncation")
            request = replace(request, chat=chat)
        choice = request.chat.choice(model)
        if request.store:
            with _needs_store("background" if request.background else "store"):
                await self._kept.create(request, choice, response, idempotency)
            return
        async with self._pool.generate([choice], response, "input") as generation:
            created = int(generation.told_time())
            frame = ResponseFrame(generation.id, created, request.echoed, request.summary)
            output = OutputBlocks(generation.call_ids(0))

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
