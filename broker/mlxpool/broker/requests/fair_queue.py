"""What waits for one model: deficit round-robin between owners inside each of three priorities.

A request that was at work already (its worker is lost) comes back to the front, in the order of its
first arrival, whatever its owner's share. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator

from mlxpool.broker.requests.payload import Payload
from mlxpool.broker.requests.request import Request

PRIORITIES = 3
QUANTUM = 512  # tokens an owner may start for each turn of the round
MAX_COST = 64 * 1024  # tokens one request counts for at most
OPEN_ENDED = 512  # tokens that a request without max_tokens counts for
BYTES_PER_TOKEN = 4  # of a prompt, roughly; only shares depend on it


def cost(request: Request) -> int:
    """What a request counts for in its owner's share: tokens to read and to write."""
    wanted = request.payload.options.max_tokens
    write = wanted if wanted > 0 else OPEN_ENDED
    return min(MAX_COST, tokens_of(request.payload) + write)


def tokens_of(payload: Payload) -> int:
    """About how many tokens its prompt has: nothing here can count those of a text."""
    return 1 + payload.size // BYTES_PER_TOKEN


class Lane:
    """One priority: the owner whose turn it is stands first."""

    def __init__(self) -> None:
        self.owners: OrderedDict[str, deque[Request]] = OrderedDict()
        self.deficits: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self.owners.setdefault(request.owner, deque()).append(request)
        self.deficits.setdefault(request.owner, 0)

    def head(self) -> Request | None:
        """Whose turn it is; the same until it is taken or something changes before it."""
        if not self.owners:
            return None
        while True:
            owner, waiting = next(iter(self.owners.items()))
            if self.deficits[owner] >= cost(waiting[0]):
                return waiting[0]
            self.deficits[owner] += QUANTUM
            self.owners.move_to_end(owner)

    def take(self, request: Request) -> None:
        """Remove the head: its owner pays for it."""
        self.deficits[request.owner] -= cost(request)
        self.drop(request)

    def drop(self, request: Request) -> None:
        waiting = self.owners[request.owner]
        waiting.remove(request)
        if not waiting:  # who waits for nothing saves nothing
            del self.owners[request.owner], self.deficits[request.owner]


class Queue:
    """Owns no request; a request is in it exactly while it is QUEUED."""

    def __init__(self) -> None:
        self.lanes = tuple(Lane() for _ in range(PRIORITIES))
        self.returning: list[Request] = []
        self.count = 0  # fresh and returning
        self.bytes = 0  # of prompts

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        """In no promised order."""
        yield from self.returning
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from waiting

    def __contains__(self, request: Request) -> bool:
        return any(each is request for each in self)

    def add(self, request: Request) -> None:
        """A first sending."""
        self.lanes[request.payload.priority].add(request)
        self._count(request, 1)

    def add_back(self, request: Request) -> None:
        """It was at work before: nobody who came later goes first."""
        insort(self.returning, request, key=lambda r: (-r.payload.priority, r.place))
        self._count(request, 1)

    def replace(self, before: Request, request: Request) -> None:
        """The same request, sent again while it waited: it keeps its place."""
        if before in self.returning:
            self.returning[self.returning.index(before)] = request
        else:
            waiting = self.lanes[before.payload.priority].owners[before.owner]
            waiting[waiting.index(before)] = request
        self.bytes += request.payload.size - before.payload.size

    def head(self) -> Request | None:
        """The next of the fresh ones: the highest priority first."""
        for lane in reversed(self.lanes):
            request = lane.head()
            if request is not None:
                return request
        return None

    def take(self, request: Request) -> None:
        """Remove a request that is given to a worker."""
        lane = self.lanes[request.payload.priority]
        if lane.head() is request:
            lane.take(request)
            self._count(request, -1)
        else:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Remove a request that ends or is replaced."""
        if request in self.returning:
            self.returning.remove(request)
        else:
            self.lanes[request.payload.priority].drop(request)
        self._count(request, -1)

    def before(self, request: Request) -> int:
        """How many wait that may go first: a bound, for shares decide."""
        if request in self.returning:
            return self.returning.index(request)
        ranks = [
            len(waiting)
            for number, lane in enumerate(self.lanes)
            for waiting in lane.owners.values()
            if number >= request.payload.priority
        ]
        return len(self.returning) + sum(ranks) - 1

    def _count(self, request: Request, sign: int) -> None:
        self.count += sign
        self.bytes += sign * request.payload.size
