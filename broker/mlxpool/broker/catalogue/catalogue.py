"""The scanner's results as events for the broker's loop, and the answers that wait for a scan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

from msgspec import Struct

from mlxpool.broker.catalogue.scanner import Scanner
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.transport.waker import Waker

MAX_WAIT = 1.5  # seconds for which the answer to `models` waits for a scan
MAX_WAITING = 1000  # answers that may wait; further ones are given at once

MakeScanner = Callable[..., Scanner]  # the arguments are those of Scanner


class Waiting(Struct, frozen=True):
    """An answer that is due after a scan, or at a time."""

    scan: int
    until: float
    answer: Callable[[float], None]


class Catalogue(Closing):
    """Used on the broker's thread; only `_enqueue` and the waker are called by the scanner's.

    `waker` becomes readable when there are results.
    """

    def __init__(
        self, config: PoolConfig, perform: Perform, make_scanner: MakeScanner = Scanner
    ) -> None:
        self.waker = Waker()
        self._perform = perform
        self._events: deque[ev.Event] = deque()
        self._waiting: list[Waiting] = []
        self._scanner = make_scanner(
            config,
            lambda *found: self._enqueue(ev.ModelFound(*found)),
            lambda name, about: self._enqueue(ev.ModelDescribed(name, about)),
            self.waker.wake,
        )

    def start(self, *, scan: bool) -> None:
        """Start the thread; with `scan` it scans all models at once."""
        self._scanner.start()
        if scan:
            self._scanner.request_scan()

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """The settings name these models now."""
        self._scanner.reload(models)

    def after_scan(self, answer: Callable[[float], None], now: float) -> None:
        """Call `answer` with the time when a fresh scan is done, at the latest after MAX_WAIT."""
        scan = self._scanner.request_scan()
        if scan <= self._scanner.done or len(self._waiting) >= MAX_WAITING:
            answer(now)
        else:
            self._waiting.append(Waiting(scan, now + MAX_WAIT, answer))

    def on_results(self, now: float) -> None:
        """Have the core handle what the scanner has found since the last call."""
        self.waker.drain()
        while self._events:
            self._perform(self._events.popleft(), now)

    def answer_waiting(self, now: float) -> None:
        """Give the answers that need not wait any more, after the results they waited for."""
        if not self._waiting:
            return
        done = self._scanner.done
        self.on_results(now)
        due = [one for one in self._waiting if one.scan <= done or one.until <= now]
        self._waiting = [one for one in self._waiting if one not in due]
        for one in due:
            one.answer(now)

    def next_wake(self) -> float:
        """When an answer has waited for MAX_WAIT."""
        return min((one.until for one in self._waiting), default=math.inf)

    def close(self) -> None:
        """End the scanner and its process."""
        self._scanner.close()
        self.waker.close()

    def _enqueue(self, event: ev.Event) -> None:
        self._events.append(event)
        self.waker.wake()
