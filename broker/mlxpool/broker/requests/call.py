"""Calls of clients, each of which a worker answers once, and the queue of calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.protocol.from_client import ModelCall


class Call(Struct, eq=False):
    """An open call. `epoch`: the epoch of its worker; 0 while the call waits for a worker.

    `losses` counts the lost workers that had the call. `charge` is the call's blame for lost
    workers, see blame.py. `alone`: a worker computes the call without other calls. The answer goes
    to `link`, with the number `attempt`. Times are on the core's clock.
    """

    id: bytes
    model: str
    link: int
    attempt: int
    message: ModelCall
    accepted_at: float = 0.0
    epoch: int = 0
    losses: int = 0
    charge: float = 0.0
    alone: bool = False

    @property
    def size(self) -> int:
        """Bytes of the call's blobs."""
        return sum(map(len, self.message.blobs()))

    def same_as(self, message: ModelCall) -> bool:
        """Returns whether a message with this id is an equal call; its deadline may differ."""
        return message == replace(self.message, deadline_ms=message.deadline_ms)

    def for_worker(self) -> ModelCall:
        """Returns the message for a worker. A call that may have ended a worker runs alone."""
        return replace(self.message, deadline_ms=None, alone=self.alone or self.charge > 0)


class CallQueue:
    """The calls that wait for a worker of a model. Owners take turns."""

    def __init__(self) -> None:
        self._of_owner: OrderedDict[str, OrderedDict[bytes, Call]] = OrderedDict()
        self._count = 0
        self.bytes = 0  # bytes of the blobs of all calls

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Call]:
        return (call for own in list(self._of_owner.values()) for call in list(own.values()))

    def add(self, call: Call) -> None:
        self._of_owner.setdefault(call.message.owner, OrderedDict())[call.id] = call
        self._count += 1
        self.bytes += call.size

    def add_first(self, call: Call) -> None:
        """Adds a call that was in a worker before, as the next call of its owner."""
        self.add(call)
        self._of_owner[call.message.owner].move_to_end(call.id, last=False)

    def take(self) -> Call:
        """Removes and returns the oldest call of the owner whose turn it is.

        The queue must not be empty.
        """
        owner, own = self._of_owner.popitem(last=False)
        _, call = own.popitem(last=False)
        if own:
            self._of_owner[owner] = own
        self._left(call)
        return call

    def remove(self, call: Call) -> None:
        own = self._of_owner[call.message.owner]
        del own[call.id]
        if not own:
            del self._of_owner[call.message.owner]
        self._left(call)

    def _left(self, call: Call) -> None:
        self._count -= 1
        self.bytes -= call.size
