"""The requests that wait for one model: deficit round-robin between owners in each of 3 priorities.

Of the owners of a priority those with the fewest places in workers go first. A request that a
worker had before (it was resumed) goes to the front, in the order of first arrival, whatever its
owner's share; one that gave up its place for another owner is the first of its owner's. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from mlxpool.broker.requests.request import IDLE_RANK, RANKS, Request
from mlxpool.broker.routing.route_cost import MAX_REQUESTS
from mlxpool.common.protocol.from_client import MAX_PRIORITY, Generate
from mlxpool.common.protocol.images import TOKENS_PER_IMAGE

QUANTUM = 512  # tokens that an owner's deficit grows by in each round
MAX_COST = 64 * 1024  # tokens that one request costs at most
# That a request is taken to generate at most: it has its place for no longer than a turn while an
# owner without any waits, see place_shares.py.
MAX_DECODE_COST = 512
BYTES_PER_TOKEN = 4  # of a prompt, roughly; only shares depend on it


NO_PLACES: Mapping[str, int] = {}


def cost(request: Request) -> int:
    """What a request takes of its owner's share: tokens to prefill and to decode."""
    wanted = request.message.options.max_tokens
    left = max(1, wanted - request.run.taken) if wanted > 0 else MAX_DECODE_COST
    return min(MAX_COST, prompt_tokens(request.message) + min(MAX_DECODE_COST, left))


def prompt_tokens(message: Generate) -> int:
    """About how many tokens its prompt has: the broker has no tokenizer."""
    images = TOKENS_PER_IMAGE * len(message.prompt.images)
    return 1 + message.text_size // BYTES_PER_TOKEN + images


class Lane:
    """The requests of one priority. The owner whose turn it is stands first.

    Any of them is removed in constant time: thousands of a client may end between those of others.
    """

    def __init__(self) -> None:
        self.owners: OrderedDict[str, OrderedDict[bytes, Request]] = OrderedDict()
        self.deficits: dict[str, int] = {}
        self.count = 0  # requests of all owners
        self.texts = 0  # requests without images

    def add(self, request: Request) -> None:
        self.owners.setdefault(request.owner, OrderedDict())[request.id] = request
        self.deficits.setdefault(request.owner, 0)
        self.count += 1
        self.texts += not request.message.prompt.images

    def add_first(self, request: Request) -> None:
        """Add a request that gave up its place: the first of its owner, which is the last one."""
        self.add(request)
        self.owners[request.owner].move_to_end(request.id, last=False)
        self.owners.move_to_end(request.owner)

    def head(
        self, places: Mapping[str, int] = NO_PLACES, *, without_images: bool = False
    ) -> Request | None:
        """The request whose turn it is; the same until the lane or `places` changes.

        `places` are those that owners have in workers. `without_images`: that of the requests
        without images.
        """
        if not (self.texts if without_images else self.owners):
            return None
        least = self._fewest(places, without_images=without_images) if places else None
        while True:
            owner, waiting = next(iter(self.owners.items()))
            first = _first_text(waiting.values()) if without_images else _first(waiting)
            if first is not None and (least is None or places.get(owner, 0) == least):
                if self.deficits[owner] >= cost(first):
                    return first
                self.deficits[owner] += QUANTUM
            self.owners.move_to_end(owner)

    def _fewest(self, places: Mapping[str, int], *, without_images: bool) -> int | None:
        """The fewest places that an owner with such requests has; None: all have their turn."""
        if len(self.owners) == 1:
            return None
        owners = (
            owner
            for owner, waiting in self.owners.items()
            if not without_images or _first_text(waiting.values()) is not None
        )
        return min(places.get(owner, 0) for owner in owners)

    def heads(self, places: Mapping[str, int] = NO_PLACES) -> list[Request]:
        """The first requests of the owner whose turn it is, at most MAX_REQUESTS."""
        if self.head(places) is None:
            return []
        return list(islice(next(iter(self.owners.values())).values(), MAX_REQUESTS))

    def take(self, request: Request) -> None:
        """Remove a request that is given to a worker: its owner pays for it."""
        self.deficits[request.owner] -= cost(request)
        self.drop(request)

    def drop(self, request: Request) -> None:
        waiting = self.owners[request.owner]
        del waiting[request.id]
        self.count -= 1
        self.texts -= not request.message.prompt.images
        if not waiting:  # an owner without waiting requests keeps no deficit
            del self.owners[request.owner], self.deficits[request.owner]


def _first(waiting: OrderedDict[bytes, Request]) -> Request:
    return next(iter(waiting.values()))


def _first_text(waiting: Iterable[Request]) -> Request | None:
    return next((request for request in waiting if not request.message.prompt.images), None)


def _turn(request: Request) -> tuple[int, int]:
    """The order of resumed requests; no two have the same."""
    return -request.message.priority, request.arrival


