"""Room in the memory of a worker for the processes that prepare its requests. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

ROOM_SECONDS = 2.0  # that the worker has to make room: it does so between two steps
MIN_CHANGE = 2**20  # bytes; smaller changes of what the processes take at rest are not told
SLACK_SHARE = 16  # of the limit: so much more room is asked for, since a lane may still grow


def _ignore(size: int) -> None:
    """Take no notice of a number of bytes."""


class WorkerMemory(Struct, frozen=True):
    """What the worker does about its own memory; any thread may call these.

    `reserve` keeps so many bytes of its budget for these processes. `make_room` gives up so many
    bytes of what it could compute again. `figures` are those of a heartbeat, see MemoryFigures.
    """

    reserve: Callable[[int], object] = _ignore
    make_room: Callable[[int], object] = _ignore
    figures: Callable[[], Mapping[str, int]] = dict


def releasable(figures: Mapping[str, int]) -> int:
    """Bytes that the worker can give up: prefixes, encoded images and freed buffers."""
    return figures.get("prefix", 0) + figures.get("cache", 0)


class Room:
    """Asks the worker for room, and says when it does not get it. Used by one thread.

    Times are monotonic seconds.
    """

    def __init__(self, limit: int, worker: WorkerMemory) -> None:
        """`limit`: bytes of the worker and these processes together; 0: no limit."""
        self.limit = limit
        self.worker = worker
        self._reserved = 0
        self._asked = 0  # bytes over the limit for which room was asked
        self._until = 0.0  # when it has to be there

    def rest(self, memory: int) -> None:
        """The processes take so many bytes without a job: they are part of the budget."""
        if abs(memory - self._reserved) >= MIN_CHANGE:
            self._reserved = memory
            self.worker.reserve(memory)

    def lacks(self, total: int, now: float) -> bool:
        """Whether all together take more than the limit, and the worker makes no room for it."""
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
