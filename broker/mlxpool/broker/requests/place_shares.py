"""Which owners have the places of a model, and which runs give theirs up for others. Pure.

A place is one of the sequences that a ready worker runs at once. The owner with the fewest places
gets the next one that is free. Where none is, a request that waits takes one

- from the owner with the most places, if that has at least two more than its own: so an owner at or
  below an equal share loses none;
- else, if its owner has none at all, from a run that has had its place for a TURN: so more owners
  than there are places have turns.

No request takes a place from a run of a higher rank (see `rank_of`). A run gives its place up
between two steps, waits as the first of its owner's requests, and goes on from its ids.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from mlxpool.broker.requests.request import Request

# Seconds that a request waits before a run gives up its place for it: where answers are short,
# places become free all the time.
PATIENCE = 0.05
# Seconds that a run has its place before it gives it up to an owner that has none. Most of them
# are left when it has read its tokens again.
TURN = 2.0
# Seconds for which a place that was taken for an owner is kept for it when its request has ended:
# its next request finds it, and no run is begun and preempted for each of many short requests.
KEEP = 1.0
LOOK_AGAIN = 0.25  # seconds until a run whose turn is over is asked again whether it had an output


class Held(Struct, frozen=True):
    """A run that has a place of the worker with the epoch `worker` since the time `since`.

    `proven`: it has had an output there, so that what was read for it was not read in vain.
    """

    request: Request
    worker: int
    since: float
    proven: bool


class Wanted(Struct, frozen=True):
    """A request that waits, and the epochs of the workers that it may be given to."""

    request: Request
    workers: Collection[int]


class Decision(Struct, frozen=True):
    """The runs that give up their places, each with the owner that takes it.

    `again`: when to decide again if nothing happens until then; infinity: nothing would change.
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
    """Which runs give up their places for the requests that wait.

    `wanted` are in the order of their turns, `counts` the places of each owner. `coming`: the
    places of each worker that are free, or will be because their runs were told to end.
    """
    runs, left, places = _by_owner(held), dict(coming), Counter(counts)
    waiting: defaultdict[str, deque[Wanted]] = defaultdict(deque)
    for want in wanted:
        waiting[want.request.owner].append(want)
    turns = [(places[owner], order, owner) for order, owner in enumerate(waiting)]
    heapq.heapify(turns)  # the owner with the fewest places first
    gives: list[tuple[Request, str]] = []
    refused: dict[tuple[int, int, Collection[int]], float] = {}  # alike ones get nothing either
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
    """The runs of each owner; the last one gives up its place first: lowest rank, then newest."""
    runs: defaultdict[str, list[Held]] = defaultdict(list)
    for run in sorted(held, key=lambda one: (-one.request.rank, one.request.arrival)):
        runs[run.request.owner].append(run)
    return runs


def _giver(
    want: Wanted,
    own: int,
    runs: Mapping[str, Sequence[Held]],
    places: Mapping[str, int],
    now: float,
) -> tuple[Held | None, float]:
    """The run that gives up its place for a request of an owner that has `own` places.

    None: no run does, and may not before the time beside it.
    """
    others = [owner for owner in runs if owner != want.request.owner]
    above = sorted((one for one in others if places[one] >= own + 2), key=lambda one: -places[one])
    for owner in above:
        for run in reversed(runs[owner]):
            if _may_have(want, run):
                return run, math.inf
    if own:
        return None, math.inf
    eldest = [run for one in others for run in runs[one] if _may_have(want, run)]
    eldest.sort(key=lambda run: (run.since, run.request.run.number))
    over = [run for run in eldest if now >= run.since + TURN]
    if over:
        first = next((run for run in over if run.proven), None)
        return first, math.inf if first is not None else now + LOOK_AGAIN
    return None, eldest[0].since + TURN if eldest else math.inf


def _may_have(want: Wanted, run: Held) -> bool:
    """Whether a request may have the place of a run."""
    return run.worker in want.workers and run.request.rank <= want.request.rank


class Places(Struct, eq=False):
    """The places of a model that its owners have, and those promised to them or kept for them."""

    held: Counter[str] = field(default_factory=Counter)
    promised: Counter[str] = field(default_factory=Counter)  # runs were told to give them up
    _taken: Counter[str] = field(default_factory=Counter)  # of those held: others gave them up
    _kept: deque[tuple[float, str]] = field(default_factory=deque)  # until when, for whom

    def get(self, owner: str) -> None:
        """A request of an owner is given a place."""
        self.held[owner] += 1
        kept = next((entry for entry in self._kept if entry[1] == owner), None)
        if self.promised[owner]:
            _less(self.promised, owner)
            self._taken[owner] += 1
        elif kept is not None:
            self._kept.remove(kept)
            self._taken[owner] += 1

    def leave(self, owner: str, now: float) -> None:
        """A request of an owner has its place no more; if others gave that up, it is kept."""
        _less(self.held, owner)
        if self._taken[owner] > self.held[owner]:
            _less(self._taken, owner)
            self._kept.append((now + KEEP, owner))

    def give(self, giver: str, taker: str) -> None:
        """A run of an owner gives up its place for another owner."""
        _less(self.held, giver)
        if self._taken[giver] > self.held[giver]:
            _less(self._taken, giver)
        self.promised[taker] += 1

    def break_promise(self, owner: str) -> None:
        """An owner has no request that could use what it was promised."""
        self.promised.pop(owner, None)

    def kept_from(self, owner: str, now: float) -> list[str]:
        """For whom places are kept that this owner does not get; none if it has no place."""
        while self._kept and self._kept[0][0] <= now:
            self._kept.popleft()
        if not self._kept or not self.held[owner]:
            return []
        return [other for _, other in self._kept if other != owner]

    def kept_until(self, now: float) -> float:
        """When the next of the kept places is free for all; infinity: none is kept."""
        return next((until for until, _ in self._kept if until > now), math.inf)


def _less(counts: Counter[str], owner: str) -> None:
    """Count one less; an owner without any is not remembered."""
    counts[owner] -= 1
    if counts[owner] <= 0:
        del counts[owner]
