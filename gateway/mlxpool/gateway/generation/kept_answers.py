"""Answers that the pool keeps as jobs. Every reading, from the first token on, is alike."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from mlxpool.client import AsyncClient, AsyncStream, Delta
from mlxpool.client.jobs import READING_CODES, JobRef
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.formats import ChatFormats, make_parser
from mlxpool.gateway.formats.events import Event, Parser, Reasoning
from mlxpool.gateway.generation.choice_streams import NO_TIMEOUT, ChoiceUpdate

KEY_BYTES = 16
# A page of the store has thousands of steps. Between so many of them other requests are served,
# and the end of this one's connection is seen.
STEPS_AT_ONCE = 32
FAILED = ("dead", "expired")  # states of jobs that ended with an error


def drawn_key() -> str:
    """A key for a job that its client gives none."""
    return secrets.token_hex(KEY_BYTES)


async def has_failed(client: AsyncClient, job: JobRef, code: str, gen: int, pos: int) -> bool:
    """Whether an error with which a reading of a job ended is that of the job itself.

    `code` is the error's; `gen` and `pos` are the generation that was read, and how many of its ids
    the reader has with it. False if the pool does not say, and for a job that has gone on since:
    then another reading goes on where this one ended.
    """
    if code in READING_CODES:
        return False
    try:
        row = await client.job(job)
    except PoolError:
        return False
    return row["state"] in FAILED and (row["gen"], row["ids"]) == (gen, pos)


class KeptAnswer:
    """One reading of a job, with an update for each step of its output.

    Steps are stored with the output, so that whoever reads it, and when, gets the same updates.
    Leaving the context ends the reading; the job goes on.
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
        """`stream` reads a job from 0 on with its steps; the others are those of its request."""
        self._stream = stream
        self._chat, self._tools, self._several_calls = chat, tools, several_calls
        self._stops, self._thinks = stops, thinks
        self._parser: Parser | None = None  # made with the first delta, which has the facts
        self._in_thoughts = True
        self.thought_tokens = 0  # before the first text that is no thought
        self.pos = 0  # how many ids were read
        self._failures = 0  # of the answer behind so many ids that are known

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the first worker reported; empty before the first update."""
        return self._stream.facts

    async def updates(self, timeout: float = NO_TIMEOUT) -> AsyncIterator[ChoiceUpdate | None]:
        """Every update, the last with the result; None for each `timeout` seconds without one.

        Raises HttpError for the error with which the job ended, or that of the reading.
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
        """How many failures in front of a delta were not known: a reading may tell them twice."""
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
    """How often the job had ended with an error in front of a delta, and was tried again."""
    return sum(ids == 0 for ids, _ in delta.steps)


def steps_of(delta: Delta) -> list[tuple[str, int, tuple[Mapping[str, Any], ...]]]:
    """The steps of a delta: text, number of ids, log-probabilities of each."""
    found = []
    ids = end = 0
    steps = delta.steps[failures_before(delta) :]
    if not steps and (delta.ids or delta.text):
        steps = ((len(delta.ids), len(delta.text)),)
    for next_ids, next_end in steps:
        found.append((delta.text[end:next_end], next_ids - ids, delta.logprobs[ids:next_ids]))
        ids, end = next_ids, next_end
    return found
