"""Divides the places of a model among owners: decides which runs give up their places. Pure.

A place is a slot in the batch of a ready worker. The owner with the fewest places gets the next
free place. If all are taken, a waiting request takes a place

- from the owner with the most places, if that owner has at least two more than the request's
  owner: so owners at or below an equal share lose no place;
- else, if its owner has no place, from a run that has had its place for a TURN: so owners take
  turns if they are more than the places.

No request takes a place from a run of a higher rank: ranks order runs by priority, and jobs below
streams. A run gives up its place between two steps, waits as the first of its owner's requests, and
later continues from its ids.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from mlxpool.broker.requests.request import Request

# Seconds that a request waits before a run gives up its place for it. With short answers, places
# become free constantly.
PATIENCE = 0.05
# Seconds after which a run gives up its place to an owner without places. Most of this
# time remains after the run has read its tokens again.
TURN = 2.0
# Seconds for which a taken place is reserved for its new owner after the request: the owner's next
# request gets the place, so that a series of short requests preempts only one run.
KEEP = 1.0
LOOK_AGAIN = 0.25  # seconds until a run whose turn is over is checked again for output


class Held(Struct, frozen=True):
    """A run that has had a place (batch slot) in the worker of epoch `worker` since `since`.

    `proven`: the run has produced output there, so its prefill was not wasted.
    """

    request: Request
    worker: int
    since: float
    proven: bool


class Wanted(Struct, frozen=True):
    """A waiting request, and the epochs of the workers that may run it."""

    request: Request
    workers: Collection[int]


class Decision(Struct, frozen=True):
    """The runs that give up their places (batch slots), each with the owner that gets its place.

    `again`: the time at which the decision may change although no event has come; infinity if it
    cannot.
    """

    gives: tuple[tuple[Request, str], ...] = ()
    again: float = math.inf


def decide(
    held: Sequence[Held],
    wanted: Sequence[Wanted],
    counts: Mapping[str, int],
    coming: Mapping[int, int],
    now: float,
) -> Decision:
    """Returns the runs that give up their places for waiting requests.

    `wanted` is in the order of turns. `counts` has the number of places of each owner. `coming` has
    the number of free places of each worker, including places of runs that are being stopped.
    """
    runs, left, places = _by_owner(held), dict(coming), Counter(counts)
    waiting: defaultdict[str, deque[Wanted]] = defaultdict(deque)
    for want in wanted:
        waiting[want.request.owner].append(want)
    turns = [(places[owner], order, owner) for order, owner in enumerate(waiting)]
    heapq.heapify(turns)  # the owner with the fewest places first
    gives: list[tuple[Request, str]] = []
    refused: dict[tuple[int, int, Collection[int]], float] = {}  # equal requests are refused too
    again = math.inf
    while turns:
        own, order, taker = heapq.heappop(turns)
        want = waiting[taker].popleft()
        alike = own, want.request.rank, want.workers
        place = next((epoch for epoch in want.workers if left.get(epoch, 0) > 0), None)
        if place is not None:
            left[place] -= 1
            places[taker] += 1
        elif now < (patient_until := want.request.waiting_since + PATIENCE):
            again = min(again, patient_until)
        elif alike not in refused:
            run, due = _giver(want, own, runs, places, now)
            if run is None:
                refused[alike] = due
            else:
                giver = run.request.owner
                runs[giver].remove(run)
                places.subtract([giver])
                places[taker] += 1
                gives.append((run.request, taker))
                refused.clear()
        if waiting[taker]:
            heapq.heappush(turns, (places[taker], order, taker))
    return Decision(tuple(gives), min([again, *refused.values()]))


def _by_owner(held: Sequence[Held]) -> dict[str, list[Held]]:
    """Returns the runs of each owner: by falling rank, and of equal rank the oldest first.

    The rank orders runs by priority, and jobs below streams. The last run of an owner is the first
    to give up its place (batch slot).
    """
    runs: defaultdict[str, list[Held]] = defaultdict(list)
    for run in sorted(held, key=lambda run: (-run.request.rank, run.request.arrival)):
        runs[run.request.owner].append(run)
    return runs


def _giver(
    want: Wanted,
    own: int,
    runs: Mapping[str, Sequence[Held]],
    places: Mapping[str, int],
    now: float,
) -> tuple[Held | None, float]:
    """Returns the run that gives up its place (batch slot) for a waiting request.

    `own`: the number of places of the request's owner. If no run has to give up its place now,
    returns None and the next time at which a run may have to.
    """
    others = [owner for owner in runs if owner != want.request.owner]
    above = sorted(
        (other for other in others if places[other] >= own + 2), key=lambda other: -places[other]
    )
    for owner in above:
        for run in reversed(runs[owner]):
            if _may_have(want, run):
                return run, math.inf
    if own:
        return None, math.inf
    eldest = [run for other in others for run in runs[other] if _may_have(want, run)]
    eldest.sort(key=lambda run: (run.since, run.request.run.number))
    over = [run for run in eldest if now >= run.since + TURN]
    if over:
        first = next((run for run in over if run.proven), None)
        return first, math.inf if first is not None else now + LOOK_AGAIN
    return None, eldest[0].since + TURN if eldest else math.inf


def _may_have(want: Wanted, run: Held) -> bool:
    """Returns whether a request may get the place of a run."""
    return run.worker in want.workers and run.request.rank <= want.request.rank


class Places(Struct, eq=False):
    """The places (batch slots) of a model: held by owners, promised to owners, or reserved."""

    held: Counter[str] = field(default_factory=Counter)
    promised: Counter[str] = field(default_factory=Counter)  # places that runs are giving up
    _taken: Counter[str] = field(default_factory=Counter)  # held places that other owners gave up
    _kept: deque[tuple[float, str]] = field(default_factory=deque)  # (until when, owner)

    def get(self, owner: str) -> None:
        """Counts a place (batch slot) that a request of an owner has taken."""
        self.held[owner] += 1
        kept = next((entry for entry in self._kept if entry[1] == owner), None)
        if self.promised[owner]:
            _less(self.promised, owner)
            self._taken[owner] += 1
        elif kept is not None:
            self._kept.remove(kept)
            self._taken[owner] += 1

    def leave(self, owner: str, now: float) -> None:
        """Counts a place (batch slot) that a request of `owner` has left.

        If `owner` had got a place from another owner, one place stays reserved for `owner` for KEEP
        seconds.
        """
        _less(self.held, owner)
        if self._taken[owner] > self.held[owner]:
            _less(self._taken, owner)
            self._kept.append((now + KEEP, owner))

    def give(self, giver: str, taker: str) -> None:
        """Promises the place of a run to another owner."""
        _less(self.held, giver)
        if self._taken[giver] > self.held[giver]:
            _less(self._taken, giver)
        self.promised[taker] += 1

    def break_promise(self, owner: str) -> None:
        """Drops all promises to an owner, because it has no request that can take these places."""
        self.promised.pop(owner, None)

    def kept_from(self, owner: str, now: float) -> list[str]:
        """Returns the owners whose reserved places this owner may not take.

        Returns [] for an owner that has no place: it may take any place.
        """
        while self._kept and self._kept[0][0] <= now:
            self._kept.popleft()
        if not self._kept or not self.held[owner]:
            return []
        return [other for _, other in self._kept if other != owner]

    def kept_until(self, now: float) -> float:
        """Returns the time at which the next reserved place is free for all; infinity if none."""
        return next((until for until, _ in self._kept if until > now), math.inf)


def _less(counts: Counter[str], owner: str) -> None:
    """Subtracts 1 from an owner's count; drops an owner at 0."""
    counts[owner] -= 1
    if counts[owner] <= 0:
        del counts[owner]
