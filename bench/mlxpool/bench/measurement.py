"""A line of figures, its spread and its ratio: what every measurement here gives.

Machines vary by tens of percent from second to second, so contestants take turns in one run; a
ratio is that of one round, and above 1 is always better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "mlxpool"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing measured in rounds: `sides` has the figures of each contestant, a round each.

    `at` is where it stands on the axis of a picture, streams or tokens; `group` is its table.
    """

    group: str
    name: str
    unit: str
    sides: Mapping[str, Sequence[float]]
    at: int = 0
    less_is_better: bool = False
    digits: int = 1
    note: str = ""
    compared: bool = True  # whether a ratio says anything

    def median(self, side: str) -> float:
        return statistics.median(self.sides[side])

    def ratios(self) -> list[float]:
        """Ours beside the best other of each round; empty where there is nothing to compare."""
        others = [figures for side, figures in self.sides.items() if side != OURS]
        if not self.compared or OURS not in self.sides or not others:
            return []
        if self.less_is_better:
            best = [min(found) for found in zip(*others, strict=True)]
            return [other / ours for ours, other in zip(self.sides[OURS], best, strict=True)]
        best = [max(found) for found in zip(*others, strict=True)]
        return [ours / other for ours, other in zip(self.sides[OURS], best, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Undone by `from_json`; the ratios are added for readers."""
        return {**asdict(self), "ratios": self.ratios()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Line:
        return cls(**{key: value for key, value in found.items() if key != "ratios"})


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run of `mlxpool bench` found, and on what."""

    what: str
    about: str  # the model, the numbers, the settings
    machine: str
    versions: str
    command: str
    lines: Sequence[Line] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "lines": [line.as_json() for line in self.lines]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Figures:
        return cls(**{**found, "lines": tuple(map(Line.from_json, found["lines"]))})


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, tuple[float, ...]]:
    """What each gives in every round. The order changes, so that no one always comes second."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(contestants[name]())
    return {name: tuple(values) for name, values in found.items()}
