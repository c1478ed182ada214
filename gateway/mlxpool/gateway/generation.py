"""The streams of one HTTP request, one a choice: turns the pool's deltas into events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mlxpool.client import AsyncClient, AsyncStream, Delta, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway.formats import NO_CHAT, ChatFormats, make_parser
from mlxpool.gateway.formats.events import Event, Parser

MAX_UNWRITTEN_UPDATES = 4  # updates of all choices together that are read but not yet written


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice to generate: the model and the keyword arguments of the client's `stream`."""

    model: str
    arguments: Mapping[str, Any]
    chat: ChatFormats = NO_CHAT
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """New output of one choice; the last update of a choice has its `result`."""

    choice: int
    events: tuple[Event, ...]
    logprobs: tuple[Mapping[str, Any], ...] = ()
    result: Result | None = None


class Choice:
    """One stream of the pool and the parser of its text."""

    def __init__(self, number: int, stream: AsyncStream, request: ChoiceRequest) -> None:
        self.stream = stream
        self.started = False  # a delta has arrived
        self._number = number
        self._request = request
        self._parser: Parser | None = None  # made with the first delta, which has the facts

    async def next_update(self) -> ChoiceUpdate:
        """Waits for the stream's next deltas or its end. Raises the stream's error."""
        deltas = await self.stream.ready()
        if not deltas:
            events = self._get_parser().finish()
            return ChoiceUpdate(self._number, tuple(events), (), self.stream.result)
        self.started = True
        text = "".join([delta.text for delta in deltas])
        pushed = self._get_parser().push(text) if text else ()
        return ChoiceUpdate(self._number, tuple(pushed), _logprobs(deltas))

    def _get_parser(self) -> Parser:
        if self._parser is None:
            thinks = self.stream.facts.get("thinks") is True
            self._parser = make_parser(self._request.chat, self._request.tools, thinks=thinks)
        return self._parser


def _logprobs(deltas: Sequence[Delta]) -> tuple[Mapping[str, Any], ...]:
    if len(deltas) == 1:
        return deltas[0].logprobs
    return tuple(entry for delta in deltas for entry in delta.logprobs)


class Generation:
    """All choices of a request. Leaving the context cancels the unfinished ones.

    A single choice is read directly. Several are read by a task each, which share a bounded queue.
    """

    def __init__(self, client: AsyncClient, requests: Sequence[ChoiceRequest]) -> None:
        """Start the streams. Raises PoolError for a request that cannot be sent."""
        self._choices: list[Choice] = []
        self._unfinished = len(requests)
        self._updates: asyncio.Queue[ChoiceUpdate | Exception] = asyncio.Queue(
            MAX_UNWRITTEN_UPDATES
        )
        self._tasks: list[asyncio.Task[None]] = []
        for number, request in enumerate(requests):
            try:
                stream = client.stream(request.model, **request.arguments)
            except PoolError:
                self.close()
                raise
            self._choices.append(Choice(number, stream, request))

    @property
    def started(self) -> bool:
        """Whether a model has produced output for any choice."""
        return any(choice.started for choice in self._choices)

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self._choices)

    @property
    def id(self) -> str:
        """The id of the first stream in hex, as in the pool's log."""
        return self._choices[0].stream.id.hex()

    @property
    def finished(self) -> bool:
        """Whether every choice has its result."""
        return self._unfinished == 0

    async def next_update(self, timeout: float) -> ChoiceUpdate | None:
        """The next update of any choice; None when none came for `timeout` seconds.

        Raises the first error of any choice. Not to be called once `finished`.
        """
        try:
            async with asyncio.timeout(timeout):
                update = await self._next()
        except TimeoutError:
            return None
        if update.result is not None:
            self._unfinished -= 1
        return update

    async def _next(self) -> ChoiceUpdate:
        if len(self._choices) == 1:
            return await self._choices[0].next_update()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read(choice)) for choice in self._choices]
        update = await self._updates.get()
        if isinstance(update, Exception):
            raise update
        return update

    async def _read(self, choice: Choice) -> None:
        try:
            while True:
                update = await choice.next_update()
                await self._updates.put(update)
                if update.result is not None:
                    return
        except Exception as error:  # raised by `_next` in the task that waits for updates
            await self._updates.put(error)

    def close(self) -> None:
        """Cancel the choices that are not finished."""
        for task in self._tasks:
            task.cancel()
        for choice in self._choices:
            choice.stream.close()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
