"""The endpoints of Ollama's interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from mlxpool.client import Vectors
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.formats import HARMONY, NO_CHAT, ChatFormats
from mlxpool.gateway.generation import (
    ChoiceRequest,
    ChoiceUpdate,
    Generation,
    PoolAccess,
    StreamFormat,
    write_stream,
)
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.images import content_with_images
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.ollama import requests
from mlxpool.gateway.ollama.requests import OllamaEmbedRequest, OllamaRequest
from mlxpool.gateway.ollama.responses import (
    OutputBuilder,
    OutputPart,
    chat_body,
    embed_body,
    error_line,
    generate_body,
    generation_end,
    line,
    load_end,
    running,
    show,
    tag,
)

NDJSON = "application/x-ndjson"
STATES_WITH_WORKERS = ("ready", "draining")

MakeBody = Callable[[OutputPart], dict[str, Any]]


class OllamaRoutes:
    """One method a path. All raise HttpError and PoolError before the response has started."""

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def version(self, response: ResponseWriter) -> None:
        """GET /api/version: the version of this package."""
        await response.json({"version": version("mlxpool")})

    async def tags(self, response: ResponseWriter) -> None:
        """GET /api/tags."""
        await response.json({"models": [tag(model) for model in await self._pool.models.all()]})

    async def ps(self, response: ResponseWriter) -> None:
        """GET /api/ps."""
        models = await self._pool.models.all()
        loaded = [running(model) for model in models if model.state in STATES_WITH_WORKERS]
        await response.json({"models": loaded})

    async def show(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/show."""
        await response.json(show(await self._pool.models.get(requests.show(body))))

    async def generate(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/generate."""
        request = requests.generate(body)
        model = await self._pool.models.get(request.model)
        make_body = partial(generate_body, request.model)
        if not request.prompt and not request.images:
            return await self._load(model, request, make_body, response)
        if request.raw or model.chat is None:
            if request.system and not request.raw:
                message = f"{request.model!r} has no chat template, so it takes no system message"
                raise bad_request(message, "system")
            prompt = {"prompt": _text_prompt(request)}
            return await self._generate(model, request, prompt, make_body, response)
        system = [{"role": "system", "content": request.system}] if request.system else []
        content = content_with_images(request.prompt, len(request.images), 0)
        user = {"role": "user", "content": content if request.images else request.prompt}
        messages = [*system, user]
        await self._generate(model, request, {"messages": messages}, make_body, response)

    async def chat(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/chat."""
        request = requests.chat(body)
        model = await self._pool.models.get(request.model)
        make_body = partial(chat_body, request.model)
        if not request.messages:
            return await self._load(model, request, make_body, response)
        if request.tools and not (model.chat or NO_CHAT).tools:
            raise bad_request(f"{request.model!r} does not support tools", "tools")
        tools = {"tools": request.tools} if request.tools else {}
        prompt = {"messages": request.messages, **tools}
        await self._generate(model, request, prompt, make_body, response)

    async def embed(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/embed: vectors of the length 1."""
        request, started = requests.embed(body), time.monotonic_ns()
        found = await self._vectors(request, normalise=True)
        taken = time.monotonic_ns() - started
        await response.json(embed_body(request.model, found, taken))

    async def embeddings(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """POST /api/embeddings: one vector as the model made it."""
        request = requests.embeddings(body)
        found = await self._vectors(request, normalise=False)
        await response.json({"embedding": [] if found is None else found[0]})

    async def _vectors(self, request: OllamaEmbedRequest, *, normalise: bool) -> Vectors | None:
        """The vectors of the inputs; without inputs the model is loaded: None."""
        model = await self._pool.models.get(request.model)
        if not request.inputs:
            await self._pool.client.tokenize(model.name, "")
            return None
        return await self._pool.client.embed(
            model.name,
            request.inputs,
            truncate=request.truncate,
            dimensions=request.dimensions,
            normalise=normalise,
            deadline_ms=self._pool.deadline_ms,
        )

    async def _load(
        self,
        model: ModelInfo,
        request: OllamaRequest,
        make_body: MakeBody,
        response: ResponseWriter,
    ) -> None:
        """Load the model: a request to tokenize an empty text starts a worker for it."""
        await self._pool.client.tokenize(model.name, "")
        value = {**make_body(OutputPart()), **load_end()}
        if not request.stream:
            return await response.json(value)
        await response.open(NDJSON)
        await response.write(line(value))
        await response.close()

    async def _generate(
        self,
        model: ModelInfo,
        request: OllamaRequest,
        prompt: Mapping[str, Any],
        make_body: MakeBody,
        response: ResponseWriter,
    ) -> None:
        template = model.chat or NO_CHAT
        chat = template if "messages" in prompt else NO_CHAT
        arguments = {**prompt, **request.options, **_think(request, template)}
        if request.images:
            arguments["images"] = request.images
        choice = ChoiceRequest(model.name, arguments, chat, request.tools)
        async with self._pool.generate([choice]) as generation:
            if request.stream:
                return await _stream(generation, make_body, response)
            collected = [update async for update in generation.updates() if update is not None]
            result = collected[-1].result
            assert result is not None
            part = OutputBuilder().part(collected)
            await response.json({**make_body(part), **generation_end(result)})


def _text_prompt(request: OllamaRequest) -> str:
    """The prompt as a text; its images stand in front unless it is raw, as in Ollama."""
    if request.raw:
        return request.prompt
    tags = "".join(f"[img-{number}]" for number in range(len(request.images)))
    return tags + request.prompt


async def _stream(generation: Generation, make_body: MakeBody, response: ResponseWriter) -> None:
    builder = OutputBuilder()

    def encode(update: ChoiceUpdate) -> bytes:
        part = builder.part([update])
        data = line({**make_body(part), "done": False}) if part else b""
        if update.result is None:
            return data
        return data + line({**make_body(OutputPart()), **generation_end(update.result)})

    # NDJSON has no comments, so there is no keep-alive.
    encoding = StreamFormat(NDJSON, encode, error_line)
    if await write_stream(response, generation, encoding) is not None:
        await response.close()


def _think(request: OllamaRequest, chat: ChatFormats) -> dict[str, Any]:
    """The pool's `think`; a level is true for a model that only knows true and false."""
    think, thinking_format = request.think, chat.thinking
    if think is None or (think is False and thinking_format is None):
        return {}
    if thinking_format is None:
        raise bad_request(f"{request.model!r} does not support thinking", "think")
    if isinstance(think, str) and thinking_format != HARMONY:
        return {"think": True}
    return {"think": think}
