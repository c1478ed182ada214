"""A request's streams, read as one: deltas of the pool in, events of the formats out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mlxpool.client import AsyncClient, AsyncStream, Delta, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway import formats
from mlxpool.gateway.formats.events import Event, Parser

AHEAD = 4  # steps of all choices together that are read before they are written

NO_CHAT: Mapping[str, str | None] = {"tools": None, "thinking": None}


@dataclass(frozen=True, slots=True)
class Ask:
    """One stream of the pool: a prompt, messages or tokens, and options as `stream` takes them."""

    model: str
    arguments: Mapping[str, Any]
    chat: Mapping[str, str | None] = field(default_factory=lambda: NO_CHAT)
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What has come of one choice; `result` with the last step."""

    choice: int
    events: tuple[Event, ...]
    logprobs: tuple[Mapping[str, Any], ...] = ()
    result: Result | None = None


class Choice:
    """One stream and the parser of its text, which is made when its first delta is there."""

    def __init__(self, number: int, stream: AsyncStream, ask: Ask) -> None:
        self.stream = stream
        self.begun = False
        self._number = number
        self._ask = ask
        self._parser: Parser | None = None

    async def step(self) -> Step:
        """Waits for what comes next. Raises the stream's error."""
        deltas = await self.stream.ready()
        if not deltas:
            return Step(self._number, tuple(self._made().finish()), (), self.stream.result)
        self.begun = True
        text = "".join([delta.text for delta in deltas])
        events = self._made().push(text) if text else ()
        return Step(self._number, tuple(events), _logprobs(deltas))

    def _made(self) -> Parser:
        if self._parser is None:
            thinks = self.stream.facts.get("thinks") is True
            self._parser = formats.parser(self._ask.chat, self._ask.tools, thinks=thinks)
        return self._parser


def _logprobs(deltas: Sequence[Delta]) -> tuple[Mapping[str, Any], ...]:
    if len(deltas) == 1:
        return deltas[0].logprobs
    return tuple(entry for delta in deltas for entry in delta.logprobs)


class Flow:
    """All choices of a request. Leaving it cancels what is not finished.

    One choice is read directly; several have a task each, and a queue for all that is bounded.
    """

    def __init__(self, client: AsyncClient, asks: Sequence[Ask]) -> None:
        """Raises PoolError for a request that cannot travel."""
        self._choices: list[Choice] = []
        self._open = len(asks)
        self._steps: asyncio.Queue[Step | Exception] = asyncio.Queue(AHEAD)
        self._tasks: list[asyncio.Task[None]] = []
        for number, ask in enumerate(asks):
            try:
                stream = client.stream(ask.model, **ask.arguments)
            except PoolError:
                self.close()
                raise
            self._choices.append(Choice(number, stream, ask))

    @property
    def begun(self) -> bool:
        """Whether a model has done work for it."""
        return any(choice.begun for choice in self._choices)

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def id(self) -> str:
        """Of the first stream, as the pool's own log has it."""
        return self._choices[0].stream.id.hex()

    async def step(self, patience: float) -> Step | None:
        """The next step of any choice; None when none came for `patience` seconds.

        Raises the first error of any choice. Not to be called once `over`.
        """
        try:
            async with asyncio.timeout(patience):
                step = await self._next()
        except TimeoutError:
            return None
        if step.result is not None:
            self._open -= 1
        return step

    @property
    def over(self) -> bool:
        return self._open == 0

    async def _next(self) -> Step:
        if len(self._choices) == 1:
            return await self._choices[0].step()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read(choice)) for choice in self._choices]
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        return step

    async def _read(self, choice: Choice) -> None:
        try:
            while True:
                step = await choice.step()
                await self._steps.put(step)
                if step.result is not None:
                    return
        except Exception as error:  # whatever it is, somebody waits for it
            await self._steps.put(error)

    def close(self) -> None:
        """Cancel what is not finished."""
        for task in self._tasks:
            task.cancel()
        for choice in self._choices:
            choice.stream.close()

    async def __aenter__(self) -> Flow:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
