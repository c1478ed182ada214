"""Answers that outlive their gateway: of requests with the header Idempotency-Key.

The pool keeps each choice of such a request as a job. What a reading writes is a function of the
request and of the stored steps, so that a client which comes again needs to name only the last
event that it has, and gets what follows from any gateway of the pool.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlxpool.client import AsyncClient
from mlxpool.client.jobs import SubmittedJob
from mlxpool.common.errors import DuplicateId, UnknownJob
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.event_numbers import EventNumbers
from mlxpool.gateway.generation.call_ids import call_ids
from mlxpool.gateway.generation.choice_streams import (
    NO_TIMEOUT,
    ChoiceRequest,
    ChoiceUpdate,
    stream_arguments,
)
from mlxpool.gateway.generation.kept_answers import KeptAnswer, has_failed
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.resumption import Resumption

CANCELLED = "cancelled"
SEED_BYTES = 6  # of a seed that is made of the key: every JSON reader keeps its digits
REPORTS = ("echo", "prompt_logprobs")  # options of streams that jobs do not have


def may_resume(requests: Sequence[ChoiceRequest]) -> bool:
    """Whether the pool can keep these as jobs."""
    return not any(one.arguments.get(name) for one in requests for name in REPORTS)


class ResumableGeneration:
    """All choices of a request as jobs, which are read one after the other.

    Leaving it ends the reading; the jobs go on. See Generation, in whose place it is.
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
        self._requests = [_choice(one, index) for one in requests for index in range(one.n)]
        self._jobs: list[Mapping[str, Any]] = []  # their rows
        self._made = False  # by this request
        self._answer: KeptAnswer | None = None  # the newest that is read

    async def begin(self, deadline: float | None, keep: float) -> None:
        """Find the jobs, or submit them, with a `deadline` in seconds from now.

        `keep`: seconds for which they are kept after their end. Raises PoolError, and HttpError
        for another request with the same key, and for a number of an event that is not known.
        """
        for number, request in enumerate(self._requests):
            found = await self._found(number, request, deadline, keep)
            if found.note != self._resumption.digest:
                message = (
                    "another request came with this Idempotency-Key: make a new key for each"
                    " request, and send the same body with the same key"
                )
                raise HttpError(422, message, "idempotency_key_reused", retry=False)
            self._jobs.append(found.row)
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
        """The time of the submission: every reading tells the same."""
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
        """Note whether an error is that of this reading alone, and the job goes on.

        One of the job is the same in every reading, so it has the id of the job.
        """
        gen, key = int(self._jobs[number]["gen"]), self._key(number)
        if error.code == CANCELLED or await has_failed(self._client, key, error.code, gen, pos):
            error.request_id = self.id
        else:
            error.passing = True


def _choice(request: ChoiceRequest, index: int) -> ChoiceRequest:
    """One choice of a request; choice i has seed + i."""
    seed = request.arguments.get("seed")
    if seed is None or not index:
        return replace(request, n=1)
    return replace(request, n=1, arguments={**request.arguments, "seed": seed + index})


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:SEED_BYTES], "big")
