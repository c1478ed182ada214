"""Makes room in a worker's memory for the processes that prepare its requests. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

ROOM_SECONDS = 2.0  # the most seconds that the worker needs to make room, between two steps
MIN_CHANGE = 2**20  # bytes; smaller changes of the memory of idle processes are not reported
SLACK_SHARE = 16  # 1/16 of the limit is requested in addition, because a lane may still grow


def _ignore(size: int) -> None:
    """Does nothing with a number of bytes."""


class WorkerMemory(Struct, frozen=True):
    """The worker's functions that reserve and free its memory; any thread may call them.

    `reserve(bytes)` reserves a part of the worker's memory budget for the processes that prepare
    requests. `make_room(bytes)` frees memory whose contents the worker can compute again.
    `figures()` returns the memory figures of a heartbeat, see MemoryFigures.
    """

    reserve: Callable[[int], object] = _ignore
    make_room: Callable[[int], object] = _ignore
    figures: Callable[[], Mapping[str, int]] = dict


def releasable(figures: Mapping[str, int]) -> int:
    """Returns the bytes that the worker can free: prefixes, encoded images, freed buffers."""
    return figures.get("prefix", 0) + figures.get("cache", 0)


class Room:
    """Keeps a worker and its preparation processes within a memory limit.

    Requests memory from the worker, and detects when the worker has not freed it in time. Used by
    one thread. Times are monotonic seconds.
    """

    def __init__(self, limit: int, worker: WorkerMemory) -> None:
        """`limit`: bytes of the worker and its preparation processes together; 0: no limit."""
        self.limit = limit
        self.worker = worker
        self._reserved = 0
        self._asked = 0  # bytes over the limit that were requested
        self._until = 0.0  # when the requested bytes have to be free

    def rest(self, memory: int) -> None:
        """Reserves memory of the worker: `memory` bytes, which idle preparation processes use."""
        if abs(memory - self._reserved) >= MIN_CHANGE:
            self._reserved = memory
            self.worker.reserve(memory)

    def lacks(self, total: int, now: float) -> bool:
        """Returns whether `total` bytes exceed the limit and the worker cannot free the excess.

        The first call with an excess that the worker can free requests this from the worker, and
        returns False. If the excess remains for ROOM_SECONDS, a later call returns True.
        """
        over = total - self.limit
        if not self.limit or over <= 0:
            self._asked = 0
            return False
        if over > releasable(self.worker.figures()) or (self._asked and now >= self._until):
            self._asked = 0
            return True
        if not self._asked:
            self._until = now + ROOM_SECONDS
        if over > self._asked:
            self.worker.make_room(over - self._asked + self.limit // SLACK_SHARE)
            self._asked = over
        return False
