"""The broker's loop: waits for readable sources and due tasks, and calls their handlers.

Each turn (one iteration) calls the handlers of readable sources in the order of their priority,
then all tasks in the order of their addition.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import zmq
from msgspec import Struct

log = logging.getLogger("mlxpool.broker")

MAX_WAIT = 60.0  # most seconds that a turn waits
LAG_WINDOW = 15.0  # seconds
LATE = 1.0  # a turn's delay above this number of seconds is reported

Handler = Callable[[float], object]  # its argument is the time in seconds


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


class Priority(IntEnum):
    """The order of sources within one turn."""

    LISTENER = 0
    WORKERS = 1  # before clients, so that tokens are sent before new requests are read
    WORKER_EXITS = 2
    CLIENTS = 3
    OPERATIONS = 4


class Source(Struct, frozen=True):
    priority: Priority
    handle: Handler


class Task(Struct, frozen=True):
    """A function called in every turn. `next_wake` returns the latest time for its next call."""

    run: Handler
    next_wake: Callable[[], float]


class LoopLag:
    """The longest recent duration or delay of the loop's turns, in seconds."""

    __slots__ = ("_current", "_previous", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._current = self._previous = 0.0

    def record(self, seconds: float, now: float) -> None:
        """Adds the duration or the delay of a turn, in seconds."""
        if now - self._since >= LAG_WINDOW:
            self._roll(now)
        if seconds > self._current:
            self._current = seconds

    def worst(self, now: float) -> float:
        """Returns the longest recent duration or delay of a turn, in seconds.

        Turns are recent if they ended in the present period of LAG_WINDOW seconds or in the period
        before.
        """
        if now - self._since >= LAG_WINDOW:
            self._roll(now)
        return max(self._current, self._previous)

    def _roll(self, now: float) -> None:
        self._previous = self._current if now - self._since < 2 * LAG_WINDOW else 0.0
        self._since, self._current = now, 0.0


class Loop:
    """The broker's event loop, used by one thread.

    `on_late(seconds, now)` is called if a turn begins more than LATE seconds after it was due.
    `seconds` is the delay.
    """

    def __init__(self, lag: LoopLag, on_late: Callable[[float, float], None]) -> None:
        self._lag = lag
        self._on_late = on_late
        self._poller = zmq.Poller()
        self._sources: dict[object, Source] = {}  # by the key that the poller returns
        self._tasks: list[Task] = []
        self._turned_at = time.monotonic()

    def add_source(
        self,
        source: zmq.Socket[bytes] | HasDescriptor | int,
        handle: Handler,
        priority: Priority = Priority.OPERATIONS,
    ) -> None:
        """Calls `handle` in each turn in which this socket or descriptor is readable."""
        key = _key(source)
        self._poller.register(key, zmq.POLLIN)
        self._sources[key] = Source(priority, handle)

    def remove_source(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        del self._sources[descriptor]

    def add_task(self, run: Handler, next_wake: Callable[[], float] = lambda: math.inf) -> None:
        self._tasks.append(Task(run, next_wake))

    def turn(self) -> None:
        """Waits until a source is readable or a task is due, then calls their handlers."""
        timeout_ms = self._timeout_ms(time.monotonic())
        readable = self._poller.poll(timeout_ms)
        now = time.monotonic()
        late = now - self._turned_at - timeout_ms / 1000
        self._turned_at = now
        if late > LATE:
            log.warning("the broker was late", extra={"seconds": round(late, 3)})
            self._lag.record(late, now)
            self._on_late(late, now)
        ready = [self._sources[key] for key, _ in readable]
        for source in sorted(ready, key=lambda source: source.priority):
            source.handle(now)
        for task in self._tasks:
            task.run(now)
        self._lag.record(time.monotonic() - now, now)

    def _timeout_ms(self, now: float) -> int:
        wake = min((task.next_wake() for task in self._tasks), default=math.inf)
        return max(0, math.ceil((min(wake, now + MAX_WAIT) - now) * 1000))


def _key(source: zmq.Socket[bytes] | HasDescriptor | int) -> object:
    """Returns the poller's key of a source: a ZeroMQ socket itself, else a descriptor."""
    if isinstance(source, zmq.Socket | int):
        return source
    return source.fileno()
