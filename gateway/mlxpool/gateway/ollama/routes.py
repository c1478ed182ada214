"""The endpoints of Ollama's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.completion import NO_CHAT, Ask, Step
from mlxpool.gateway.errors import Fault, bad
from mlxpool.gateway.formats import HARMONY
from mlxpool.gateway.http import Reply
from mlxpool.gateway.ollama import fields
from mlxpool.gateway.ollama.answers import (
    Said,
    Talk,
    chat_body,
    ended,
    generate_body,
    line,
    loaded,
    running,
    show,
    tag,
)
from mlxpool.gateway.ollama.fields import Asked
from mlxpool.gateway.responses import FOREVER, Serving, steps, stream

LINES = "application/x-ndjson"
UP = ("ready", "draining")  # states of models that have workers

Body = Callable[[Said], dict[str, Any]]


class Ollama:
    """Bodies in, replies out. All raise Fault and PoolError before a reply has begun."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def version(self, reply: Reply) -> None:
        """GET /api/version: this package's."""
        await reply.json({"version": version("mlxpool")})

    async def tags(self, reply: Reply) -> None:
        """GET /api/tags."""
        await reply.json({"models": [tag(row) for row in await self._serving.models.all()]})

    async def ps(self, reply: Reply) -> None:
        """GET /api/ps."""
        rows = await self._serving.models.all()
        await reply.json({"models": [running(row) for row in rows if row["state"] in UP]})

    async def show(self, body: Mapping[str, Any], reply: Reply) -> None:
        """POST /api/show."""
        await reply.json(show(await self._serving.models.get(fields.model(body))))

    async def generate(self, body: Mapping[str, Any], reply: Reply) -> None:
        """POST /api/generate."""
        asked = fields.generate(body)
        row = await self._row(asked)
        makes = partial(generate_body, asked.model)
        if not asked.prompt:
            return await self._load(row, asked, makes, reply)
        if asked.raw or row.get("chat") is None:
            if asked.system and not asked.raw:
                words = f"{asked.model!r} has no chat template, so it takes no system message"
                raise bad(words, "system")
            return await self._answer(row, asked, {"prompt": asked.prompt}, makes, reply)
        system = [{"role": "system", "content": asked.system}] if asked.system else []
        messages = [*system, {"role": "user", "content": asked.prompt}]
        await self._answer(row, asked, {"messages": messages}, makes, reply)

    async def chat(self, body: Mapping[str, Any], reply: Reply) -> None:
        """POST /api/chat."""
        asked = fields.chat(body)
        row = await self._row(asked)
        makes = partial(chat_body, asked.model)
        if not asked.messages:
            return await self._load(row, asked, makes, reply)
        if asked.tools and not (row.get("chat") or NO_CHAT).get("tools"):
            raise bad(f"{asked.model!r} does not support tools", "tools")
        tools = {"tools": asked.tools} if asked.tools else {}
        await self._answer(row, asked, {"messages": asked.messages, **tools}, makes, reply)

    async def _row(self, asked: Asked) -> Mapping[str, Any]:
        row = await self._serving.models.get(asked.model)
        context = row.get("context") or 0
        if asked.num_ctx is not None and asked.num_ctx > context:
            words = f"options.num_ctx is {asked.num_ctx}, the context of the model is {context}"
            if not context:
                words = "options.num_ctx: the context of this model is not known; leave it out"
            raise bad(words, "options.num_ctx")
        return row

    async def _load(self, row: Mapping[str, Any], asked: Asked, makes: Body, reply: Reply) -> None:
        """Nothing to complete: the model is started, which a question about a text does too."""
        try:
            await self._serving.client.tokenize(str(row["name"]), "")
        except PoolError as error:
            raise errors.of(error) from error
        value = {**makes(Said()), **loaded()}
        if not asked.stream:
            return await reply.json(value)
        await reply.open(LINES)
        await reply.write(line(value))
        await reply.close()

    async def _answer(
        self,
        row: Mapping[str, Any],
        asked: Asked,
        prompt: Mapping[str, Any],
        makes: Body,
        reply: Reply,
    ) -> None:
        chat = row.get("chat") or NO_CHAT
        read = chat if "messages" in prompt else NO_CHAT
        arguments = {**prompt, **asked.options, **_think(asked, chat)}
        ask = Ask(str(row["name"]), self._serving.bounded(arguments, read), read, asked.tools)
        talk = Talk()
        async with self._serving.flow([ask]) as flow:
            if not asked.stream:
                gathered = [step async for step in steps(flow) if step is not None]
                result = gathered[-1].result
                assert result is not None
                return await reply.json({**makes(talk.of(gathered)), **ended(result)})

            def write(step: Step) -> bytes:
                said = talk.of([step])
                if step.result is None:
                    return line({**makes(said), "done": False}) if said else b""
                last = line({**makes(Said()), **ended(step.result)})
                return (line({**makes(said), "done": False}) if said else b"") + last

            # A line cannot be a comment: nothing is sent while the request waits.
            results = await stream(reply, flow, LINES, FOREVER, write, b"", b"", _failed)
            if results is not None:
                await reply.close()


def _failed(fault: Fault) -> bytes:
    return line(fault.ollama())


def _think(asked: Asked, chat: Mapping[str, str | None]) -> dict[str, Any]:
    """The pool's `think`; a level means yes to a model that knows only yes and no."""
    think, kind = asked.think, chat.get("thinking")
    if think is None or (think is False and kind is None):
        return {}
    if kind is None:
        raise bad(f"{asked.model!r} does not support thinking", "think")
    if isinstance(think, str) and kind != HARMONY:
        return {"think": True}
    return {"think": think}
