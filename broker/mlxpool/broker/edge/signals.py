"""Signals to the broker's process: SIGTERM and SIGINT end it, SIGHUP reloads its settings."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlxpool.broker.edge.lifecycle import Lifecycle
from mlxpool.common.transport.waker import Waker

log = logging.getLogger("mlxpool.broker")

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """`waker` becomes readable after a signal. Made and used on the main thread."""

    def __init__(
        self, lifecycle: Lifecycle, kill_workers: Callable[[], None], reload: Callable[[], object]
    ) -> None:
        self.waker = Waker()
        self._lifecycle = lifecycle
        self._kill_workers = kill_workers
        self._reload = reload

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside of a `with`."""
        before = {number: signal.signal(number, self._on_signal) for number in HANDLED}
        # Workers inherit this: SIGUSR1 before one has a handler must not end it.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.waker.wake(number)

    def handle(self, now: float) -> None:
        """Act on the signals that came since the last call."""
        numbers = self.waker.drain()
        for number in set(numbers):
            log.info("signal", extra={"number": number})
        if signal.SIGHUP in numbers:
            self._reload()
        ends = sum(number in (signal.SIGTERM, signal.SIGINT) for number in numbers)
        if ends > 1 or (ends and self._lifecycle.stopping):
            self._kill_workers()  # the second signal: wait for nothing
        if ends:
            self._lifecycle.stop(now, final=False)  # the sender may start another broker