class Queue:
    """Invariant: a request is in it exactly while it is QUEUED."""

    def __init__(self) -> None:
        self.lanes = tuple(Lane() for _ in range(MAX_PRIORITY + 1))
        self.resumed: list[Request] = []  # a worker had them before
        # Those that gave up their places for other owners, which wait among the fresh ones.
        self.preempted: dict[bytes, Request] = {}
        # Of the resumed and the preempted, see `unchecked_resumed`.
        self.unchecked: dict[bytes, Request] = {}
        self._epochs: tuple[int, ...] = ()  # of the workers that the others were compared with
        self.count = 0  # fresh and resumed
        self.ranked = [0] * RANKS  # how many of each rank
        self.charged = 0  # those that bound who runs beside them, see Run.batch_bound
        self.bytes = 0  # of prompts

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        """In no promised order."""
        yield from self.resumed
        yield from self.in_turn()

    def __contains__(self, request: Request) -> bool:
        return any(each is request for each in self)

    def add(self, request: Request) -> None:
        """Queue a first sending."""
        self.lanes[request.message.priority].add(request)
        self._count(request, 1)

    def add_resumed(self, request: Request) -> None:
        """Queue a request that was at work before: none that came later goes first."""
        insort(self.resumed, request, key=_turn)
        self.unchecked[request.id] = request
        self._count(request, 1)

    def add_preempted(self, request: Request) -> None:
        """Queue a request that gave up its place for another owner: its owner's first.

        An idle job is the last one.
        """
        lane = self.lanes[request.message.priority]
        (lane.add if request.rank == IDLE_RANK else lane.add_first)(request)
        self.preempted[request.id] = self.unchecked[request.id] = request
        self._count(request, 1)

    def sent_again(self, request: Request, more_bytes: int) -> None:
        """A request in the queue was sent again and holds so many more bytes."""
        self.bytes += more_bytes
        if request.id in self.preempted or self._place_among_resumed(request) is not None:
            self.unchecked[request.id] = request  # it may have come with facts

    @property
    def begun(self) -> bool:
        """Whether requests wait that a worker had before."""
        return bool(self.resumed or self.preempted)

    def unchecked_resumed(self, epochs: tuple[int, ...]) -> list[Request]:
        """The begun requests that nobody has compared with the workers of these epochs.

        The next call with the same epochs returns only those that were added since.
        """
        if epochs == self._epochs:
            found = list(self.unchecked.values())
        else:
            found = [*self.resumed, *self.preempted.values()]
        self._epochs = epochs
        self.unchecked.clear()
        return found

    def head(
        self, places: Mapping[str, int] = NO_PLACES, *, without_images: bool = False
    ) -> Request | None:
        """The next of the fresh ones, or of those without images: the highest priority first.

        `places`: of each owner in workers.
        """
        for lane in reversed(self.lanes):
            request = lane.head(places, without_images=without_images)
            if request is not None:
                return request
        return None

    def heads(self, places: Mapping[str, int] = NO_PLACES) -> list[Request]:
        """Those of the fresh ones of which one is next: of the highest priority, of one owner."""
        lane = next((lane for lane in reversed(self.lanes) if lane.owners), None)
        return [] if lane is None else lane.heads(places)

    def owners(self) -> set[str]:
        """The owners of the requests."""
        fresh = (owner for lane in self.lanes for owner in lane.owners)
        return {*fresh, *(request.owner for request in self.resumed)}

    def first_of_owners(self, most: int) -> Iterator[Request]:
        """The resumed requests, then the first `most` of each owner, the highest priority first."""
        yield from self.resumed
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from islice(waiting.values(), most)

    def of_owner(self, owner: str) -> Iterator[Request]:
        """An owner's requests: the resumed ones, then the others, the highest priority first."""
        yield from (request for request in self.resumed if request.owner == owner)
        for lane in reversed(self.lanes):
            yield from lane.owners.get(owner, {}).values()

    def in_turn(self) -> Iterator[Request]:
        """The fresh ones: the highest priority first, then the owner whose turn it is."""
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from waiting.values()

    def take(self, request: Request) -> None:
        """Remove a request that is given to a worker."""
        self._forget_begun(request)
        if (place := self._place_among_resumed(request)) is not None:
            del self.resumed[place]
        else:
            self.lanes[request.message.priority].take(request)
        self._count(request, -1)

    def drop(self, request: Request) -> None:
        """Remove a request that ends."""
        self._forget_begun(request)
        if (place := self._place_among_resumed(request)) is not None:
            del self.resumed[place]
        else:
            self.lanes[request.message.priority].drop(request)
        self._count(request, -1)

    def _forget_begun(self, request: Request) -> None:
        self.unchecked.pop(request.id, None)
        self.preempted.pop(request.id, None)

    def _place_among_resumed(self, request: Request) -> int | None:
        """The index of a request in `resumed`; None if it is a fresh one."""
        place = bisect_left(self.resumed, _turn(request), key=_turn)
        found = place < len(self.resumed) and self.resumed[place] is request
        return place if found else None

    def forget_checks(self) -> None:
        """Have `unchecked_resumed` return all begun requests at its next call."""
        self._epochs = ()

    def position(self, request: Request) -> int:
        """How many wait that may go first: an upper bound, for shares decide."""
        if (place := self._place_among_resumed(request)) is not None:
            return place
        lanes = self.lanes[request.message.priority :]
        return len(self.resumed) + sum(lane.count for lane in lanes) - 1

    def outranks(self, request: Request) -> bool:
        """Whether requests of a higher rank wait, for this one, which may run."""
        return any(self.ranked[request.rank + 1 :])

    def waiting_since(self) -> float:
        """When the wait of the request began that waits longest; infinity: none waits."""
        eldest = (_first(waiting) for lane in self.lanes for waiting in lane.owners.values())
        return min((each.waiting_since for each in (*eldest, *self.resumed)), default=math.inf)

    def _count(self, request: Request, sign: int) -> None:
        self.count += sign
        self.ranked[request.rank] += sign
        self.charged += sign * (request.run.batch_bound > 0)
        self.bytes += sign * request.message.size
