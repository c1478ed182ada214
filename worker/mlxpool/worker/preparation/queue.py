"""Preparations that wait: fair between owners, short ones apart from long ones. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Set

from msgspec import Struct

from mlxpool.worker.preparation.jobs import Job


class Waiting(Struct, frozen=True):
    """A preparation that waits. `size` in bytes; `deadline` in monotonic seconds."""

    key: Hashable
    owner: str
    size: int
    job: Job
    deadline: float = math.inf


class FairQueue:
    """Gives the oldest preparation of each owner in turn."""

    def __init__(self) -> None:
        self._of_owner: OrderedDict[str, OrderedDict[Hashable, Waiting]] = OrderedDict()
        self._by_key: dict[Hashable, Waiting] = {}
        self.bytes = 0  # that wait

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, waiting: Waiting) -> None:
        self._of_owner.setdefault(waiting.owner, OrderedDict())[waiting.key] = waiting
        self._by_key[waiting.key] = waiting
        self.bytes += waiting.size

    def take(self, skipped: Set[str] = frozenset()) -> Waiting | None:
        """Remove and return the next one of an owner who is not skipped; None if there is none.

        The owner is the last in turn then.
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
        """Remove one; returns it, None if it does not wait here."""
        waiting = self._by_key.pop(key, None)
        if waiting is not None:
            own = self._of_owner[waiting.owner]
            del own[key]
            if not own:
                del self._of_owner[waiting.owner]
            self.bytes -= waiting.size
        return waiting

    def expired(self, now: float) -> list[Waiting]:
        """Remove and return those whose deadline has passed."""
        late = [one.key for one in self._by_key.values() if now >= one.deadline]
        return [one for key in late if (one := self.remove(key)) is not None]

    def next_deadline(self) -> float:
        """Returns the earliest deadline; infinity without one."""
        return min((one.deadline for one in self._by_key.values()), default=math.inf)

    def clear(self) -> None:
        self._of_owner.clear()
        self._by_key.clear()
        self.bytes = 0
