"""Figures of contestants, their spread and ratios.

The speed of machines varies by tens of percent from second to second, so contestants take turns in
one run. A ratio compares figures of one round. It is above 1 if our figure is the better one, also
where less is better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.common.records import as_map

OURS = "mlxpool"
Progress: TypeAlias = Callable[[str], None]  # prints the next step


class Measurement(Struct, frozen=True):
    """A measured quantity. `sides`: the figures of each contestant, one for each round.

    `group`: the table that shows the quantity. `at`: the position of the figures on the axis of a
    chart, in streams, tokens or requests/s.
    """

    group: str
    name: str
    unit: str
    sides: Mapping[str, Sequence[float]]
    at: float = 0
    less_is_better: bool = False
    digits: int = 1
    note: str = ""
    compared: bool = True  # whether a ratio has a meaning

    def median(self, side: str) -> float:
        return statistics.median(self.sides[side])

    def ratios(self) -> list[float]:
        """Returns our figure divided by the best figure of another contestant, for each round.

        If less is better, the ratio is inverted, so that above 1 is always better. The list is
        empty if there is no other contestant, or if a divisor is 0.
        """
        others = [figures for side, figures in self.sides.items() if side != OURS]
        if not self.compared or OURS not in self.sides or not others:
            return []
        if self.less_is_better:
            best = [min(round_figures) for round_figures in zip(*others, strict=True)]
            pairs = list(zip(best, self.sides[OURS], strict=True))
        else:
            best = [max(round_figures) for round_figures in zip(*others, strict=True)]
            pairs = list(zip(self.sides[OURS], best, strict=True))
        return [above / below for above, below in pairs] if all(b for _, b in pairs) else []

    def as_json(self) -> dict[str, Any]:
        """Returns the measurement as JSON with its ratios; `from_json` reads it."""
        return {**as_map(self), "ratios": self.ratios()}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Measurement:
        return cls(**{key: value for key, value in members.items() if key != "ratios"})


class Figures(Struct, frozen=True):
    """The figures of a run of `mlxpool bench`, and its conditions."""

    what: str
    about: str  # the model, the numbers, the settings
    machine: str
    versions: str
    command: str
    lines: Sequence[Measurement] = field(default_factory=tuple)
    date: str = ""  # day of the measurement, as 2026-11-28
    commit: str = ""  # commit of mlxpool

    def as_json(self) -> dict[str, Any]:
        return {**as_map(self), "lines": [line.as_json() for line in self.lines]}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Figures:
        return cls(**{**members, "lines": tuple(map(Measurement.from_json, members["lines"]))})


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, tuple[float, ...]]:
    """Measures contestants in turn, in an order that rotates; returns a figure for each round."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            figures[name].append(contestants[name]())
    return {name: tuple(values) for name, values in figures.items()}


def merged(runs: Mapping[str, Sequence[Measurement]]) -> Iterator[Measurement]:
    """Yields the measurements of several runs; measurements with equal names are merged into one.

    A merged measurement has the contestants of all runs.
    """
    by_name: dict[tuple[str, str], Measurement] = {}
    for line in (line for lines in runs.values() for line in lines):
        known = by_name.setdefault((line.group, line.name), line)
        note = "\n\n".join(dict.fromkeys(filter(None, (known.note, line.note))))
        sides = {**known.sides, **line.sides}
        by_name[line.group, line.name] = replace(known, sides=sides, note=note)
    yield from by_name.values()


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile, interpolated linearly between the two nearest values."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    return below + (above - below) * (at - math.floor(at))
