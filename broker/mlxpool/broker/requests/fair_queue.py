"""The requests that wait for one model: deficit round-robin between owners in each of 3 priorities.

A request that a worker had before (it was resumed) goes to the front, in the order of first
arrival, whatever its owner's share. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from mlxpool.broker.requests.request import RANKS, Request
from mlxpool.broker.routing.route_choice import MAX_REQUESTS
from mlxpool.common.protocol.from_client import MAX_PRIORITY, Generate
from mlxpool.common.protocol.images import TOKENS_PER_IMAGE

QUANTUM = 512  # tokens that an owner's deficit grows by in each round
MAX_COST = 64 * 1024  # tokens that one request costs at most
OPEN_ENDED_TOKENS = 512  # that a request without max_tokens is taken to generate
BYTES_PER_TOKEN = 4  # of a prompt, roughly; only shares depend on it


def cost(request: Request) -> int:
    """What a request takes of its owner's share: tokens to prefill and to decode."""
    wanted = request.message.options.max_tokens
    decode = wanted if wanted > 0 else OPEN_ENDED_TOKENS
    return min(MAX_COST, prompt_tokens(request.message) + decode)


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

    def head(self, *, without_images: bool = False) -> Request | None:
        """The request whose turn it is; the same until the lane changes before it.

        `without_images`: that of the requests without images.
        """
        if not (self.texts if without_images else self.owners):
            return None
        while True:
            owner, waiting = next(iter(self.owners.items()))
            first = _first_text(waiting.values()) if without_images else _first(waiting)
            if first is not None:
                if self.deficits[owner] >= cost(first):
                    return first
                self.deficits[owner] += QUANTUM
            self.owners.move_to_end(owner)

    def heads(self) -> list[Request]:
        """The first requests of the owner whose turn it is, at most MAX_REQUESTS."""
        if self.head() is None:
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
        self.unchecked: dict[bytes, Request] = {}  # of the resumed, see `unchecked_resumed`
        self._epochs: tuple[int, ...] = ()  # of the workers that the others were compared with
        self.count = 0  # fresh and resumed
        self.ranked = [0] * RANKS  # how many of each rank
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

    def sent_again(self, request: Request, more_bytes: int) -> None:
        """A request in the queue was sent again and holds so many more bytes."""
        self.bytes += more_bytes
        if self._place_among_resumed(request) is not None:
            self.unchecked[request.id] = request  # it may have come with facts

    def unchecked_resumed(self, epochs: tuple[int, ...]) -> list[Request]:
        """The resumed requests that nobody has compared with the workers of these epochs.

        The next call with the same epochs returns only those that were added since.
        """
        found = list(self.unchecked.values()) if epochs == self._epochs else list(self.resumed)
        self._epochs = epochs
        self.unchecked.clear()
        return found

    def head(self, *, without_images: bool = False) -> Request | None:
        """The next of the fresh ones, or of those without images: the highest priority first."""
        for lane in reversed(self.lanes):
            request = lane.head(without_images=without_images)
            if request is not None:
                return request
        return None

    def heads(self) -> list[Request]:
        """Those of the fresh ones of which one is next: of the highest priority, of one owner."""
        lane = next((lane for lane in reversed(self.lanes) if lane.owners), None)
        return [] if lane is None else lane.heads()

    def in_turn(self) -> Iterator[Request]:
        """The fresh ones: the highest priority first, then the owner whose turn it is."""
        for lane in reversed(self.lanes):
            for waiting in lane.owners.values():
                yield from waiting.values()

    def take(self, request: Request) -> None:
        """Remove a request that is given to a worker."""
        if (place := self._place_among_resumed(request)) is not None:
            del self.resumed[place]
            self.unchecked.pop(request.id, None)
        else:
            self.lanes[request.message.priority].take(request)
        self._count(request, -1)

    def drop(self, request: Request) -> None:
        """Remove a request that ends."""
        if (place := self._place_among_resumed(request)) is not None:
            del self.resumed[place]
            self.unchecked.pop(request.id, None)
        else:
            self.lanes[request.message.priority].drop(request)
        self._count(request, -1)

    def _place_among_resumed(self, request: Request) -> int | None:
        """The index of a request in `resumed`; None if it is a fresh one."""
        place = bisect_left(self.resumed, _turn(request), key=_turn)
        found = place < len(self.resumed) and self.resumed[place] is request
        return place if found else None

    def forget_checks(self) -> None:
        """Have `unchecked_resumed` return all resumed requests at its next call."""
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
        self.bytes += sign * request.message.size
