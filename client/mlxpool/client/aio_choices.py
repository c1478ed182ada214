"""The stream of several choices for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from mlxpool.client.choices import Choices, Item, OpenChoices
from mlxpool.client.connection import Connection
from mlxpool.client.loop_calls import call_in_loop
from mlxpool.client.stream import Delta
from mlxpool.common.protocol.from_client import GenerateDraft


class AsyncChoicesStream:
    """An asynchronous iterator over the deltas of several choices; see `ChoicesStream`.

    Belongs to the event loop that started it.
    """

    def __init__(self, connection: Connection, drafts: Sequence[GenerateDraft]) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._choices = OpenChoices(connection, drafts, self._put)

    def _put(self, item: Item) -> None:
        call_in_loop(self._loop, lambda: self._queue.put_nowait(item))

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

    async def __aenter__(self) -> AsyncChoicesStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
