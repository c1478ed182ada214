"""The client for asyncio: the same connection, deltas through an asyncio queue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mlxpool.client import request
from mlxpool.client.retry import BROKER_GRACE, CONNECT_GRACE, Pace
from mlxpool.client.stream import Delta, Result, StreamState
from mlxpool.client.transport import Link
from mlxpool.client.transport import Stream as LinkStream
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol import frames, kinds, token_ids
from mlxpool.common.protocol.frames import Message
from mlxpool.common.transport.keys import Credentials


class AsyncStream:
    """Deltas as they come, in the loop that started it; leaving early cancels the rest."""

    def __init__(self, link: Link, state: StreamState) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._state = state
        self._part = LinkStream(state, self._put, lambda: self._put(None))
        self._finished = False

    def _put(self, delta: Delta | None) -> None:
        _in_loop(self._loop, lambda: self._queue.put_nowait(delta))

    @property
    def id(self) -> bytes:
        """The request's 16 bytes."""
        return self._state.id

    @property
    def facts(self) -> Mapping[str, Any]:
        """What its first worker said of it, there with the first delta (docs/protocol.md)."""
        return self._state.facts or {}

    @property
    def result(self) -> Result:
        """Raises the stream's error, or RuntimeError while it is not over, which `read` awaits."""
        if self._state.error is not None:
            raise self._state.error
        if self._state.result is None:
            raise RuntimeError("the stream is not over")
        return self._state.result

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.close()

    async def _next(self) -> Delta | None:
        if self._finished:
            return None
        delta = await self._queue.get()
        if delta is None:
            self._finished = True
            if self._state.error is not None:
                raise self._state.error
        else:
            self._link.took(self._part, len(delta.ids))
        return delta

    async def ready(self) -> list[Delta]:
        """The deltas that have come, after waiting for the first; none at the end.

        Raises the stream's error. Who stops waiting loses none.
        """
        first = await self._next()
        deltas = [] if first is None else [first]
        while deltas and not self._queue.empty():
            delta = self._queue.get_nowait()
            if delta is None:
                self._queue.put_nowait(None)  # the end is told the next time
                break
            self._link.took(self._part, len(delta.ids))
            deltas.append(delta)
        return deltas

    async def read(self) -> Result:
        """Read to the end. Raises the stream's error."""
        while await self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancel what is not finished; harmless afterwards."""
        if not self._finished:
            self._finished = True
            if not self._state.over:
                self._link.cancel(self._part)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """As `Client`, with coroutines; `stream` is no coroutine, its iteration is.

    Its calls wait as long as the pool does: bound them with `asyncio.timeout`.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        *,
        server_key: str | None = None,
        key: str | Path | None = None,
        connect_timeout: float = CONNECT_GRACE,
        broker_grace: float = BROKER_GRACE,
        pace: Pace | None = None,
    ) -> None:
        pace = replace(pace or Pace(), broker_grace=broker_grace, connect_grace=connect_timeout)
        self._link = Link(run_dir, endpoint, pace, Credentials.of(server_key, key))

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        **options: Any,
    ) -> AsyncStream:
        """Start a completion, as `Client.stream` does; raises what it raises."""
        body, blobs = request.generate(model, prompt, messages, tokens, options)
        stream = AsyncStream(self._link, StreamState(os.urandom(frames.ID_BYTES)))
        self._link.open(stream._part, body, blobs)
        return stream

    async def generate(self, model: str, prompt: str | None = None, **options: Any) -> Result:
        """A whole completion; takes what `stream` takes. Cancelling the task cancels it."""
        async with self.stream(model, prompt, **options) as stream:
            return await stream.read()

    async def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return list((await self._call(kinds.MODELS, {})).body["models"])

    async def tokenize(self, model: str, text: str) -> list[int]:
        """The ids of a text, as the model would read it as a prompt."""
        value, blobs = request.text(text)
        message = await self._call(kinds.TOKENIZE, {"model": model, "text": value}, blobs)
        return token_ids.unpack_ids(message.blobs[0]) if message.blobs else []

    async def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of these ids."""
        message = await self._call(kinds.DETOKENIZE, {"model": model}, [token_ids.pack_ids(ids)])
        return str(message.body["text"])

    async def cancel(self, request_id: bytes) -> dict[str, Any]:
        """Cancel any of this owner's requests by its 16 bytes; returns its fate {state, pos}."""
        return dict((await self._call(kinds.CANCEL, {}, ident=request_id)).body)

    async def _call(
        self,
        kind: str,
        body: Mapping[str, Any],
        blobs: Sequence[bytes] = (),
        ident: bytes | None = None,
    ) -> Message:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Message] = loop.create_future()

        def resolve(reply: Message | PoolError) -> None:
            if answer.done():
                return
            if isinstance(reply, PoolError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

        asked = self._link.ask(
            kind, body, lambda reply: _in_loop(loop, lambda: resolve(reply)), ident, blobs
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self._link.forget(asked)
            raise

    async def close(self) -> None:
        """Close the connection; open streams end."""
        await asyncio.to_thread(self._link.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From the link's thread; a loop that is closed has nobody waiting."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass
