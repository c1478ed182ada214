"""Turns the pool's streams, one for each choice, into the response to one HTTP request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import string
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from msgspec import Struct

from mlxpool.client import AsyncClient, AsyncStream, Delta, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats import NO_CHAT, ChatFormats, make_parser, template_messages
from mlxpool.gateway.formats.events import Event, Parser
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.operations.exchange import Exchange

CALL_ID_LENGTH = 9  # letters and digits; some templates accept no other length
_DIGITS = string.digits + string.ascii_letters
log = logging.getLogger("mlxpool.gateway")
NO_TIMEOUT = 10.0**9  # seconds
MAX_UNWRITTEN_UPDATES = 4  # most updates of all choices together that are read but not yet written


def call_ids(answer: str) -> Callable[[int], str]:
    """Returns a function from a call's number to its id; `answer` identifies the answer."""

    def call_id(index: int) -> str:
        digest = hashlib.sha256(f"{answer}/{index}".encode()).digest()
        return "".join(_DIGITS[byte % len(_DIGITS)] for byte in digest[:CALL_ID_LENGTH])

    return call_id


class ChoiceRequest(Struct, frozen=True):
    """A prompt to complete: the model and the keyword arguments of the client's `stream`.

    `n`: the number of choices, see `AsyncClient.streams`. `thinks`: a prompt of token ids ends
    inside the model's thoughts. If `several_calls` is False, the answer has at most one call of a
    tool.
    """

    model: str
    arguments: Mapping[str, Any]
    chat: ChatFormats = NO_CHAT
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1
    thinks: bool = False
    several_calls: bool = True

    @property
    def stops(self) -> bool:
        """Whether the answer may end at a stop text of the request."""
        return bool(self.arguments.get("stop"))


class ChoiceUpdate(Struct, frozen=True):
    """New output of one choice; the last update of a choice has its `result`.

    `prompt`: the log-probabilities of tokens of the prompt. `failures`: how often the job of the
    answer failed and was retried between the previous update and this update; 0 without a job.
    """

    choice: int
    events: tuple[Event, ...]
    logprobs: tuple[Mapping[str, Any], ...] = ()
    result: Result | None = None
    prompt: tuple[Mapping[str, Any], ...] = ()
    failures: int = 0


class Updates(Protocol):
    """An object that yields the updates of an answer."""

    def updates(self, timeout: float = NO_TIMEOUT) -> AsyncIterator[ChoiceUpdate | None]:
        """Yields updates of all choices, and None after `timeout` seconds without an update."""
        ...


