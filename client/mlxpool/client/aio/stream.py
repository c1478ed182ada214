"""Streams of one completion and of several choices, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from mlxpool.client.aio.calls import put_in_loop
from mlxpool.client.choices import Choices, Item, OpenChoices
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Draft
from mlxpool.client.stream import Delta, Result
from mlxpool.common.closing import AsyncClosing
from mlxpool.common.protocol.from_client import GenerateDraft


class AsyncStream(AsyncClosing):
    """An asynchronous iterator over the deltas of one completion, as they arrive.

    The class has the members of `Stream`; `read` is a coroutine. A stream belongs to the event loop
    that started it, and is cancelled in the same cases as a `Stream`.
    """

    def __init__(self, connection: AnyConnection, draft: Draft) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        # The connection holds a reference to the receiver. With this object as the receiver,
        # `__del__` would not run.
        put = partial(put_in_loop, asyncio.get_running_loop(), self._queue)
        self._open = connection.open(draft, put)

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes."""
        return self._open.state.id

    @property
    def accepted(self) -> bool:
        """True if a broker has accepted the request, or if it was cancelled before that."""
        return bool(self._open.state.boot or self._open.state.result)

    @property
    def gen(self) -> int | None:
        """The generation of the job that the stream reads; None if it is unknown.

        It is the number of times that the job began anew because its model had changed. It is known
        once the broker has answered, and only if the stream reads a job.
        """
        return self._open.state.gen

    @property
    def facts(self) -> Mapping[str, Any]:
        """Values of the stream that a resume needs, such as the digest of its model.

        They are the `facts` of docs/protocol.md, from the first worker; {} before the first delta.
        """
        return self._open.state.facts.raw if self._open.state.facts else {}

    @property
    def result(self) -> Result:
        """The whole completion. Raises the stream's error, and RuntimeError before the end."""
        return self._connection.result(self._open)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.close()

    async def _next(self) -> Delta | None:
        if self._open.finished:
            return None
        self._connection.check_process()
        return self._connection.took(self._open, await self._queue.get())

    async def ready(self) -> list[Delta]:
        """Waits for the next delta. Returns all deltas that have arrived; an empty list at the end.

        Raises the stream's error. A cancelled wait loses no delta.
        """
        first = await self._next()
        deltas = [] if first is None else [first]
        while deltas and not self._queue.empty():
            delta = self._queue.get_nowait()
            if delta is None:
                self._queue.put_nowait(None)  # so that the next call reports the end
                break
            self._connection.took(self._open, delta)
            deltas.append(delta)
        return deltas

    async def read(self) -> Result:
        """Waits for the end. Returns the whole completion. Raises the stream's error."""
        while await self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancels the stream if it is unfinished."""
        self._connection.leave(self._open)

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # __init__ has sent the request
            self._connection.abandon(self._open)


class AsyncChoicesStream(AsyncClosing):
    """An asynchronous iterator over the deltas of several choices, see `ChoicesStream`.

    The class has the members of `ChoicesStream`; `read` is a coroutine. A stream belongs to the
    event loop that started it.
    """

    def __init__(self, connection: AnyConnection, drafts: Sequence[GenerateDraft]) -> None:
        self._connection = connection
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        # The connection holds a reference to the receiver. With this object as the receiver,
        # `__del__` would not run.
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
        """Waits for the end of all choices. Raises the first error of a choice."""
        async for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancels the unfinished choices."""
        self._choices.close()

    def __del__(self) -> None:
        if hasattr(self, "_choices"):  # __init__ has sent the choices
            self._choices.abandon()
