"""The exchange of data between the broker's loop and the threads of the HTTP server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.closing import Closing
from mlxpool.common.transport.waker import Waker

# ---- loop queue ----------------------------------------------------------------------------------
# A queue of operators' commands from the status page to the broker's loop. A thread of the HTTP
# server waits for the answer. If the thread gives up, its command is dropped, unless the loop has
# begun the command.


Fate = dict[str, Any]  # an answer: the JSON that the command prints with --json
Asked = TypeVar("Asked")


class LoopQueue(Closing, Generic[Asked]):
    """A queue of operators' commands. `waker` is readable while a command waits for the loop."""

    def __init__(self) -> None:
        self.max_wait = MAX_WAIT
        self.waker = Waker()
        self._waiting: SimpleQueue[tuple[Asked, Future[Fate]]] = SimpleQueue()
        self._closed = False

    def ask(self, command: Asked) -> Fate:
        """Passes a command to the loop, and returns the loop's answer.

        Raises the loop's exception, or Unavailable without an answer.
        """
        future: Future[Fate] = Future()
        self._waiting.put((command, future))
        self.waker.wake()
        if self._closed:
            self._refuse_all()
        try:
            return future.result(self.max_wait)
        except TimeoutError:
            if future.cancel():
                what = f"the broker's loop has not answered for {self.max_wait:g} s"
                raise Unavailable(what) from None
        try:  # the loop has begun the command, which may wait for a disk
            return future.result(self.max_wait)
        except TimeoutError:
            waited = 2 * self.max_wait
            raise Unavailable(f"there is no answer after {waited:g} s; look again") from None

    def serve(self, answer: Callable[[Asked, float], Fate], now: float) -> None:
        """Answers all waiting commands. The loop calls it when `waker` is readable."""

        def begin(command: Asked, future: Future[Fate], now: float) -> None:
            future.set_result(answer(command, now))

        self.begin(begin, now)

    def begin(self, begin: Callable[[Asked, Future[Fate], float], None], now: float) -> None:
        """Calls `begin` for each waiting command, with the future for the command's result.

        `begin` sets the result now or later.
        """
        self.waker.drain()
        for command, future in self._take():
            if future.set_running_or_notify_cancel():
                try:
                    begin(command, future, now)
                except Exception as error:  # the waiting thread raises it
                    future.set_exception(error)

    def close(self) -> None:
        """Closes the queue. Waiting threads get Unavailable immediately."""
        self._closed = True
        self._refuse_all()
        self.waker.close()

    def _refuse_all(self) -> None:
        for _, future in self._take():
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable("the broker is ending"))

    def _take(self) -> list[tuple[Asked, Future[Fate]]]:
        taken = []
        while True:
            try:
                taken.append(self._waiting.get_nowait())
            except Empty:
                return taken


# ---- latest snapshot -----------------------------------------------------------------------------
# The newest snapshot, which the loop gives to the threads of the HTTP server. If the snapshot is
# too old, a thread wakes the loop. The loop stores a new snapshot in its next turn, and never waits
# for these threads.


FRESH = 0.25  # seconds for which a snapshot is reused, to bound the loop's work
MAX_WAIT = 2.0  # seconds after which a loop without an answer counts as stuck


class Unavailable(Exception):
    """Raised if the loop does not answer within MAX_WAIT seconds, or has ended."""


class LatestSnapshot(Closing):
    """The newest snapshot. `waker` is readable while a thread waits for a newer snapshot."""

    def __init__(self) -> None:
        self.fresh, self.max_wait = FRESH, MAX_WAIT
        self.waker = Waker()
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._closed = False

    def put(self, snapshot: Snapshot) -> None:
        """Sets the snapshot. The loop calls it when `waker` is readable."""
        self.waker.drain()
        with self._changed:
            self._snapshot, self._at = snapshot, monotonic()
            self._changed.notify_all()

    def get(self) -> Snapshot:
        """Returns a snapshot at most `fresh` seconds old; waits for a new one if necessary.

        Raises Unavailable if the loop does not answer in time, or has ended.
        """
        called_at = monotonic()
        with self._changed:
            if self._snapshot is None or called_at - self._at > self.fresh:
                self.waker.wake()
                fresh = self._changed.wait_for(
                    lambda: self._closed or self._at >= called_at, self.max_wait
                )
                if self._closed:
                    raise Unavailable("the broker is ending")
                if not fresh:
                    raise Unavailable(f"the broker's loop has not answered for {self.max_wait:g} s")
            assert self._snapshot is not None
            return self._snapshot

    def close(self) -> None:
        """Closes the exchange. Waiting threads get Unavailable immediately."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.waker.close()
