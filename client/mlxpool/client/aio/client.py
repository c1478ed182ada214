"""The client for asyncio: the same connection, with deltas in an asyncio queue."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from msgspec.structs import replace

import mlxpool.client.vectors as vectors
from mlxpool.client.aio.calls import AsyncCaller
from mlxpool.client.aio.jobs import AsyncJobMethods
from mlxpool.client.aio.stream import AsyncChoicesStream, AsyncStream
from mlxpool.client.choices import Choices, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.owner_connection import AnyConnection, OwnerConnection
from mlxpool.client.request import (
    ChatTokens,
    Image,
    Question,
    describe,
    detokenize,
    generate,
    keep,
    list_models,
    token_texts,
    tokenize,
    tokenize_chat,
)
from mlxpool.client.retry import BROKER_GRACE, CONNECT_GRACE, Pace
from mlxpool.client.stream import Result
from mlxpool.client.vectors import MAX_IN_FLIGHT, Inputs, Ranking, Vectors, joined, listed, ranked
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.owners import owner_name
from mlxpool.common.transport.keys import Credentials

Answer = TypeVar("Answer")


class AsyncClient(AsyncJobMethods):
    """A client for asyncio, with the constructor, methods and errors of `Client`.

    Its methods are coroutines, except `stream`, `streams`, `fetch`, `for_owner` and the
    asynchronous iterator `follow_jobs`. A call has no time limit: use `asyncio.timeout`. If a task
    is cancelled, its request or call is cancelled as well.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        *,
        server_key: str | None = None,
        key: str | Path | None = None,
        connect_timeout: float = CONNECT_GRACE,
        broker_grace: float = BROKER_GRACE,
        pace: Pace | None = None,
    ) -> None:
        pace = replace(pace or Pace(), broker_grace=broker_grace, connect_grace=connect_timeout)
        self._connection: AnyConnection = Connection(
            run_dir, endpoint, pace, Credentials.of(server_key, key)
        )
        self._caller = AsyncCaller(self._connection)

    def for_owner(self, owner: str) -> Self:
        """Returns a client on behalf of an owner; see `Client.for_owner`."""
        named = copy.copy(self)
        named._connection = OwnerConnection(self._connection, owner_name(owner))
        named._caller = AsyncCaller(named._connection)
        return named

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Starts a completion; see `Client.stream`."""
        draft = generate(model, prompt, messages, tokens, options, images)
        return AsyncStream(self._connection, draft)

    def streams(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[AsyncStream]:
        """Starts `n` choices, each with its own stream.

        The arguments are those of `stream_choices`.
        """
        drafts = drafts_of(generate(model, prompt, messages, tokens, options, images), n)
        started: list[AsyncStream] = []
        try:
            for draft in drafts:
                started.append(AsyncStream(self._connection, draft))
        except BaseException:
            for stream in started:
                stream.close()
            raise
        return started

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Returns a whole completion; see `Client.generate`."""
        draft = generate(model, prompt, messages, tokens, options, images)
        async with AsyncStream(self._connection, draft) as stream:
            return await stream.read()

    def stream_choices(
        self,
        model: str,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncChoicesStream:
        """Starts `n` completions of one prompt; see `Client.stream_choices`."""
        draft = generate(model, prompt, messages, tokens, options, images)
        return AsyncChoicesStream(self._connection, drafts_of(draft, n))

    async def choices(
        self,
        model: str,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> Choices:
        """Returns `n` whole completions of one prompt; see `Client.choices`."""
        draft = generate(model, prompt, messages, tokens, options, images)
        async with AsyncChoicesStream(self._connection, drafts_of(draft, n)) as choices:
            return await choices.read()

    async def models(self) -> list[dict[str, Any]]:
        """Returns a map for each model of the pool; see `Client.models`."""
        return await self._caller.call(list_models())

    async def describe(self, model: str) -> dict[str, Any]:
        """Returns the map of one model; see `Client.describe`."""
        return await self._caller.call(describe(model))

    async def keep(self, model: str, seconds: float) -> float:
        """Loads a model, and keeps it loaded after its last work; see `Client.keep`."""
        return await self._caller.call(keep(model, seconds))

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the token ids that a text has as a prompt of the model; see `Client.tokenize`."""
        return await self._caller.call(tokenize(model, text))

    async def tokenize_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool | str | None = None,
    ) -> ChatTokens:
        """Returns the token ids of a chat; see `Client.tokenize_chat`."""
        return await self._caller.call(tokenize_chat(model, messages, tools, think))

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Returns the text of token ids; see `Client.detokenize`."""
        return await self._caller.call(detokenize(model, ids))

    async def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token id adds; see `Client.token_texts`."""
        return await self._caller.call(token_texts(model, ids))

    async def embed(
        self,
        model: str,
        inputs: Inputs,
        *,
        truncate: bool | None = None,
        dimensions: int | None = None,
        normalise: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        deadline_ms: int | None = None,
    ) -> Vectors:
        """Returns a vector for each input; see `Client.embed`."""
        return await self._vectors(
            vectors.embed(
                model,
                inputs,
                truncate=truncate,
                dimensions=dimensions,
                normalise=normalise,
                prompt_name=prompt_name,
                prompt=prompt,
                deadline_ms=deadline_ms,
            )
        )

    async def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        top: int | None = None,
        truncate: bool | None = None,
        prompt: str | None = None,
        deadline_ms: int | None = None,
    ) -> Ranking:
        """Returns the documents as (index, score), best first; see `Client.rerank`."""
        texts = listed("documents", documents)
        questions = vectors.rerank(
            model,
            query,
            texts,
            top=top,
            truncate=truncate,
            prompt=prompt,
            deadline_ms=deadline_ms,
        )
        return ranked(await self._vectors(questions), texts, top)

    async def classify(
        self,
        model: str,
        inputs: Inputs,
        *,
        truncate: bool | None = None,
        deadline_ms: int | None = None,
    ) -> Vectors:
        """Returns the probability of each label for each input; see `Client.classify`."""
        return await self._vectors(
            vectors.embed(
                model, inputs, task="classify", truncate=truncate, deadline_ms=deadline_ms
            )
        )

    async def decide(
        self,
        model: str,
        prompt: str,
        choices: AnswerChoices = None,
        *,
        temperature: float | None = None,
        deadline_ms: int | None = None,
    ) -> Decision:
        """Returns the answer to a prompt that ends with a question; see `Client.decide`."""
        calls = decide(
            model, prompt, [("", choices)], temperature=temperature, deadline_ms=deadline_ms
        )
        return (await self._caller.answers(calls, 1))[0][0]

    async def decide_all(
        self,
        model: str,
        prompt: str,
        questions: Sequence[Asked],
        *,
        temperature: float | None = None,
        deadline_ms: int | None = None,
    ) -> DecisionList:
        """Returns the answers to questions about a text; see `Client.decide_all`."""
        calls = decide(model, prompt, questions, temperature=temperature, deadline_ms=deadline_ms)
        return joined_decisions(await self._caller.answers(calls, 1))

    async def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(await self._caller.answers(questions, MAX_IN_FLIGHT))

    async def close(self) -> None:
        """Closes the connection; open streams are cancelled and end with BrokerLost."""
        await asyncio.to_thread(self._connection.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
