"""The drain of a gateway: it refuses new requests; running requests have a time limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from mlxpool.gateway.errors import HttpError

RETRY_AFTER = 1.0  # seconds; another gateway of the same load balancer may answer at once
ABORT_TIME = 1.0  # seconds for the error events of requests that outlast the drain


class Drain:
    """Counts the running requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self.begun = False
        self._running: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()  # set when a request ends, and to cut the drain short
        self._hurry = False

    @property
    def running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    def check_open(self) -> None:
        """Raises HttpError once the drain has begun."""
        if self.begun:
            message = "the gateway is draining: it takes no new requests; send it again"
            raise HttpError(503, message, "draining", retry_after=RETRY_AFTER, close=True)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts the current task as a running request inside the context."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)
            self._changed.set()

    def hurry(self) -> None:
        """Ends running requests now."""
        self._hurry = True
        self._changed.set()

    async def finish(self, seconds: float) -> None:
        """Waits until no request runs; cancels the requests that still run after `seconds`.

        A cancelled request ends with an error, in ABORT_TIME at most.
        """
        self.begun = True
        await self._wait_for_requests(seconds, cut_short=True)
        for task in self._running:
            task.cancel()
        await self._wait_for_requests(ABORT_TIME, cut_short=False)

    async def _wait_for_requests(self, seconds: float, *, cut_short: bool) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running and not (cut_short and self._hurry):
                    self._changed.clear()
                    await self._changed.wait()
