"""Reads the updates of a generation and writes them as a streamed HTTP response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from mlxpool.client import Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation import ChoiceUpdate, Generation
from mlxpool.gateway.http import ResponseWriter

NO_TIMEOUT = 10.0**9  # seconds


async def updates(
    generation: Generation, timeout: float = NO_TIMEOUT
) -> AsyncIterator[ChoiceUpdate | None]:
    """Every update; None for each `timeout` seconds without one. Raises HttpError."""
    while not generation.finished:
        try:
            update = await generation.next_update(timeout)
        except PoolError as error:
            raise errors.from_pool_error(error, started=generation.started) from error
        if update is not None and update.result is not None:
            check_not_cancelled(update.result)
        yield update


def check_not_cancelled(result: Result) -> None:
    """Raises HttpError if anybody but the HTTP client cancelled the request."""
    if result.reason == "cancelled":
        raise HttpError(503, "the request was cancelled by an operator", "cancelled", retry=False)


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How an interface encodes a streamed response."""

    content_type: str
    update: Callable[[ChoiceUpdate], bytes]
    error: Callable[[HttpError], bytes]
    head: bytes = b""  # written before the first update
    keep_alive: bytes = b""  # written for each `keep_alive_interval` without an update
    keep_alive_interval: float = NO_TIMEOUT  # seconds


async def write_stream(
    response: ResponseWriter, generation: Generation, encoding: StreamFormat
) -> list[Result] | None:
    """Write every update as it comes; returns the results by choice, None after an error.

    The response is opened with the first update or keep-alive, so that a request that is refused
    at once gets a status of its own. The caller closes the response after a success.
    """
    results: dict[int, Result] = {}
    try:
        async for update in updates(generation, encoding.keep_alive_interval):
            data = encoding.keep_alive if update is None else encoding.update(update)
            if not response.started:
                await response.open(encoding.content_type)
                data = encoding.head + data
            if update is not None and update.result is not None:
                results[update.choice] = update.result
            if data:
                await response.write(data)
    except HttpError as error:
        if not response.started:
            raise
        await response.write(encoding.error(error))
        await response.close()
        return None
    return [results[number] for number in sorted(results)]
