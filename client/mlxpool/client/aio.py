"""The client for asyncio: the same connection; deltas come through an asyncio queue."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

import mlxpool.client.jobs as jobs
import mlxpool.client.vectors as vectors
from mlxpool.client.aio_choices import AsyncChoicesStream
from mlxpool.client.choices import Choices, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.images import Image
from mlxpool.client.jobs import Job, JobRef, SubmittedJob
from mlxpool.client.loop_calls import call_in_loop, put_in_loop
from mlxpool.client.request import (
    ChatTokens,
    Draft,
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
from mlxpool.client.stream import Delta, Result
from mlxpool.client.vectors import MAX_IN_FLIGHT, Inputs, Ranking, Vectors, joined, listed, ranked
from mlxpool.common.closing import AsyncClosing
from mlxpool.common.errors import PoolError
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.job_messages import READ, RELEASE, RETRY
from mlxpool.common.protocol.owners import owner_name
from mlxpool.common.transport.keys import Credentials

Answer = TypeVar("Answer")


class AsyncStream(AsyncClosing):
    """An asynchronous iterator over the deltas of one completion, as they arrive.

    Belongs to the event loop that started it. Leaving the loop, `close`, the end of an `async with`
    or the end of the object cancels what is not finished.
    """

    def __init__(self, connection: Connection, draft: Draft, owner: str = "") -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        # The connection keeps what it delivers to: that must not be this object, see `__del__`.
        put = partial(put_in_loop, asyncio.get_running_loop(), self._queue)
        self._open = connection.open(draft, put, owner)

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes."""
        return self._open.state.id

    @property
    def accepted(self) -> bool:
        """Whether a broker has accepted the request, or it was cancelled before."""
        return bool(self._open.state.boot or self._open.state.result)

    @property
    def gen(self) -> int | None:
        """The generation of the job that is read; None: no job, or not yet known."""
        return self._open.state.gen

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the stream's first worker reported (docs/protocol.md, `facts`).

        Empty before the first delta.
        """
        return self._open.state.facts.raw if self._open.state.facts else {}

    @property
    def result(self) -> Result:
        """The whole completion.

        Raises the stream's error, and RuntimeError before the end; `read` waits for it. In a fork
        of the process it raises BadRequest if the stream had not ended before.
        """
        return self._connection.result(self._open)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.close()

    async def _next(self) -> Delta | None:
        if self._open.finished:
            return None
        self._connection.check_process()
        return self._connection.took(self._open, await self._queue.get())

    async def ready(self) -> list[Delta]:
        """Wait for the next delta; returns it and all others that are there, none at the end.

        Raises the stream's error. No delta is lost if the wait is cancelled.
        """
        first = await self._next()
        deltas = [] if first is None else [first]
        while deltas and not self._queue.empty():
            delta = self._queue.get_nowait()
            if delta is None:
                self._queue.put_nowait(None)  # the next call reports the end
                break
            self._connection.took(self._open, delta)
            deltas.append(delta)
        return deltas

    async def read(self) -> Result:
        """Wait for the end; returns the whole completion. Raises the stream's error."""
        while await self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the stream if it is not finished."""
        self._connection.leave(self._open)

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # it was sent
            self._connection.abandon(self._open)


class AsyncClient:
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
        self._connection = Connection(run_dir, endpoint, pace, Credentials.of(server_key, key))
        self._owner = ""  # on whose behalf; "": this client's own

    def for_owner(self, owner: str) -> Self:
        """This client on behalf of an owner: quotas, turns and jobs are those of the owner.

        It shares the connection, so close this one alone. For gateways: the broker takes it of its
        own user and of keys with `may_name_owners`, and answers others with Unauthorized. Raises
        BadRequest unless `owner` is 1 to 200 printable characters.
        """
        named = copy.copy(self)
        named._owner = owner_name(owner)
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
            return AsyncStream(self._connection, draft, self._owner)
        return AsyncChoicesStream(self._connection, drafts_of(draft, n), self._owner)

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
                started.append(AsyncStream(self._connection, draft, self._owner))
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
            async with AsyncChoicesStream(
                self._connection, drafts_of(draft, n), self._owner
            ) as choices:
                return await choices.read()
        async with AsyncStream(self._connection, draft, self._owner) as stream:
            return await stream.read()

    async def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return await self._call(list_models())

    async def describe(self, model: str) -> dict[str, Any]:
        """All that is known of one model; see `Client.describe`."""
        return await self._call(describe(model))

    async def keep(self, model: str, seconds: float) -> float:
        """Keep a model loaded for so many seconds after its last work; see `Client.keep`."""
        return await self._call(keep(model, seconds))

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The token ids of a text, as the model would read it as a prompt.

        Loads the model if it is not loaded. Raises UnknownModel.
        """
        return await self._call(tokenize(model, text))

    async def tokenize_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool | str | None = None,
    ) -> ChatTokens:
        """The token ids of a chat; see `Client.tokenize_chat`."""
        return await self._call(tokenize_chat(model, messages, tools, think))

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of token ids. Raises what `tokenize` does."""
        return await self._call(detokenize(model, ids))

    async def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """What each of these token ids adds to a text; see `Client.token_texts`."""
        return await self._call(token_texts(model, ids))

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
        return (await self._answers(calls, 1))[0][0]

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
        return joined_decisions(await self._answers(calls, 1))

    async def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        key: str | None = None,
        keep: float | None = None,
        not_before: float | None = None,
        note: bytes = b"",
        **options: Unpack[GenerateOptions],
    ) -> Job:
        """Have a completion made, whoever is there to read it; see `Client.submit`."""
        return await self._call(
            jobs.submit(
                model,
                prompt,
                messages,
                tokens,
                options,
                images,
                key=key,
                keep=keep,
                not_before=not_before,
                note=note,
            )
        )

    def fetch(
        self, job: JobRef, start: int = 0, gen: int | None = None, *, steps: bool = False
    ) -> AsyncStream:
        """Read a job, its key or its id; see `Client.fetch`."""
        return AsyncStream(self._connection, jobs.fetch(job, start, gen, steps), self._owner)

    async def jobs(
        self, *, after: int | None = None, before: int = 0, state: str = "", limit: int = 0
    ) -> list[dict[str, Any]]:
        """The jobs of this user, each a map; see `Client.jobs`."""
        pages = jobs.Pages(after, state, limit, before)
        while not pages.complete:
            pages.add(await self._call(pages.question()))
        return pages.rows

    async def job(self, job: JobRef) -> dict[str, Any]:
        """The map of one job. Raises UnknownJob."""
        return await self._call(jobs.about(READ, job))

    async def submitted(self, job: JobRef) -> SubmittedJob:
        """A job with what was submitted and its note. Raises UnknownJob, and Gone."""
        return await self._call(jobs.submitted(job))

    async def retry(self, job: JobRef) -> dict[str, Any]:
        """Let a job that is dead or expired be tried again, from the ids that it has."""
        return await self._call(jobs.about(RETRY, job))

    async def release(self, job: JobRef) -> dict[str, Any]:
        """Delete the result of a job that has ended; its key answers Gone for some time."""
        return await self._call(jobs.about(RELEASE, job))

    async def cancel(
        self, request: bytes | Job | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Cancel any request of this owner by its id, 16 bytes, or a job, also by its `key`.

        Returns {state, pos} and raises as `Client.cancel` does.
        """
        return await self._call(jobs.cancel_request(request, key))

    async def _call(self, question: Question[Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        def resolve(reply: Answer | PoolError) -> None:
            if answer.done():
                return
            if isinstance(reply, PoolError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

        self._connection.ask(
            question, lambda reply: call_in_loop(loop, lambda: resolve(reply)), self._owner
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self._connection.forget(question)
            raise

    async def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(await self._answers(questions, MAX_IN_FLIGHT))

    async def _answers(self, questions: Sequence[Question[Answer]], at_once: int) -> list[Answer]:
        """The answers to questions, of which at most `at_once` are open at a time."""
        places = asyncio.Semaphore(at_once)

        async def ask(question: Question[Answer]) -> Answer:
            async with places:
                return await self._call(question)

        tasks = [asyncio.ensure_future(ask(question)) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

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
