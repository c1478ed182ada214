"""The GPUs of this broker's workers. Pure.

The GPUs of a worker are taken before its process starts. They are released after the process was
reaped, because until then it may use their memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from mlxpool.common.gpus import check_enough


class PlaceState(Enum):
    """The state of a Place, which is the assignment of GPUs to a slot."""

    UNPLACED = "unplaced"  # the slot has had no worker
    HELD = "held"  # the slot's worker has these GPUs
    LEFT = "left"  # the last worker had these GPUs, and the next worker gets them if possible


_UNPLACED, _HELD, _LEFT = PlaceState.UNPLACED, PlaceState.HELD, PlaceState.LEFT

TRANSITIONS: dict[PlaceState, dict[str, PlaceState]] = {
    _UNPLACED: {"take": _HELD},
    _HELD: {"release": _LEFT},
    _LEFT: {"take": _HELD},
}


class Place(Struct, eq=False):
    """The GPUs that are assigned to a slot: one for each rank, in the order of ranks."""

    slot: str
    state: PlaceState = PlaceState.UNPLACED
    gpus: tuple[str, ...] = ()

    def move(self, event: str) -> None:
        """Changes state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"the place of {self.slot} is {self.state.value}: no {event!r} there")
        self.state = following


class GpuPlaces:
    """The assignment of GPUs to all slots.

    Invariant: a worker shares a GPU only if too few of its allowed GPUs are free. The ranks of a
    group have different GPUs.
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def take(self, slot: str, gpus: Sequence[str], count: int) -> tuple[str, ...]:
        """Assigns `count` of `gpus` to the worker of a slot and returns them; () without `gpus`.

        Raises GpusUnavailable if `gpus` has fewer than `count`, and ValueError if the slot already
        has GPUs.
        """
        check_enough(gpus, count)
        place = self._places.get(slot) or Place(slot)
        place.move("take")
        place.gpus = choose(gpus, self._workers_by_gpu(place), place.gpus, count)
        self._places[slot] = place
        return place.gpus

    def release(self, slot: str) -> None:
        """Releases the GPUs of a slot whose worker has ended. Raises ValueError if it has none."""
        (self._places.get(slot) or Place(slot)).move("release")

    def held(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the GPUs of each slot that has taken GPUs."""
        return {place.slot: place.gpus for place in self._places.values() if place.state is _HELD}

    def _workers_by_gpu(self, asking: Place) -> Counter[str]:
        """Returns the number of other workers, or ranks of groups, on each GPU."""
        held = (gpus for slot, gpus in self.held().items() if slot != asking.slot)
        return Counter(gpu for gpus in held for gpu in gpus)


def choose(
    gpus: Sequence[str], workers: Mapping[str, int], before: Collection[str], count: int
) -> tuple[str, ...]:
    """Returns the `count` GPUs of `gpus` with the fewest workers, in the order of `gpus`.

    At equal numbers of workers, GPUs that the slot had `before` come first, then the order of
    `gpus` decides.
    """

    def rank(index: int) -> tuple[int, bool, int]:
        gpu = gpus[index]
        return workers.get(gpu, 0), gpu not in before, index

    return tuple(gpus[index] for index in sorted(sorted(range(len(gpus)), key=rank)[:count]))
