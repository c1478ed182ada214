"""Answers that the pool keeps as jobs. Every reader of an answer gets the same pieces."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlxpool.client import AsyncClient, AsyncStream, Delta
from mlxpool.client.jobs import READING_CODES, JobRef, SubmittedJob
from mlxpool.common.errors import DuplicateId, PoolError, UnknownJob
from mlxpool.gateway import errors
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats import ChatFormats, make_parser
from mlxpool.gateway.formats.events import Event, Parser, Reasoning
from mlxpool.gateway.generation.choice_streams import (
    NO_TIMEOUT,
    ChoiceRequest,
    ChoiceUpdate,
    call_ids,
    stream_arguments,
)
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.resumption import EventNumbers, Resumption

KEY_BYTES = 16
CANCELLED = "cancelled"
SEED_BYTES = 6  # bytes of a seed made from the key: few, so that every JSON reader keeps all digits
REPORTS = ("echo", "prompt_logprobs")  # options of streams that jobs do not have
# Steps after which other requests are served, and a closed connection of this request is noticed.
# A page of the store has thousands of steps.
STEPS_AT_ONCE = 32
FAILED = ("dead", "expired")  # states of jobs that ended with an error


def drawn_key() -> str:
    """Returns a random key, for a job whose client gives none."""
    return secrets.token_hex(KEY_BYTES)


async def has_failed(client: AsyncClient, job: JobRef, code: str, gen: int, pos: int) -> bool:
    """Whether the job itself has failed, after its reader got an error.

    `code`: the code of the error. `gen`: the generation of the job that was read. `pos`: the number
    of ids of this generation that the reader has. Returns False if the pool does not answer, or if
    the job has continued since then: a new reader can then continue at `pos`.
    """
    if code in READING_CODES:
        return False
    try:
        row = await client.job(job)
    except PoolError:
        return False
    return row["state"] in FAILED and (row["gen"], row["ids"]) == (gen, pos)


class KeptAnswer:
    """Reads the output of a job, and makes an update of each decode step.

    The pool stores the steps with the output, so all readers get the same updates. Leaving the
    context ends the reading; the job continues.
    """

    def __init__(
        self,
        stream: AsyncStream,
        chat: ChatFormats,
        tools: Sequence[Mapping[str, Any]],
        *,
        several_calls: bool,
        stops: bool = False,
        thinks: bool = False,
    ) -> None:
        """`stream`: a stream that reads a job from its first token on, with `steps`.

        The other arguments are those of the job's request.
        """
        self._stream = stream
        self._chat, self._tools, self._several_calls = chat, tools, several_calls
        self._stops, self._thinks = stops, thinks
        self._parser: Parser | None = None  # made with the first delta, which has the facts
        self._in_thoughts = True
        self.thought_tokens = 0  # tokens before the first text that is not a thought
        self.pos = 0  # number of ids that were read
        self._failures = 0  # known failures of the answer after `pos` ids

    @property
    def facts(self) -> Mapping[str, Any]:
        """The worker's data on model and prompt (`facts`); empty before the first update."""
        return self._stream.facts

    async def updates(self, timeout: float = NO_TIMEOUT) -> AsyncIterator[ChoiceUpdate | None]:
        """Yields the updates, the last update with the result.

        Yields None after each `timeout` seconds without an update. Raises HttpError for an error of
        the job or of the reading.
        """
        while True:
            try:
                async with asyncio.timeout(timeout):
                    deltas = await self._stream.ready()
            except TimeoutError:
                yield None
                continue
            except PoolError as error:
                raise errors.from_pool_error(error, started=True) from error
            if not deltas:
                events = self._get_parser().finish()
                yield ChoiceUpdate(0, tuple(events), (), self._stream.result)
                return
            number = 0
            for delta in deltas:
                failures = self._new_failures(delta)
                if failures:
                    yield ChoiceUpdate(0, (), failures=failures)
                for text, ids, logprobs in steps_of(delta):
                    yield ChoiceUpdate(0, tuple(self._push(text, ids)), logprobs)
                    number += 1
                    if number % STEPS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._failures = 0 if delta.ids else self._failures
                self.pos = delta.pos + len(delta.ids)

    def _new_failures(self, delta: Delta) -> int:
        """Returns the number of the job's failures between the previous delta and this delta."""
        known, self._failures = self._failures, max(self._failures, failures_before(delta))
        return self._failures - known

    def _push(self, text: str, ids: int) -> Sequence[Event]:
        events = self._get_parser().push(text) if text else ()
        self._in_thoughts = self._in_thoughts and all(isinstance(e, Reasoning) for e in events)
        if self._in_thoughts:
            self.thought_tokens += ids
        return events

    def _get_parser(self) -> Parser:
        if self._parser is None:
            thinks = self._thinks or self._stream.facts.get("thinks") is True
            self._parser = make_parser(
                self._chat,
                self._tools,
                thinks=thinks,
                several_calls=self._several_calls,
                stops=self._stops,
            )
        return self._parser

    async def __aenter__(self) -> KeptAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.close()


def failures_before(delta: Delta) -> int:
    """Returns how often the job ended with an error before a delta and was tried again."""
    return sum(ids == 0 for ids, _ in delta.steps)


def steps_of(delta: Delta) -> list[tuple[str, int, tuple[Mapping[str, Any], ...]]]:
    """Returns the steps of a delta: text, number of ids, log-probabilities of each id."""
    steps_found = []
    ids = end = 0
    steps = delta.steps[failures_before(delta) :]
    if not steps and (delta.ids or delta.text):
        steps = ((len(delta.ids), len(delta.text)),)
    for next_ids, next_end in steps:
        steps_found.append((delta.text[end:next_end], next_ids - ids, delta.logprobs[ids:next_ids]))
        ids, end = next_ids, next_end
    return steps_found


