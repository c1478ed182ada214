"""The endpoints of OpenAI's interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from mlxpool.gateway.formats.events import Content
from mlxpool.gateway.generation.choice_streams import (
    Answers,
    ChoiceRequest,
    StreamFormat,
    write_stream,
)
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai import requests
from mlxpool.gateway.openai.requests import CompletionRequest
from mlxpool.gateway.openai.responses import (
    ChatChunks,
    DeltaBuilder,
    StreamFrame,
    TextChunks,
    TextLogprobs,
    WholeChoice,
    best,
    chat_choice,
    error_event,
    text_choice,
    usage,
    vllm_prompt_logprobs,
)
from mlxpool.gateway.server_sent_events import EVENT_STREAM, KEEP_ALIVE

NO_ENDS = {"first_id": None, "last_id": None}  # in a list without models


class OpenAIRoutes:
    """The handlers of OpenAI's endpoints for models and completions.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool
        self._started_at = int(time.time())

    async def models(self, response: ResponseWriter) -> None:
        """Answers GET /v1/models with a list of the models."""
        models = await self._pool.models.all()
        data = [self._model(model.name, model) for model in models]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else NO_ENDS
        await response.json({"object": "list", "data": data, "has_more": False, **ends})

    async def model(self, name: str, response: ResponseWriter) -> None:
        """Answers GET /v1/models/{name} with the properties of a model."""
        model = await self._pool.models.get(name)
        response.exchange.model = model.name
        await response.json(self._model(name, model))

    def _model(self, name: str, model: ModelInfo) -> dict[str, Any]:
        """Returns the JSON object of a model, with additional members for Anthropic's clients."""
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._started_at,
            "created_at": datetime.fromtimestamp(self._started_at, UTC).isoformat(),
            "max_input_tokens": model.context or None,
            "owned_by": "mlxpool",
            "max_model_len": model.context or None,
            "state": model.state,
        }

    async def chat(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/chat/completions with the next message of a chat."""
        request = requests.chat(body)
        model = await self._pool.model(request.model, response)
        choice = replace(request.chat.choice(model), n=request.candidates)
        async with self._pool.generate([choice], response) as generation:
            members = _members(f"chatcmpl-{generation.id}", "chat.completion", request, generation)
            ids = [generation.call_ids(number) for number in range(generation.choices)]
            if request.stream:
                members["object"] = "chat.completion.chunk"
                frame = StreamFrame(members, request.usage)
                builders = [DeltaBuilder(call_id) for call_id in ids]
                chunks = ChatChunks(frame, request.logprobs, builders)
                return await self._stream(generation, request, chunks, response)
            wholes = await _collect(generation)
        choices = [
            chat_choice(number, whole, ids[number], logprobs=request.logprobs)
            for number, whole in enumerate(wholes)
        ]
        if request.prompt_logprobs:
            members["prompt_logprobs"] = vllm_prompt_logprobs(wholes[0].prompt)
        await response.json(_with_usage({**members, "choices": choices}, wholes, request))

    async def completion(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /v1/completions with completions of the prompts."""
        request = requests.completion(body)
        model = await self._pool.model(request.model, response)
        candidates, prompts = request.candidates, request.arguments()
        prompt_requests = [ChoiceRequest(model.name, prompt, n=candidates) for prompt in prompts]
        async with self._pool.generate(prompt_requests, response) as generation:
            members = _members(f"cmpl-{generation.id}", "text_completion", request, generation)
            if request.stream:
                frame = StreamFrame(members, request.usage)
                offsets = [TextLogprobs() for _ in range(generation.choices)]
                echoes = request.candidates if request.echo else 0
                chunks = TextChunks(frame, request.logprobs, offsets, echoes)
                return await self._stream(generation, request, chunks, response)
            wholes = await _collect(generation)
        firsts = [whole for whole in wholes[:: request.candidates] for _ in range(request.choices)]
        shown = best(wholes, request.candidates, request.choices)
        choices = []
        for number, (whole, first) in enumerate(zip(shown, firsts, strict=True)):
            entries = [*(first.prompt if request.echo else ()), *whole.logprobs]
            logprobs = TextLogprobs().add(entries) if request.logprobs else None
            reason = whole.final_result.reason
            choices.append(text_choice(number, whole.text(Content), logprobs, reason))
            if request.prompt_logprobs:
                choices[-1]["prompt_logprobs"] = vllm_prompt_logprobs(first.prompt)
        await response.json(_with_usage({**members, "choices": choices}, wholes, request))

    async def _stream(
        self,
        generation: Answers,
        request: CompletionRequest,
        chunks: ChatChunks | TextChunks,
        response: ResponseWriter,
    ) -> None:
        interval = self._pool.settings.keep_alive
        encoding = StreamFormat(
            EVENT_STREAM, chunks.update, error_event, chunks.head(), KEEP_ALIVE, interval
        )
        results = await write_stream(response, generation, encoding)
        if results is not None:
            await response.write(chunks.frame.tail(results, request.candidates))
            await response.close()


def _members(
    name: str, kind: str, request: CompletionRequest, generation: Answers
) -> dict[str, Any]:
    created = int(generation.told_time())
    return {"id": name, "object": kind, "created": created, "model": request.model}


async def _collect(generation: Answers) -> list[WholeChoice]:
    wholes = [WholeChoice() for _ in range(generation.choices)]
    async for update in generation.updates():
        if update is not None:
            wholes[update.choice].add(update)
    return wholes


def _with_usage(
    answer: dict[str, Any], wholes: Sequence[WholeChoice], request: CompletionRequest
) -> dict[str, Any]:
    results = [whole.final_result for whole in wholes]
    return {**answer, "usage": usage(results, request.candidates)}
