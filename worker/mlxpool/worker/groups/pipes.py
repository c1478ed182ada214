"""The pipes from rank 0 to the other ranks. The length of each message precedes the message."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import BinaryIO

from mlxpool.common.progress import Block
from mlxpool.worker.groups.messages import Again, Message, Pass, decoded, encoded

LENGTH_BYTES = 4
# Seconds that rank 0 waits after an error for the end of another rank, the likely cause. The pipe
# of an ending rank is closed before the rank's memory is freed; the rank's end is seen later.
BLAME_TIME = 2.0


class Orders:
    """Rank 0's end of the pipes to all other ranks. Used by the thread that computes.

    `block` is shared memory of rank 0 and the broker; the broker reads the number of sent messages
    in it.
    """

    def __init__(self, descriptors: Iterable[int], block: Block | None = None) -> None:
        self._descriptors = tuple(descriptors)
        self._block = block or Block.private()
        self._sent = 0
        self.passes = 0  # sent passes that have not ended
        self.broken = False  # whether a message did not reach all ranks

    def send(self, message: Message) -> None:
        """Sends a message; waits while a rank does not read.

        If a rank has ended, pauses for BLAME_TIME and raises OSError. During the pause, the thread
        that waits for the rank's end can end this process, by a signal if a signal ended the rank.
        After the error, the ranks no longer compute the same passes, see `broken`.
        """
        data = encoded(message)
        framed = len(data).to_bytes(LENGTH_BYTES, "little") + data
        if isinstance(message, Again) or (isinstance(message, Pass) and not message.builds):
            self.passes += 1
        try:
            for descriptor in self._descriptors:
                rest = memoryview(framed)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        except OSError:
            self.broken = True
            time.sleep(BLAME_TIME)
            raise
        self._sent += 1
        self._block.write("orders", self._sent)


class Inbox:
    """A rank's end of its pipe."""

    def __init__(self, descriptor: int) -> None:
        self._stream: BinaryIO = os.fdopen(descriptor, "rb")

    def take(self) -> Message | None:
        """Waits for the next message; None: rank 0 has ended, perhaps within a message."""
        head = self._stream.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return None
        size = int.from_bytes(head, "little")
        data = self._stream.read(size)
        return decoded(data) if data and len(data) == size else None

    def close(self) -> None:
        """Closes this end of the pipe."""
        self._stream.close()
