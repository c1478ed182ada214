"""The queue of messages from other threads to the main thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlxpool.common.transport.waker import Waker
from mlxpool.worker.compute.messages import Outbound
from mlxpool.worker.process.prepare import Answer, Prepared

Mail = Outbound | Prepared | Answer


class Mailbox:
    """Unbounded: the compute thread bounds its own share, see compute/outbox.py."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self._mail: deque[Mail] = deque()

    def post(self, mail: Mail) -> None:
        """Enqueue and wake the main thread. Any thread may call it."""
        self._mail.append(mail)
        self.waker.wake()

    def take(self) -> Iterator[Mail]:
        """Dequeue what is there, in order."""
        while self._mail:
            yield self._mail.popleft()
