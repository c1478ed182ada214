"""What waits for the store's thread: operations in their order, bounded in number and bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import Refused

GATHER = 0.1  # seconds for which output waits for more of its kind
ADMIT_SHARE = 2  # operations that bring new work may take 1 / ADMIT_SHARE of the inbox
OPERATION_BYTES = 512  # an operation without its data


class Bounds(Struct, frozen=True):
    """How much may wait, and how much of it one transaction takes."""

    operations: int = 4096
    bytes: int = 64 * 1024 * 1024
    group_operations: int = 512
    group_bytes: int = 8 * 1024 * 1024


class Load(Struct, frozen=True):
    """What waits; what the thread works on is counted too, until its results are there."""

    operations: int
    bytes: int


class Inbox:
    """The broker's loop puts in and never waits; the store's thread takes out."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._changed = threading.Condition()
        self._waiting: deque[Operation] = deque()
        self._urgent = 0  # of those that wait
        self._operations = self._bytes = 0  # taken ones included
        self._since = 0.0  # when the oldest that waits came
        self._closed: Refused | None = None
        self._paused: Refused | None = None

    def offer(self, operation: Operation) -> Refused | None:
        """Put an operation in, unless there is no room for one of its kind."""
        size = operation.size + OPERATION_BYTES
        with self._changed:
            refused = self._closed or self._paused
            if refused is not None:
                return refused
            share = ADMIT_SHARE if operation.admits else 1
            count, room = self._bounds.operations // share, self._bounds.bytes // share
            too_many = self._operations + 1 > count
            too_large = self._bytes + size > room and self._operations > 0
            if too_many or too_large:
                return self._busy()
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(operation)
            self._operations += 1
            self._bytes += size
            if operation.urgent:
                self._urgent += 1
            if operation.urgent or len(self._waiting) == 1:
                self._changed.notify()
            return None

    def _busy(self) -> Refused:
        return Refused(
            "store_busy",
            f"{self._operations} operations of {self._bytes} bytes wait for the disk, at most"
            f" {self._bounds.operations} of {self._bounds.bytes} bytes, half of it for new work;"
            " send it again later",
        )

    def take(self, until: float | None = None) -> list[Operation]:
        """Wait for operations and take a group; an empty one at `until`, and when it is closed.

        Output alone is taken when the oldest has waited for GATHER, or there is enough of it.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                ready_at = self._since + (0.0 if self._urgent or self._closed else GATHER)
                if self._waiting and (now >= ready_at or self._enough()):
                    return self._group()
                if (self._closed and not self._waiting) or (until is not None and now >= until):
                    return []
                ends = [ready_at] if self._waiting else []
                ends += [] if until is None else [until]
                self._changed.wait(max(0.0, min(ends) - now) if ends else None)

    def _enough(self) -> bool:
        return len(self._waiting) >= self._bounds.group_operations

    def _group(self) -> list[Operation]:
        group: list[Operation] = []
        size = 0
        while self._waiting and len(group) < self._bounds.group_operations:
            more = self._waiting[0].size
            if group and size + more > self._bounds.group_bytes:
                break
            operation = self._waiting.popleft()
            self._urgent -= operation.urgent
            group.append(operation)
            size += more
        self._since = time.monotonic() if self._waiting else 0.0
        return group

    def done(self, operations: Sequence[Operation]) -> None:
        """The results of these are there: their room is free."""
        with self._changed:
            self._operations -= len(operations)
            self._bytes -= sum(operation.size + OPERATION_BYTES for operation in operations)

    def load(self) -> Load:
        """What waits and what is worked on."""
        with self._changed:
            return Load(self._operations, self._bytes)

    def close(self, why: Refused) -> None:
        """Take nothing more; what waits is still handed out."""
        with self._changed:
            self._closed = self._closed or why
            self._changed.notify()

    def empty(self, why: Refused) -> list[Operation]:
        """Take nothing until `open`, and hand out all that waits."""
        with self._changed:
            self._paused = why
            waiting = list(self._waiting)
            self._waiting.clear()
            self._urgent = 0
            return waiting

    def open(self) -> None:
        """Take operations again."""
        with self._changed:
            self._paused = None

    def wait(self, seconds: float) -> None:
        """Wait so long, or until it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed is not None, seconds)

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed is not None
