"""The cancels that operators ask for on the status page, on their way to the broker's loop.

A thread of the HTTP server waits for the answer; a cancel that it no longer waits for is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from mlxpool.broker.http.latest_snapshot import MAX_WAIT, Unavailable
from mlxpool.common.closing import Closing
from mlxpool.common.transport.waker import Waker

Fate = dict[str, Any]  # what became of the request, as `mlxpool cancel --json` prints it
Cancel = Callable[[str, float], Fate]  # of the request whose id begins so; raises PoolError


class CancelQueue(Closing):
    """`waker` is readable when a cancel waits for the loop."""

    def __init__(self) -> None:
        self.max_wait = MAX_WAIT
        self.waker = Waker()
        self._waiting: SimpleQueue[tuple[str, Future[Fate]]] = SimpleQueue()
        self._closed = False

    def ask(self, prefix: str) -> Fate:
        """Cancel the request whose id begins with these hexadecimal digits.

        Raises PoolError if there is not one such request, Unavailable if the loop does not answer;
        then nothing is cancelled.
        """
        future: Future[Fate] = Future()
        self._waiting.put((prefix, future))
        self.waker.wake()
        if self._closed:
            self._refuse_all()
        try:
            return future.result(self.max_wait)
        except TimeoutError:
            if not future.cancel():  # the loop has begun: it does not wait for anything
                return future.result()
            raise Unavailable(
                f"the broker's loop has not answered for {self.max_wait:g} s"
            ) from None

    def serve(self, cancel: Cancel, now: float) -> None:
        """Perform what waits. Called by the loop when it was woken."""
        self.waker.drain()
        for prefix, future in self._take():
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(cancel(prefix, now))
                except Exception as error:  # it is raised in the thread that waits
                    future.set_exception(error)

    def close(self) -> None:
        """Threads that wait get Unavailable at once."""
        self._closed = True
        self._refuse_all()
        self.waker.close()

    def _refuse_all(self) -> None:
        for _, future in self._take():
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable("the broker is ending"))

    def _take(self) -> list[tuple[str, Future[Fate]]]:
        taken = []
        while True:
            try:
                taken.append(self._waiting.get_nowait())
            except Empty:
                return taken
