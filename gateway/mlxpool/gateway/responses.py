"""What both interfaces share: a request's steps, streamed or gathered, and faults on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from mlxpool.client import AsyncClient, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway import errors, formats
from mlxpool.gateway.completion import Ask, Flow, Step
from mlxpool.gateway.errors import Fault
from mlxpool.gateway.http import Reply
from mlxpool.gateway.models import Models
from mlxpool.gateway.settings import Settings

FOREVER = 10.0**9  # seconds


class Serving:
    """One connection to the pool for all requests."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        self.settings = settings
        self.client = client
        self.models = Models(client)

    def flow(self, asks: Sequence[Ask]) -> Flow:
        """The streams of a request, started. Raises Fault."""
        try:
            return Flow(self.client, asks)
        except PoolError as error:
            raise errors.of(error) from error

    def bounded(
        self, arguments: Mapping[str, Any], chat: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """With the gateway's own deadline, if it has one, and messages as the model reads them."""
        found = dict(arguments)
        if self.settings.deadline is not None:
            found["deadline_ms"] = max(1, round(self.settings.deadline * 1000))
        if "messages" in found:
            found["messages"] = formats.messages(chat, found["messages"])
        return found


async def steps(flow: Flow, patience: float = FOREVER) -> AsyncIterator[Step | None]:
    """Every step of a flow; None for each `patience` seconds without one. Raises Fault."""
    while not flow.over:
        try:
            step = await flow.step(patience)
        except PoolError as error:
            raise errors.of(error, begun=flow.begun) from error
        if step is not None and step.result is not None:
            check(step.result)
        yield step


def check(result: Result) -> None:
    """Raises Fault for an end that the client did not ask for."""
    if result.reason == "cancelled":
        raise Fault(503, "the request was cancelled by an operator", "cancelled", retry=False)


async def stream(
    reply: Reply,
    flow: Flow,
    content_type: str,
    patience: float,
    write: Callable[[Step], bytes],
    first: bytes,
    waiting: bytes,
    failed: Callable[[Fault], bytes],
) -> list[Result] | None:
    """Send every step as it comes; the results by choice, or None if it ended with a fault.

    Nothing is sent before the first step or `patience` seconds, so that a request which is refused
    at once gets a status of its own; `waiting` is sent whenever so long nothing comes.
    """
    results: dict[int, Result] = {}
    try:
        async for step in steps(flow, patience):
            data = waiting if step is None else write(step)
            if not reply.started:
                await reply.open(content_type)
                data = first + data
            if step is not None and step.result is not None:
                results[step.choice] = step.result
            if data:
                await reply.write(data)
    except Fault as fault:
        if not reply.started:
            raise
        await reply.write(failed(fault))
        await reply.close()
        return None
    return [results[number] for number in sorted(results)]
