"""The endpoints of OpenAI's interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mlxpool.client import Result
from mlxpool.gateway.completion import NO_CHAT, Ask, Flow, Step
from mlxpool.gateway.errors import Fault, bad
from mlxpool.gateway.formats.events import Content
from mlxpool.gateway.http import Reply
from mlxpool.gateway.openai import fields
from mlxpool.gateway.openai.answers import (
    WAITING,
    ChatChoice,
    Chunks,
    TextChunks,
    TextLogprobs,
    Whole,
    chat_choice,
    sse,
    text_choice,
    usage,
)
from mlxpool.gateway.openai.fields import Asked
from mlxpool.gateway.responses import Serving, steps, stream

EVENTS = "text/event-stream; charset=utf-8"


class Frames(Protocol):
    """How the steps of a stream are written."""

    def first(self) -> bytes: ...

    def of(self, step: Step) -> bytes: ...

    def last(self, results: Sequence[Result], choices: int) -> bytes: ...


class OpenAI:
    """Bodies in, replies out. All raise Fault and PoolError before a reply has begun."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._started = int(time.time())

    async def models(self, reply: Reply) -> None:
        """GET /v1/models."""
        rows = await self._serving.models.all()
        data = [self._row(str(row["name"]), row) for row in rows]
        await reply.json({"object": "list", "data": data})

    async def model(self, name: str, reply: Reply) -> None:
        """GET /v1/models/{name}."""
        await reply.json(self._row(name, await self._serving.models.get(name)))

    def _row(self, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "mlxpool",
            "max_model_len": row.get("context") or None,
            "state": row.get("state"),
        }

    async def chat(self, body: Mapping[str, Any], reply: Reply) -> None:
        """POST /v1/chat/completions."""
        asked = fields.chat(body)
        row = await self._serving.models.get(asked.model)
        formats = row.get("chat") or NO_CHAT
        if asked.tools and formats.get("tools") is None:
            words = f"the chat template of {asked.model!r} knows no tools; leave `tools` out"
            raise bad(words, "tools", "unsupported_parameter")
        if asked.thinks and formats.get("thinking") is None:
            words = f"the chat template of {asked.model!r} knows no thinking; leave it out"
            raise bad(words, "reasoning_effort", "unsupported_parameter")
        async with self._flow(asked, str(row["name"]), formats) as flow:
            frame = _frame(f"chatcmpl-{flow.id}", "chat.completion", asked)
            if asked.stream:
                frame["object"] = "chat.completion.chunk"
                chats = [ChatChoice() for _ in range(flow.choices)]
                chunks = Chunks(frame, asked.logprobs, asked.usage, chats)
                return await self._stream(flow, asked, chunks, reply)
            wholes = await _gathered(flow)
        choices = [
            chat_choice(number, whole, logprobs=asked.logprobs)
            for number, whole in enumerate(wholes)
        ]
        await reply.json(_with_usage({**frame, "choices": choices}, wholes, asked))

    async def completion(self, body: Mapping[str, Any], reply: Reply) -> None:
        """POST /v1/completions."""
        asked = fields.completion(body)
        async with self._flow(asked, asked.model, NO_CHAT) as flow:
            frame = _frame(f"cmpl-{flow.id}", "text_completion", asked)
            if asked.stream:
                offsets = [TextLogprobs() for _ in range(flow.choices)]
                chunks = TextChunks(frame, asked.logprobs, asked.usage, offsets)
                return await self._stream(flow, asked, chunks, reply)
            wholes = await _gathered(flow)
        choices = []
        for number, whole in enumerate(wholes):
            logprobs = TextLogprobs().of(whole.logprobs) if asked.logprobs else None
            reason = whole.ended.reason
            choices.append(text_choice(number, whole.text(Content), logprobs, reason))
        await reply.json(_with_usage({**frame, "choices": choices}, wholes, asked))

    def _flow(self, asked: Asked, model: str, formats: Mapping[str, str | None]) -> Flow:
        every = [self._serving.bounded(one, formats) for one in asked.arguments()]
        return self._serving.flow([Ask(model, one, formats, asked.tools) for one in every])

    async def _stream(self, flow: Flow, asked: Asked, frames: Frames, reply: Reply) -> None:
        patience = self._serving.settings.keep_alive
        results = await stream(
            reply, flow, EVENTS, patience, frames.of, frames.first(), WAITING, _failed
        )
        if results is not None:
            await reply.write(frames.last(results, asked.choices))
            await reply.close()


def _frame(name: str, kind: str, asked: Asked) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": asked.model}


def _failed(fault: Fault) -> bytes:
    return sse(fault.openai(), "error")


async def _gathered(flow: Flow) -> list[Whole]:
    wholes = [Whole() for _ in range(flow.choices)]
    async for step in steps(flow):
        if step is not None:
            wholes[step.choice].add(step)
    return wholes


def _with_usage(answer: dict[str, Any], wholes: Sequence[Whole], asked: Asked) -> dict[str, Any]:
    return {**answer, "usage": usage([whole.ended for whole in wholes], asked.choices)}
