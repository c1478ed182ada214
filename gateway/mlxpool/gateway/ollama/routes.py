"""The endpoints of Ollama's interface that use a model."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.client import Result, Vectors
from mlxpool.common.checks import shown
from mlxpool.common.errors import ModelUnavailable, PoolError, UnknownModel
from mlxpool.common.version import VERSION
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.field_checks import log_left_out
from mlxpool.gateway.formats import HARMONY, NO_CHAT, ChatFormats
from mlxpool.gateway.formats.generic_tools import offered_tools
from mlxpool.gateway.generation.chat_request import calls_format
from mlxpool.gateway.generation.choice_streams import (
    Answers,
    ChoiceRequest,
    ChoiceUpdate,
    StreamFormat,
    write_stream,
)
from mlxpool.gateway.generation.images import content_with_images
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.http import NDJSON, ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.ollama import requests
from mlxpool.gateway.ollama.fields import OPTIONS, OPTIONS_IGNORED
from mlxpool.gateway.ollama.models import pull_statuses, running, show, tag
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
)

MAX_CONTEXT_TIME = 10.0  # seconds for the ids of a prompt that was answered
LOAD, UNLOAD = "load", "unload"
# Reasons why an option has no effect.
BY_SETTINGS = "the pool's settings decide how models are loaded and computed"
NO_GENERATION = "vectors are made without it: a longer text than the model reads is cut or refused"
UNKNOWN = "unknown option; Ollama also ignores it"
NO_EFFECT = "an option of Ollama has no effect"

# Arguments: a part of the answer, and the creation time that it shows.
MakeBody = Callable[[OutputPart, float], dict[str, Any]]
Finish = Callable[[Result], Awaitable[Mapping[str, Any]]]  # returns more members of the last body
HOW_TO_GET = (
    "nothing is downloaded: put a folder with the model's config.json, *.safetensors and"
    " tokenizer.json on the pool's machine, name it with `mlxpool serve --model {name}=FOLDER`, or"
    " in [models.{name}] of its config and run `mlxpool reload`; docs/models.md has more"
)

PLAIN_NAME = re.compile(r"[\w.-]{1,60}")  # needs no quotes in a shell or in TOML


class Conversation(Struct, frozen=True):
    """The prompt of a request: arguments of the client's `stream`, and the formats of the output.

    `prompt_ids`: the ids of a prompt that was tokenised before. `thinks`: the prompt ends inside
    the model's thoughts.
    """

    prompt: Mapping[str, Any]
    chat: ChatFormats = NO_CHAT
    prompt_ids: Sequence[int] = ()
    thinks: bool = False


class OllamaRoutes:
    """The handlers of Ollama's endpoints for generation and vectors.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def generate(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/generate with the completion of a prompt."""
        request = requests.generate(body)
        model = await self._get(request, response)
        make_body = partial(generate_body, request.model)
        if not request.prompt and not request.images:
            return await self._load(model, request, make_body, response)
        async with self._pool.kept(model.name, request.keep_alive):
            conversation = await self._conversation(model, request)
            finish = partial(self._with_context, model, request, conversation)
            await self._generate(model, request, conversation, make_body, response, finish)

    async def chat(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/chat with the next message of a chat."""
        request = requests.chat(body)
        model = await self._get(request, response)
        make_body = partial(chat_body, request.model)
        if not request.messages:
            return await self._load(model, request, make_body, response)
        own, tools_given = model.chat or NO_CHAT, request.tools
        offered = offered_tools(own, request.messages, tools_given, forced=False)
        template = offered.formats
        if request.tools and not template.tools:
            raise bad_request(f"{request.model!r} does not support tools", "tools")
        tools = {"tools": offered.tools} if offered.tools else {}
        if request.tools and "format" in request.options:
            functions = [{"function": tool.get("function", tool)} for tool in request.tools]
            format = calls_format(template, functions, (), request.options)
            request = replace(request, options={**request.options, **format})
        prompt = {"messages": offered.messages, **tools, **_think(request, template)}
        async with self._pool.kept(model.name, request.keep_alive):
            conversation = Conversation(prompt, template)
            await self._generate(model, request, conversation, make_body, response, _no_members)

    async def embed(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/embed with vectors of the length 1."""
        request, started = requests.embed(body), time.monotonic_ns()
        vectors = await self._vectors(request, response, normalise=True)
        taken = time.monotonic_ns() - started
        await response.json(embed_body(request.model, vectors, taken))

    async def embeddings(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/embeddings with one vector, which is not scaled to the length 1."""
        request = requests.embeddings(body)
        vectors = await self._vectors(request, response, normalise=False)
        await response.json({"embedding": [] if vectors is None else vectors[0]})

    async def _get(
        self, request: OllamaRequest | OllamaEmbedRequest, response: ResponseWriter
    ) -> ModelInfo:
        """Returns the model that a request names.

        Logs the options and fields of the request that have no effect. Each of them is logged only
        once by this process.
        """
        model = await self._pool.model(request.model, response)
        response.exchange.model = model.name
        for field in request.unknown:
            log_left_out(NO_EFFECT, f"{shown(field)} beside options", UNKNOWN)
        for option in request.ignored:
            if option in OPTIONS:
                log_left_out(NO_EFFECT, f"{option} of vectors", NO_GENERATION)
            elif option in OPTIONS_IGNORED:
                log_left_out(NO_EFFECT, option, BY_SETTINGS)
            else:
                log_left_out(NO_EFFECT, shown(option), UNKNOWN)
        return model

    # ---- vectors, load and unload ----------------------------------------------------------

    async def _vectors(
        self, request: OllamaEmbedRequest, response: ResponseWriter, *, normalise: bool
    ) -> Vectors | None:
        """Returns the vectors of the inputs.

        Without inputs it loads or unloads the model, and returns None.
        """
        model = await self._get(request, response)
        if not request.inputs:
            await self._load_or_unload(model, request.keep_alive)
            return None
        async with self._pool.kept(model.name, request.keep_alive):
            vectors = await self._pool.client.embed(
                model.name,
                request.inputs,
                truncate=request.truncate,
                dimensions=request.dimensions,
                normalise=normalise,
                deadline_ms=self._pool.deadline_ms,
            )
        response.exchange.count(vectors.usage)
        return vectors

    async def _load(
        self,
        model: ModelInfo,
        request: OllamaRequest,
        make_body: MakeBody,
        response: ResponseWriter,
    ) -> None:
        reason = await self._load_or_unload(model, request.keep_alive)
        value = {**make_body(OutputPart(), time.time()), **load_end(reason)}
        if not request.stream:
            return await response.json(value)
        await response.open(NDJSON)
        await response.write(line(value))
        await response.close()

    async def _load_or_unload(self, model: ModelInfo, keep_alive: float | None) -> str:
        """Loads the model, or unloads it if `keep_alive` is 0; returns the done_reason."""
        if keep_alive != 0:
            async with self._pool.kept(model.name, keep_alive):
                # Only a worker answers this call, so the model is loaded after the answer.
                await self._pool.client.tokenize(model.name, "")
            return LOAD
        if await self._pool.client.keep(model.name, 0):
            raise bad_request(
                f"model {model.name!r} stays loaded: its settings keep it for ever (keep_alive or"
                f" pin of [models.{model.name}]); an operator unloads it with `mlxpool unload`",
                "keep_alive",
            )
        return UNLOAD

    # ---- generation ------------------------------------------------------------------------

    async def _conversation(self, model: ModelInfo, request: OllamaRequest) -> Conversation:
        """Returns the prompt of /api/generate: a chat of one message, or raw text."""
        if not request.raw and not model.readable:
            raise ModelUnavailable(
                f"the files of model {model.name!r:.80} could not be read, so it is not known"
                " whether its prompts need a chat template; `mlxpool check` says what is wrong, and"
                " `raw` sends the prompt as it is"
            )
        if request.raw or model.chat is None or request.options.get("suffix"):
            if request.system and not request.raw:
                message = f"{request.model!r} has no chat template, so it takes no system message"
                raise bad_request(message, "system")
            text = _text_prompt(request)
            if not request.context:
                return Conversation({"prompt": text})
            ids = [*request.context, *await self._pool.client.tokenize(model.name, text)]
            return Conversation({"tokens": ids}, prompt_ids=ids)
        messages, think = _messages(request), _think(request, model.chat)
        if not request.context:
            return Conversation({"messages": messages, **think}, model.chat)
        turn = await self._pool.client.tokenize_chat(model.name, messages, **think)
        ids = [*request.context, *turn.ids]
        return Conversation({"tokens": ids}, model.chat, ids, turn.thinks)

    async def _with_context(
        self, model: ModelInfo, request: OllamaRequest, conversation: Conversation, result: Result
    ) -> dict[str, Any]:
        """Returns the `context` of an answer: ids of prompt and completion.

        Returns an empty map if the request is raw or has images, and if the pool does not give the
        ids.
        """
        if request.raw or request.images:
            return {}
        ids = conversation.prompt_ids
        if not ids:
            client, prompt = self._pool.client, conversation.prompt
            try:
                async with asyncio.timeout(MAX_CONTEXT_TIME):
                    if "messages" in prompt:
                        ids = (await client.tokenize_chat(model.name, **prompt)).ids
                    else:
                        ids = await client.tokenize(model.name, prompt["prompt"])
            except (PoolError, TimeoutError):  # the answer itself is complete
                return {}
        return {"context": [*ids, *result.ids]}

    async def _generate(
        self,
        model: ModelInfo,
        request: OllamaRequest,
        conversation: Conversation,
        make_body: MakeBody,
        response: ResponseWriter,
        finish: Finish,
    ) -> None:
        arguments = {**conversation.prompt, **self._fitting_options(model, request)}
        if request.images:
            arguments["images"] = request.images
        choice = ChoiceRequest(
            model.name, arguments, conversation.chat, request.tools, thinks=conversation.thinks
        )
        async with self._pool.generate([choice], response) as generation:
            if request.stream:
                return await _stream(generation, make_body, response, finish)
            collected = [update async for update in generation.updates() if update is not None]
            answer_time = generation.told_time()
        result = collected[-1].result
        assert result is not None
        body = make_body(OutputBuilder().part(collected), answer_time)
        await response.json({**body, **generation_end(result), **await finish(result)})

    def _fitting_options(self, model: ModelInfo, request: OllamaRequest) -> Mapping[str, Any]:
        """Returns the options, with a num_ctx of at most the model's context."""
        num_ctx = request.options.get("num_ctx", 0)
        if not 0 < model.context < num_ctx:
            return request.options
        log_left_out(
            NO_EFFECT,
            "num_ctx",
            f"{num_ctx} is more than the {model.context} tokens of {model.name}",
        )
        return {**request.options, "num_ctx": model.context}


async def _no_members(result: Result) -> dict[str, Any]:
    return {}


def _messages(request: OllamaRequest) -> list[dict[str, Any]]:
    """Returns the chat of a prompt: the system message, if any, and the user's message."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    content = content_with_images(request.prompt, len(request.images), 0)
    user = {"role": "user", "content": content if request.images else request.prompt}
    return [*system, user]


def _text_prompt(request: OllamaRequest) -> str:
    """Returns the prompt as text, after a tag [img-N] for each image; a raw prompt gets no tags."""
    if request.raw:
        return request.prompt
    tags = "".join(f"[img-{number}]" for number in range(len(request.images)))
    return tags + request.prompt


async def _stream(
    generation: Answers, make_body: MakeBody, response: ResponseWriter, finish: Finish
) -> None:
    builder = OutputBuilder()

    def encode(update: ChoiceUpdate) -> bytes:
        part = builder.part([update])
        return line({**make_body(part, generation.told_time()), "done": False}) if part else b""

    # NDJSON has no comments, so no keep-alive is possible.
    encoding = StreamFormat(NDJSON, encode, error_line)
    results = await write_stream(response, generation, encoding)
    if results is not None:
        end = {**generation_end(results[0]), **await finish(results[0])}
        await response.write(line({**make_body(OutputPart(), generation.told_time()), **end}))
        await response.close()


def _think(request: OllamaRequest, chat: ChatFormats) -> dict[str, Any]:
    """Returns the pool's `think`; a level becomes true if the model has no levels.

    Raises HttpError if the model does not support thinking.
    """
    think, thinking_format = request.think, chat.thinking
    if think is None or (think is False and thinking_format is None):
        return {}
    if thinking_format is None:
        raise bad_request(f"{request.model!r} does not support thinking", "think")
    if isinstance(think, str) and thinking_format != HARMONY:
        return {"think": True}
    return {"think": think}


class ModelRoutes:
    """The handlers of Ollama's endpoints about models, and of its version.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool
        self._started_at = int(time.time())  # shown as the time of a model without files

    async def version(self, response: ResponseWriter) -> None:
        """Answers GET /api/version with the version of this package."""
        await response.json({"version": VERSION})

    async def tags(self, response: ResponseWriter) -> None:
        """Answers GET /api/tags with a list of the models."""
        models = await self._pool.models.all()
        await response.json({"models": [tag(model, self._started_at) for model in models]})

    async def ps(self, response: ResponseWriter) -> None:
        """Answers GET /api/ps with a list of the models that have a worker."""
        models, now = await self._pool.models.all(), time.time()
        loaded = [running(model, now) for model in models if model.expires_in is not None]
        await response.json({"models": loaded})

    async def show(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/show with the properties of a model."""
        name, verbose = requests.show(body)
        model = await self._pool.models.described(name)
        response.exchange.model = model.name
        await response.json(show(model, self._started_at, verbose=verbose))

    async def pull(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /api/pull with success for a model of the pool.

        Raises HttpError for another model.
        """
        name, stream = requests.pull(body)
        try:
            model = await self._pool.models.described(name)
        except UnknownModel as error:
            plain = name if PLAIN_NAME.fullmatch(name) else "NAME"
            message = f"{error.message}; {HOW_TO_GET.format(name=plain)}"
            raise HttpError(404, message, "model_not_found", "model", retry=False) from None
        response.exchange.model = model.name
        statuses = pull_statuses(model)
        if not stream:
            return await response.json(statuses[-1])
        await response.open(NDJSON)
        await response.write(b"".join(map(line, statuses)))
        await response.close()
