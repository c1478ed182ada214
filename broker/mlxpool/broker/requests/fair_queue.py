"""The requests that wait for one model: deficit round-robin between owners in each of 3 priorities.

Within a priority, owners with the fewest places (batch slots) go first. A resumed request was in a
worker before. It goes to the front, in the order of first arrival, regardless of its owner's share.
A preempted request has given up its place. It becomes the first of its owner. Pure.
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

QUANTUM = 512  # tokens by which an owner's deficit grows in each round
MAX_COST = 64 * 1024  # most tokens that count for one request
# Most decode tokens that count for a request. While an owner without places waits, a request keeps
# its place for at most a turn, see place_shares.py.
MAX_DECODE_COST = 512
BYTES_PER_TOKEN = 4  # approximate bytes per token of a prompt; only shares depend on it


NO_PLACES: Mapping[str, int] = {}


def cost(request: Request) -> int:
    """Returns a request's cost in the round-robin: its prompt tokens and remaining answer tokens.

    The answer costs at most MAX_DECODE_COST, the request at most MAX_COST.
    """
    most = request.message.options.max_tokens
    left = max(1, most - request.run.taken) if most > 0 else MAX_DECODE_COST
    return min(MAX_COST, prompt_tokens(request.message) + min(MAX_DECODE_COST, left))


def prompt_tokens(message: Generate) -> int:
    """Returns an estimate of the tokens of a prompt, because the broker has no tokenizer."""
    images = TOKENS_PER_IMAGE * len(message.prompt.images)
    return 1 + message.text_size // BYTES_PER_TOKEN + images


class Lane:
    """The requests of one priority. The owner whose turn it is comes first.

    Removal of any request takes constant time, because thousands of requests of a client may end
    together.
    """

    def __init__(self) -> None:
        self.owners: OrderedDict[str, OrderedDict[bytes, Request]] = OrderedDict()
        self.deficits: dict[str, int] = {}
        self.count = 0  # number of requests of all owners
        self.texts = 0  # requests without images

    def add(self, request: Request) -> None:
        self.owners.setdefault(request.owner, OrderedDict())[request.id] = request
        self.deficits.setdefault(request.owner, 0)
        self.count += 1
        self.texts += not request.message.prompt.images

    def add_first(self, request: Request) -> None:
        """Adds a preempted request as the first of its owner; the owner's turn comes last."""
        self.add(request)
        self.owners[request.owner].move_to_end(request.id, last=False)
        self.owners.move_to_end(request.owner)

    def head(
        self, places: Mapping[str, int] = NO_PLACES, *, without_images: bool = False
    ) -> Request | None:
        """Returns the request whose turn it is; None if there is none.

        The result stays the same until the lane or `places` changes. `places`: the number of places
        (batch slots) of each owner. `without_images`: requests with images are skipped.
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
        """Returns the fewest places (batch slots) that an owner with a suitable request has.

        None if all requests are of one owner.
        """
        if len(self.owners) == 1:
            return None
        owners = (
            owner
            for owner, waiting in self.owners.items()
            if not without_images or _first_text(waiting.values()) is not None
        )
        return min(places.get(owner, 0) for owner in owners)

    def heads(self, places: Mapping[str, int] = NO_PLACES) -> list[Request]:
        """Returns the first requests of the owner whose turn it is, at most MAX_REQUESTS."""
        if self.head(places) is None:
            return []
        return list(islice(next(iter(self.owners.values())).values(), MAX_REQUESTS))

    def take(self, request: Request) -> None:
        """Removes a request that a worker gets, and counts its cost against its owner."""
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
    """Returns the unique sort key of a resumed request."""
    return -request.message.priority, request.arrival


class Queue:
    """The waiting requests of a model.

    Invariant: a request is in the queue exactly while its state is QUEUED.
    """

    def __init__(self) -> None:
        self.lanes = tuple(Lane() for _ in range(MAX_PRIORITY + 1))
        self.resumed: list[Request] = []  # requests that a worker had before
        # Requests that gave up their places for other owners; they wait among the fresh requests.
        self.preempted: dict[bytes, Request] = {}
        # Resumed and preempted requests, see `unchecked_resumed`.
        self.unchecked: dict[bytes, Request] = {}
        self._epochs: tuple[int, ...] = ()  # epochs of workers compared with the checked requests
        self.count = 0  # number of fresh and resumed requests
        self.ranked = [0] * RANKS  # number of requests by rank
        self.charged = 0  # number of requests with a bound, see Run.batch_bound
        self.bytes = 0  # bytes of prompts

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests in any order."""
        yield from self.resumed
        yield from self.in_turn()

    def __contains__(self, request: Request) -> bool:
        return any(each is request for each in self)

    def add(self, request: Request) -> None:
        """Queues a request that no worker had."""
        self.lanes[request.message.priority].add(request)
        self._count(request, 1)

    def add_resumed(self, request: Request) -> None:
        """Queues a request that a worker had before. Later requests do not overtake it."""
        insort(self.resumed, request, key=_turn)
        self.unchecked[request.id] = request
        self._count(request, 1)

    def add_preempted(self, request: Request) -> None:
        """Queues a request that gave up its place, as the first of its owner.

        An idle job is queued as the last of its owner instead.
        """
        lane = self.lanes[request.message.priority]
        (lane.add if request.rank == IDLE_RANK else lane.add_first)(request)
        self.preempted[request.id] = self.unchecked[request.id] = request
        self._count(request, 1)

    def sent_again(self, request: Request, more_bytes: int) -> None:
        """Counts the bytes of a queued request that its client has sent again.

        The new message has `more_bytes` bytes more than the earlier message.
        """
        self.bytes += more_bytes
        if request.id in self.preempted or self._place_among_resumed(request) is not None:
            self.unchecked[request.id] = request  # the retry may have brought model data (`facts`)

    @property
    def begun(self) -> bool:
        """Returns whether any waiting request was in a worker before."""
        return bool(self.resumed or self.preempted)

    def unchecked_resumed(self, epochs: tuple[int, ...]) -> list[Request]:
        """Returns the resumed and preempted requests to compare with the workers of these epochs.

        If the epochs are the same as in the last call, only requests that were added since are
        returned.
        """
        if epochs == self._epochs:
            begun = list(self.unchecked.values())
        else:
            begun = [*self.resumed, *self.preempted.values()]
        self._epochs = epochs
        self.unchecked.clear()
        return begun

    def head(
        self, places: Mapping[str, int] = NO_PLACES, *, without_images: bool = False
    ) -> Request | None:
        """Returns the next fresh request of the highest priority; None without a fresh request.

        `places`: the number of places (batch slots) of each owner. `without_images`: requests with
        images are skipped.
        """
        for lane in reversed(self.lanes):
            request = lane.head(places, without_images=without_images)
            if request is not None:
                return request
        return None

    def heads(self, places: Mapping[str, int] = NO_PLACES) -> list[Request]:
        """Returns the next fresh requests of the highest priority, all of one owner."""
        lane = next((lane for lane in reversed(self.lanes) if lane.owners), None)
        return [] if lane is None else lane.heads(places)

    def owners(self) -> set[str]:
        """Returns the owners of the waiting requests."""
        fresh = (owner for lane in self.lanes for owner in lane.owners)
        return {*fresh, *(request.owner for request in self.resumed)}

    def first_of_owners(self, most: int) -> Iterator[Request]:
        """Yields resumed requests, then fresh requests by falling priority.

        Of each owner it yields at most `most` fresh requests of each priority.
        """
        yield from self.resumed
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from islice(waiting.values(), most)

    def of_owner(self, owner: str) -> Iterator[Request]:
        """Yields an owner's requests: resumed requests, then fresh requests by falling priority."""
        yield from (request for request in self.resumed if request.owner == owner)
        for lane in reversed(self.lanes):
            yield from lane.owners.get(owner, {}).values()

    def in_turn(self) -> Iterator[Request]:
        """Yields the fresh requests by falling priority; within a priority, owners take turns."""
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from waiting.values()

    def take(self, request: Request) -> None:
        """Removes a request that is given to a worker."""
        self._forget_begun(request)
        if (place := self._place_among_resumed(request)) is not None:
            del self.resumed[place]
        else:
            self.lanes[request.message.priority].take(request)
        self._count(request, -1)

    def drop(self, request: Request) -> None:
        """Removes a request that has ended."""
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
        """Returns the index of a request in `resumed`; None for a fresh request."""
        place = bisect_left(self.resumed, _turn(request), key=_turn)
        resumed = place < len(self.resumed) and self.resumed[place] is request
        return place if resumed else None

    def forget_checks(self) -> None:
        """Makes the next call of `unchecked_resumed` return all resumed and preempted requests.

        Without this call it would return only the requests that were added since its last call.
        """
        self._epochs = ()

    def position(self, request: Request) -> int:
        """Returns the most requests that may be served before this request.

        Fewer may be served before it, because owners take turns.
        """
        if (place := self._place_among_resumed(request)) is not None:
            return place
        lanes = self.lanes[request.message.priority :]
        return len(self.resumed) + sum(lane.count for lane in lanes) - 1

    def outranks(self, request: Request) -> bool:
        """Returns whether waiting requests rank higher than `request`, which may be running."""
        return any(self.ranked[request.rank + 1 :])

    def waiting_since(self) -> float:
        """Returns the time at which the oldest request began to wait; infinity without requests."""
        eldest = (_first(waiting) for lane in self.lanes for waiting in lane.owners.values())
        return min((each.waiting_since for each in (*eldest, *self.resumed)), default=math.inf)

    def _count(self, request: Request, sign: int) -> None:
        self.count += sign
        self.ranked[request.rank] += sign
        self.charged += sign * (request.run.batch_bound > 0)
        self.bytes += sign * request.message.size
