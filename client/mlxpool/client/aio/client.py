"""The client for asyncio: the same connection; deltas come through an asyncio queue."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import mlxpool.client.vectors as vectors
from mlxpool.client.aio.calls import AsyncCaller
from mlxpool.client.aio.choices import AsyncChoicesStream
from mlxpool.client.aio.jobs import AsyncJobMethods
from mlxpool.client.aio.stream import AsyncStream
from mlxpool.client.choices import Choices, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.images import Image
from mlxpool.client.owner_connection import AnyConnection, OwnerConnection
from mlxpool.client.request import (
    ChatTokens,
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
    """A client for asyncio, with the arguments and errors of `Client`.

    `stream` is no coroutine, only reading the stream is. Calls wait without a bound: use
    `asyncio.timeout`.
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
        """This client on behalf of an owner: quotas, turns and jobs are those of the owner.

        It shares the connection, so close this one alone. For gateways: the broker takes it of its
        own user and of keys with `may_name_owners`, and answers others with Unauthorized. Raises
        BadRequest unless `owner` is 1 to 200 printable characters.
        """
        named = copy.copy(self)
        named._connection = OwnerConnection(self._connection, owner_name(owner))
        named._caller = AsyncCaller(named._connection)
        return named

    @overload
    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream: ...

    @overload
    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> AsyncChoicesStream: ...

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream | AsyncChoicesStream:
        """Start a completion; takes the arguments of `Client.stream`, and raises what it does."""
        draft = generate(model, prompt, messages, tokens, options, images)
        if n is None:
            return AsyncStream(self._connection, draft)
        return AsyncChoicesStream(self._connection, drafts_of(draft, n))

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
        """Start `n` choices, with a stream for each to be read by itself; else as `stream`."""
        drafts = drafts_of(generate(model, prompt, messages, tokens, options, images), n)
        started: list[AsyncStream] = []
        try:
            for draft in drafts:
                started.append(AsyncStream(self._connection, draft))
        except BaseException:
            for one in started:
                one.close()
            raise
        return started

    @overload
    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> Choices: ...

    async def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | Choices:
        """A whole completion, or `n`; takes the arguments of `stream`, and raises its error.

        Cancelling the task cancels the request.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        if n is not None:
            async with AsyncChoicesStream(self._connection, drafts_of(draft, n)) as choices:
                return await choices.read()
        async with AsyncStream(self._connection, draft) as stream:
            return await stream.read()

    async def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return await self._caller.call(list_models())

    async def describe(self, model: str) -> dict[str, Any]:
        """All that is known of one model; see `Client.describe`."""
        return await self._caller.call(describe(model))

    async def keep(self, model: str, seconds: float) -> float:
        """Keep a model loaded for so many seconds after its last work; see `Client.keep`."""
        return await self._caller.call(keep(model, seconds))

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The token ids of a text, as the model would read it as a prompt.

        Loads the model if it is not loaded. Raises UnknownModel.
        """
        return await self._caller.call(tokenize(model, text))

    async def tokenize_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool | str | None = None,
    ) -> ChatTokens:
        """The token ids of a chat; see `Client.tokenize_chat`."""
        return await self._caller.call(tokenize_chat(model, messages, tools, think))

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of token ids. Raises what `tokenize` does."""
        return await self._caller.call(detokenize(model, ids))

    async def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """What each of these token ids adds to a text; see `Client.token_texts`."""
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
        """A vector for each input; takes the arguments of `Client.embed`, and raises what it does.

        Cancelling the task cancels the calls.
        """
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
        """The documents as (index, score), best first; see `Client.rerank`."""
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
        """The probability of each label for each input; see `Client.classify`."""
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
        """How a model answers a prompt that ends with a question; see `Client.decide`."""
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
        """The answers to questions about a text; see `Client.decide_all`."""
        calls = decide(model, prompt, questions, temperature=temperature, deadline_ms=deadline_ms)
        return joined_decisions(await self._caller.answers(calls, 1))

    async def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(await self._caller.answers(questions, MAX_IN_FLIGHT))

    async def close(self) -> None:
        """Close the connection; open streams are cancelled and end with BrokerLost."""
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
