"""The queue of requests that wait for preparation, fair between owners. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Set

from msgspec import Struct

from mlxpool.worker.preparation.jobs import Job


class Waiting(Struct, frozen=True):
    """A waiting preparation. `size` in bytes; `deadline` in monotonic seconds."""

    key: Hashable
    owner: str
    size: int
    job: Job
    deadline: float = math.inf


class FairQueue:
    """A queue of preparations: round-robin over owners, oldest first."""

    def __init__(self) -> None:
        self._of_owner: OrderedDict[str, OrderedDict[Hashable, Waiting]] = OrderedDict()
        self._by_key: dict[Hashable, Waiting] = {}
        self.bytes = 0  # bytes of all waiting preparations

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, waiting: Waiting) -> None:
        self._of_owner.setdefault(waiting.owner, OrderedDict())[waiting.key] = waiting
        self._by_key[waiting.key] = waiting
        self.bytes += waiting.size

    def take(self, skipped: Set[str] = frozenset()) -> Waiting | None:
        """Removes and returns the next preparation of an owner that is not skipped, or None.

        All other owners then have their turn before this owner.
        """
        owner = next((owner for owner in self._of_owner if owner not in skipped), None)
        if owner is None:
            return None
        own = self._of_owner.pop(owner)
        key, waiting = own.popitem(last=False)
        if own:
            self._of_owner[owner] = own
        del self._by_key[key]
        self.bytes -= waiting.size
        return waiting

    def remove(self, key: Hashable) -> Waiting | None:
        """Removes a preparation and returns it; None if it is not in the queue."""
        waiting = self._by_key.pop(key, None)
        if waiting is not None:
            own = self._of_owner[waiting.owner]
            del own[key]
            if not own:
                del self._of_owner[waiting.owner]
            self.bytes -= waiting.size
        return waiting

    def expired(self, now: float) -> list[Waiting]:
        """Removes and returns the preparations whose deadline has passed."""
        late = [waiting.key for waiting in self._by_key.values() if now >= waiting.deadline]
        return [waiting for key in late if (waiting := self.remove(key)) is not None]

    def next_deadline(self) -> float:
        """Returns the earliest deadline; infinity without a deadline."""
        return min((waiting.deadline for waiting in self._by_key.values()), default=math.inf)

    def clear(self) -> None:
        self._of_owner.clear()
        self._by_key.clear()
        self.bytes = 0
