"""A connection on behalf of an owner, and the interface that every connection has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from mlxpool.client.connection import Connection
from mlxpool.client.open_stream import OpenStream
from mlxpool.client.request import Draft, Question
from mlxpool.client.stream import Delta, Result
from mlxpool.common.errors import PoolError

Answer = TypeVar("Answer")


class AnyConnection(Protocol):
    """The methods of a connection that streams and calls use; Connection describes them."""

    def open(self, draft: Draft, deliver: Callable[[Delta | None], None]) -> OpenStream: ...
    def took(self, stream: OpenStream, delta: Delta | None) -> Delta | None: ...
    def result(self, stream: OpenStream) -> Result: ...
    def leave(self, stream: OpenStream) -> None: ...
    def abandon(self, stream: OpenStream) -> None: ...
    def ask(
        self, question: Question[Answer], on_reply: Callable[[Answer | PoolError], None]
    ) -> None: ...
    def forget(self, question: Question[Answer]) -> None: ...
    def check_process(self) -> None: ...
    def close(self) -> None: ...


class OwnerConnection:
    """A view of a shared connection that sends every message on behalf of an owner."""

    def __init__(self, shared: AnyConnection, owner: str) -> None:
        assert isinstance(shared, Connection | OwnerConnection)
        self._shared: Connection = shared._shared if isinstance(shared, OwnerConnection) else shared
        self._owner = owner
        self.took = self._shared.took
        self.result = self._shared.result
        self.leave = self._shared.leave
        self.abandon = self._shared.abandon
        self.check_process = self._shared.check_process
        self.close = self._shared.close

    def open(self, draft: Draft, deliver: Callable[[Delta | None], None]) -> OpenStream:
        """Sends the message that starts a stream on behalf of the owner; see Connection.open."""
        return self._shared.open(draft, deliver, self._owner)

    def ask(
        self, question: Question[Answer], on_reply: Callable[[Answer | PoolError], None]
    ) -> None:
        """Sends a call on behalf of the owner; see Connection.ask."""
        self._shared.ask(question, on_reply, self._owner)

    def forget(self, question: Question[Answer]) -> None:
        """Drops a call whose caller no longer waits; see Connection.forget."""
        self._shared.forget(question)
