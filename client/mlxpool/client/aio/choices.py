"""The stream of several choices for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

from mlxpool.client.aio.loop_calls import put_in_loop
from mlxpool.client.choices import Choices, Item, OpenChoices
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.stream import Delta
from mlxpool.common.closing import AsyncClosing
from mlxpool.common.protocol.from_client import GenerateDraft


class AsyncChoicesStream(AsyncClosing):
    """An asynchronous iterator over the deltas of several choices, see `ChoicesStream`.

    It has the members of `ChoicesStream`, `read` is a coroutine. It belongs to the event loop that
    started it.
    """

    def __init__(self, connection: AnyConnection, drafts: Sequence[GenerateDraft]) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        # The connection keeps what it delivers to: that must not be this object, see `__del__`.
        put = partial(put_in_loop, asyncio.get_running_loop(), self._queue)
        self._choices = OpenChoices(connection, drafts, put)

    @property
    def ids(self) -> list[bytes]:
        """The id of each choice's request, 16 bytes."""
        return self._choices.ids

    @property
    def result(self) -> Choices:
        """All completions; see `ChoicesStream.result`."""
        return self._choices.whole()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while self._choices.left:
                self._connection.check_process()
                for delta in self._choices.take(await self._queue.get()):
                    yield delta
        finally:
            self.close()

    async def read(self) -> Choices:
        """Wait for the end of all choices. Raises the error of the first that ends with one."""
        async for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the choices that are not finished."""
        self._choices.close()

    def __del__(self) -> None:
        if hasattr(self, "_choices"):  # they were sent
            self._choices.abandon()
