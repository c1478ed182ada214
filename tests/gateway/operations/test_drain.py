"""The drain of a gateway: it refuses new requests; running requests have a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.operations.drain import Drain

LONG = 3600.0


async def begin(drain: Drain, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts a request that the drain counts as running; cancelling the task ends it."""

    async def request() -> None:
        with drain.request():
            await work

    task = asyncio.create_task(request())
    while not drain.running:
        await asyncio.sleep(0)
    return task


async def test_without_requests_it_ends_at_once_and_refuses_new_ones() -> None:
    drain = Drain()
    drain.check_open()
    await drain.finish(LONG)
    with pytest.raises(HttpError, match="draining") as caught:
        drain.check_open()
    assert caught.value.status == 503
    assert caught.value.headers() == {"retry-after": "1", "connection": "close"}


async def test_it_waits_for_requests_that_run() -> None:
    drain, done = Drain(), asyncio.Event()
    request = await begin(drain, _until(done))
    finishing = asyncio.create_task(drain.finish(LONG))
    while not drain.begun:
        await asyncio.sleep(0)
    assert not finishing.done() and drain.running == 1
    done.set()
    await finishing
    assert request.done() and not request.cancelled()


async def test_it_cancels_those_that_outlast_it() -> None:
    drain = Drain()
    request = await begin(drain, _until(asyncio.Event()))
    await drain.finish(0.0)
    assert request.cancelled() and drain.running == 0


async def test_a_second_signal_cuts_it_short() -> None:
    drain = Drain()
    request = await begin(drain, _until(asyncio.Event()))
    finishing = asyncio.create_task(drain.finish(LONG))
    while not drain.begun:
        await asyncio.sleep(0)
    drain.hurry()
    await finishing
    assert request.cancelled()


async def _until(event: asyncio.Event) -> None:
    await event.wait()
