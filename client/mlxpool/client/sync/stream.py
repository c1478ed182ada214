"""The stream of one completion, for threads that block."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from typing import Any

from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Draft
from mlxpool.client.stream import Delta, Result
from mlxpool.common.closing import Closing


class Stream(Closing):
    """An iterator over the deltas of one completion, as they arrive.

    An unfinished stream is cancelled by `close`, at the end of a `with` block, when its `for` loop
    is left, and when the object is deleted.
    """

    def __init__(self, connection: AnyConnection, draft: Draft) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._open = connection.open(draft, self._queue.put)

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes."""
        return self._open.state.id

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

    def __iter__(self) -> Iterator[Delta]:
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.close()

    def _next(self) -> Delta | None:
        if self._open.finished:
            return None
        self._connection.check_process()
        return self._connection.took(self._open, self._queue.get())

    def read(self) -> Result:
        """Waits for the end. Returns the whole completion. Raises the stream's error."""
        while self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancels the stream if it is unfinished."""
        self._connection.leave(self._open)

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # __init__ has sent the request
            self._connection.abandon(self._open)
