"""The endpoints of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.client import Result
from mlxpool.gateway.anthropic import requests
from mlxpool.gateway.anthropic.bodies import (
    PING,
    MessageEvents,
    MessageFrame,
    ending,
    error_event,
    stop_in,
    usage,
)
from mlxpool.gateway.anthropic.requests import MessageRequest
from mlxpool.gateway.errors import unsupported_parameter
from mlxpool.gateway.formats import HARMONY
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.choice_streams import Answers, StreamFormat, write_stream
from mlxpool.gateway.generation.output_blocks import OutputBlocks
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import chat_ids, text_of_ids, thought_tokens
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.server_sent_events import EVENT_STREAM

IMAGES = "the tokens of images are not counted beforehand; leave the images out"


class MessageRoutes:
    """The handlers of Anthropic's Messages endpoints.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def create(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/messages with a message, as a whole or as a stream of events."""
        request = requests.message(body)
        model = await self._pool.model(request.chat.model, response)
        choice = _with_level(request, model).choice(model)
        async with self._pool.generate([choice], response) as generation:
            frame = MessageFrame(
                generation.id, request.chat.model, request.shows_thoughts, request.eager
            )
            output = OutputBlocks(generation.call_ids(0))
            if not request.stream:
                result = await output.read(generation)
                usage_and_ending = await self._ending(generation, model, request, output, result)
                return await response.json(frame.message(output.blocks, *usage_and_ending))
            events = MessageEvents(frame, output, generation)
            interval = self._pool.settings.keep_alive
            encoding = StreamFormat(
                EVENT_STREAM,
                events.update,
                error_event,
                keep_alive=PING,
                keep_alive_interval=interval,
            )
            results = await write_stream(response, generation, encoding)
            if results is not None:
                usage_and_ending = await self._ending(
                    generation, model, request, output, results[0]
                )
                await response.write(events.tail(*usage_and_ending))
                await response.close()

    async def count(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/messages/count_tokens with the number of tokens of a chat."""
        chat = requests.counted(body)
        if chat.images:
            raise unsupported_parameter("messages", IMAGES)
        model = await self._pool.models.get(chat.model)
        response.exchange.model = model.name
        ids = await chat_ids(self._pool.client, chat, model)
        await response.json({"input_tokens": len(ids)})

    async def _ending(
        self,
        generation: Answers,
        model: ModelInfo,
        request: MessageRequest,
        output: OutputBlocks,
        result: Result,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the usage, and the reason of the answer's end."""
        client = self._pool.client
        thoughts = await thought_tokens(client, generation, model, output, result)
        stop = await self._stop(model, request, result)
        return usage(result, thoughts), ending(result, output.calls, stop, request.max_tokens)

    async def _stop(self, model: ModelInfo, request: MessageRequest, result: Result) -> str | None:
        """Returns the stop sequence that ended the answer; None if there is none.

        The pool does not report the sequence, so it is found in the text of the answer's ids.
        """
        if result.reason != "stop" or not request.stops:
            return None
        text = await text_of_ids(self._pool.client, model, result)
        return None if text is None else stop_in(text, result, request.stops)


def _with_level(request: MessageRequest, model: ModelInfo) -> ChatRequest:
    """Returns the chat, with the request's level of thinking if the model's template has levels."""
    chat = request.chat
    levels = model.chat is not None and model.chat.thinking == HARMONY
    if request.level is None or not levels or chat.options.get("think") is False:
        return chat
    return replace(chat, options={**chat.options, "think": request.level})