def may_resume(requests: Sequence[ChoiceRequest]) -> bool:
    """Whether the pool can keep these requests as jobs."""
    return not any(request.arguments.get(name) for request in requests for name in REPORTS)


class ResumableGeneration:
    """All choices of a request as jobs, which are read one after the other.

    Leaving the context ends the reading; the jobs continue. Implements Answers, as Generation does.
    """

    def __init__(
        self,
        client: AsyncClient,
        requests: Sequence[ChoiceRequest],
        response: ResponseWriter,
        resumption: Resumption,
    ) -> None:
        self._client = client
        self._response = response
        self._resumption = resumption
        self._requests = [
            _choice(request, index) for request in requests for index in range(request.n)
        ]
        self._jobs: list[Mapping[str, Any]] = []  # the jobs' maps, one for each choice
        self._made = False  # whether this request submitted the jobs
        self._answer: KeptAnswer | None = None  # the answer that is read now, or was read last

    async def begin(self, deadline: float | None, keep: float) -> None:
        """Finds or submits the jobs; `deadline` is in seconds from now.

        `keep`: the seconds for which the jobs are kept after their end. Raises PoolError. Raises
        HttpError if a different request has used the same key, or if the answer to which the
        client's last event belongs no longer exists.
        """
        for number, request in enumerate(self._requests):
            submitted = await self._found(number, request, deadline, keep)
            if submitted.note != self._resumption.digest:
                message = (
                    "another request came with this Idempotency-Key: make a new key for each"
                    " request, and send the same body with the same key"
                )
                raise HttpError(422, message, "idempotency_key_reused", retry=False)
            self._jobs.append(submitted.row)
        exchange = self._response.exchange
        exchange.model, exchange.pool_id = self._requests[0].model, self.id
        gen = max(int(row["gen"]) for row in self._jobs)
        self._response.numbers = EventNumbers(gen, self._resumption.after)

    async def _found(
        self, number: int, request: ChoiceRequest, deadline: float | None, keep: float
    ) -> SubmittedJob:
        key = self._key(number)
        try:
            return await self._client.submitted(key)
        except UnknownJob:
            if self._resumption.after is not None:
                message = (
                    "no answer is kept under this Idempotency-Key, or not any more: send the"
                    " request without Last-Event-ID to begin anew"
                )
                raise HttpError(404, message, "stream_not_found", retry=False) from None
        arguments = stream_arguments(request, deadline)
        if len(self._requests) > 1 and arguments.get("seed") is None:
            arguments["seed"] = _seed(self._key(number))
        try:
            await self._client.submit(
                request.model, key=key, note=self._resumption.digest, keep=keep, **arguments
            )
            self._made = True
        except DuplicateId:  # another request was faster
            pass
        return await self._client.submitted(key)

    def _key(self, number: int) -> str:
        return f"{self._resumption.key}_{number}" if number else self._resumption.key

    @property
    def choices(self) -> int:
        return len(self._requests)

    @property
    def id(self) -> str:
        return bytes(self._jobs[0]["job"]).hex()

    @property
    def facts(self) -> Mapping[str, Any]:
        return {} if self._answer is None else self._answer.facts

    def told_time(self) -> float:
        """Returns the time when the job was submitted, in seconds since 1970.

        This time is equal for all readers.
        """
        return float(self._jobs[0]["submitted"])

    def call_ids(self, choice: int) -> Callable[[int], str]:
        return call_ids(self._key(choice))

    async def updates(self, timeout: float = NO_TIMEOUT) -> AsyncIterator[ChoiceUpdate | None]:
        exchange = self._response.exchange
        for number, request in enumerate(self._requests):
            async with self._read(number, request) as answer:
                self._answer = answer
                try:
                    async for update in answer.updates(timeout):
                        if update is None:
                            yield None
                            continue
                        if exchange.first_token is None:
                            exchange.first_token = time.monotonic()
                        if update.result is not None and self._made:
                            exchange.count(update.result.usage)
                        yield replace(update, choice=number)
                        if update.result is not None and update.result.reason == "cancelled":
                            message = "the request was cancelled by an operator"
                            raise HttpError(503, message, CANCELLED, retry=False)
                except HttpError as error:
                    await self._look_at(error, number, answer.pos)
                    raise

    def _read(self, number: int, request: ChoiceRequest) -> KeptAnswer:
        gen = int(self._jobs[number]["gen"])
        return KeptAnswer(
            self._client.fetch(self._key(number), 0, gen, steps=True),
            request.chat,
            request.tools,
            several_calls=request.several_calls,
            stops=request.stops,
            thinks=request.thinks,
        )

    async def _look_at(self, error: HttpError, number: int, pos: int) -> None:
        """Decides whether an error belongs to the job, or ends only this response (`passing`).

        An error of the job is the same for every reader, so it gets the id of the job.
        """
        gen, key = int(self._jobs[number]["gen"]), self._key(number)
        if error.code == CANCELLED or await has_failed(self._client, key, error.code, gen, pos):
            error.request_id = self.id
        else:
            error.passing = True


def _choice(request: ChoiceRequest, index: int) -> ChoiceRequest:
    """Returns the choice `index` of a request as a request for one choice.

    If the request has a seed, the choice has the seed plus `index`.
    """
    seed = request.arguments.get("seed")
    if seed is None or not index:
        return replace(request, n=1)
    return replace(request, n=1, arguments={**request.arguments, "seed": seed + index})


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:SEED_BYTES], "big")
