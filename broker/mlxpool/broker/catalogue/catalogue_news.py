"""The librarian's news for the broker's loop, and those who wait for its next look."""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mlxpool.broker.catalogue.catalogue import Librarian
from mlxpool.broker.interface import events as ev
from mlxpool.common.config.schema import ModelConfig, PoolConfig

PATIENCE = 1.5  # seconds for which `models` waits for a look
MOST = 1000  # who may wait at once; further ones get what is known


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody whose answer is due after a look, or at a time."""

    look: int
    until: float
    answer: Callable[[float], None]


class Library:
    """Lives in the broker's thread; only `_tell` is called by the librarian's."""

    def __init__(self, config: PoolConfig) -> None:
        self.news, self._bell = socket.socketpair()
        self.news.setblocking(False)
        self._bell.setblocking(False)
        self._events: deque[ev.Event] = deque()
        self._waiting: list[Waiting] = []
        self._librarian = Librarian(
            config,
            lambda *found: self._tell(ev.ModelFound(*found)),
            lambda name, about: self._tell(ev.ModelDescribed(name, about)),
            self._ring,
        )

    def open(self, *, look: bool) -> None:
        """Begin; with a `look` at all models, which is not waited for."""
        self._librarian.start()
        if look:
            self._librarian.look()

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """The settings name these models now."""
        self._librarian.reload(models)

    def after_look(self, answer: Callable[[float], None], now: float) -> None:
        """Answer when what is on the disk is known, at the latest after PATIENCE."""
        number = self._librarian.look()
        if number <= self._librarian.done or len(self._waiting) >= MOST:
            answer(now)
        else:
            self._waiting.append(Waiting(number, now + PATIENCE, answer))

    def take(self) -> Iterator[ev.Event]:
        """What the librarian has found since the last time."""
        try:
            self.news.recv(4096)
        except BlockingIOError:
            pass
        while self._events:
            yield self._events.popleft()

    def serve(self, now: float) -> None:
        """Answer those who need not wait any more; after `take`, so that they get its news."""
        done = self._librarian.done
        due = [one for one in self._waiting if one.look <= done or one.until <= now]
        self._waiting = [one for one in self._waiting if one not in due]
        for one in due:
            one.answer(now)

    def next_wake(self) -> float:
        """When somebody has waited long enough."""
        return min((one.until for one in self._waiting), default=math.inf)

    def close(self) -> None:
        """End the librarian and what it has started."""
        self._librarian.close()
        self.news.close()
        self._bell.close()

    def _tell(self, event: ev.Event) -> None:
        self._events.append(event)
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell.send(b"\0")
        except OSError:  # it rings already, or nobody is left
            pass