class Answers(Updates, Protocol):
    """All choices of a request, from streams (Generation) or from jobs (ResumableGeneration)."""

    @property
    def choices(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...

    def told_time(self) -> float:
        """The creation time that all pieces of the answer show, in seconds since 1970."""
        ...

    def call_ids(self, choice: int) -> Callable[[int], str]:
        """Returns a function from a tool call's number in a choice to the call's id."""
        ...


class Choice:
    """A stream of the pool and the parser of its text.

    `repeated`: an earlier choice of the request has the same prompt.
    """

    def __init__(
        self, number: int, stream: AsyncStream, request: ChoiceRequest, *, repeated: bool = False
    ) -> None:
        self.stream = stream
        self.repeated = repeated
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
        prompt = tuple(entry for delta in deltas for entry in delta.prompt)
        return ChoiceUpdate(self._number, tuple(pushed), _logprobs(deltas), prompt=prompt)

    def _get_parser(self) -> Parser:
        if self._parser is None:
            thinks = self._request.thinks or self.stream.facts.get("thinks") is True
            request = self._request
            self._parser = make_parser(
                request.chat,
                request.tools,
                thinks=thinks,
                several_calls=request.several_calls,
                stops=request.stops,
            )
        return self._parser


def _logprobs(deltas: Sequence[Delta]) -> tuple[Mapping[str, Any], ...]:
    if len(deltas) == 1:
        return deltas[0].logprobs
    return tuple(entry for delta in deltas for entry in delta.logprobs)


def stream_arguments(request: ChoiceRequest, deadline: float | None) -> dict[str, Any]:
    """Returns the keyword arguments of a request for the client's `stream`.

    Adds the deadline, and converts messages to the form that the model's chat template reads.
    `deadline`: seconds from now; None sets no deadline.
    """
    arguments = dict(request.arguments)
    if deadline is not None:
        arguments["deadline_ms"] = milliseconds(deadline)
    if "messages" in arguments:
        arguments["messages"] = template_messages(request.chat, arguments["messages"])
    return arguments


def _started(
    client: AsyncClient, request: ChoiceRequest, deadline: float | None, traceparent: str | None
) -> list[AsyncStream]:
    arguments = {**stream_arguments(request, deadline), "traceparent": traceparent}
    if request.n > 1:
        return client.streams(request.model, n=request.n, **arguments)
    stream: AsyncStream = client.stream(request.model, **arguments)
    return [stream]


class Generation:
    """All choices of a request. Leaving the context cancels the unfinished choices.

    A single choice is read directly. Of several choices, each is read by its own task; the tasks
    share a bounded queue.
    """

    def __init__(
        self,
        client: AsyncClient,
        requests: Sequence[ChoiceRequest],
        deadline: float | None,
        exchange: Exchange,
        prompt_field: str | None = None,
    ) -> None:
        """Starts the streams; `deadline` is in seconds.

        Raises PoolError if a request cannot be sent. The exchange gets the time of the first token
        and the number of tokens of all choices. `prompt_field`: the field that has the prompt, if
        not `messages` or `prompt`.
        """
        self._exchange = exchange
        as_chat = "messages" in requests[0].arguments
        self._prompt_field = prompt_field or ("messages" if as_chat else "prompt")
        self._choices: list[Choice] = []
        self._updates: asyncio.Queue[ChoiceUpdate | Exception] = asyncio.Queue(
            MAX_UNWRITTEN_UPDATES
        )
        self._tasks: list[asyncio.Task[None]] = []
        for request in requests:
            try:
                streams = _started(client, request, deadline, exchange.traceparent)
            except PoolError:
                self.close()
                raise
            for index, stream in enumerate(streams):
                number = len(self._choices)
                self._choices.append(Choice(number, stream, request, repeated=index > 0))
        exchange.model, exchange.pool_id = requests[0].model, self.id

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self._choices)

    @property
    def id(self) -> str:
        """The id of the first stream in hex, as in the pool's log."""
        return self._choices[0].stream.id.hex()

    @property
    def facts(self) -> Mapping[str, Any]:
        """The worker's data on model and prompt (`facts`) for choice 0; empty before its output."""
        return self._choices[0].stream.facts

    def told_time(self) -> float:
        return time.time()

    def call_ids(self, choice: int) -> Callable[[int], str]:
        return call_ids(f"{self.id}/{choice}")

    async def updates(self, timeout: float = NO_TIMEOUT) -> AsyncIterator[ChoiceUpdate | None]:
        """Yields updates of all choices, and None after `timeout` seconds without an update.

        The first update comes after every choice is accepted. Raises HttpError for the first error
        of a choice, and if an operator cancels a choice.
        """
        held: list[ChoiceUpdate] = []
        unfinished = len(self._choices)
        while unfinished:
            try:
                async with asyncio.timeout(timeout):
                    update = await self._next()
            except TimeoutError:
                yield None
                continue
            except PoolError as error:
                started = any(choice.started for choice in self._choices)
                field = self._prompt_field
                raise errors.from_pool_error(error, started=started, prompt_field=field) from error
            if self._exchange.first_token is None:
                self._exchange.first_token = time.monotonic()
            if update.result is not None:
                unfinished -= 1
                counted = self._choices[update.choice].repeated
                self._exchange.count(update.result.usage, prompt=not counted)
                if update.result.reason == "cancelled":
                    message = "the request was cancelled by an operator"
                    raise HttpError(503, message, "cancelled", retry=False)
            held.append(update)
            if all(choice.stream.accepted for choice in self._choices):
                for update in held:
                    yield update
                held.clear()

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
        except Exception as error:  # `_next` raises it in the task that waits for updates
            await self._updates.put(error)

    def close(self) -> None:
        """Cancels the choices that are not finished."""
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


def milliseconds(seconds: float | None) -> int | None:
    """Returns a deadline in milliseconds, at least 1; None if there is no deadline."""
    return None if seconds is None else max(1, round(seconds * 1000))


# ---- the response --------------------------------------------------------------------------------


class StreamFormat(Struct, frozen=True):
    """The encoding of a streamed response in an interface."""

    content_type: str
    update: Callable[[ChoiceUpdate], bytes]
    error: Callable[[HttpError], bytes]
    head: bytes = b""  # written before the first update
    keep_alive: bytes = b""  # written for each `keep_alive_interval` without an update
    keep_alive_interval: float = NO_TIMEOUT  # seconds


async def write_stream(
    response: ResponseWriter, generation: Updates, encoding: StreamFormat
) -> list[Result] | None:
    """Writes each update as it comes. Returns the results by choice, None after an error.

    The response is opened with the first update or keep-alive. A request that is refused
    immediately therefore gets its own status. The caller closes the response after a success.
    """
    try:
        return await write_updates(response, generation, encoding)
    except HttpError as error:
        if not response.started:
            raise
        data = encoding.error(response.identified(error))
        await (response.write_aside(data) if error.passing else response.write(data))
        await response.close()
        return None


async def write_updates(
    response: ResponseWriter, generation: Updates, encoding: StreamFormat
) -> list[Result]:
    """Writes each update as it comes. Returns the results by choice. Raises HttpError."""
    results: dict[int, Result] = {}
    written = time.monotonic()
    async for update in generation.updates(encoding.keep_alive_interval):
        data = b"" if update is None else encoding.update(update)
        if not response.started:
            await response.open(encoding.content_type)
            if update is not None and update.failures == 0:
                data = encoding.head + data
            else:
                await response.write(encoding.head)
        if update is None:
            await response.write_aside(encoding.keep_alive)
            continue
        if response.numbers is not None:
            response.numbers.skip(update.failures)
        if update.result is not None:
            results[update.choice] = update.result
        if data:
            await response.write(data)
            written = time.monotonic()
        elif time.monotonic() - written >= encoding.keep_alive_interval:
            await response.write_aside(encoding.keep_alive)  # a call is held back until its end
            written = time.monotonic()
    return [results[number] for number in sorted(results)]
