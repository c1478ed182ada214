"""Drafts that are known to be right or wrong, and speculators that always check drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Many
from time import monotonic

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import Drafter, Drafts
from mlxpool.worker.speculation.ngram import NgramDrafter
from mlxpool.worker.speculation.row_search import Candidate
from mlxpool.worker.speculation.speculator import Speculator

MAX_DEPTH = 6


class OracleDrafter:
    """Drafts the next ids of known answers, some of them wrong.

    `answers` has the whole answer of each request by its id. Ids after the end of an answer are
    random.
    """

    name = "oracle"

    def __init__(self, answers: Mapping[bytes, Many[int]], draw: random.Random, size: int) -> None:
        """`size` is the size of the vocabulary."""
        self._answers = answers
        self._draw = draw
        self._size = size

    def follow(self, seq: Sequence) -> bool:
        return True

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        return (0.5,) * most

    def seconds(self, rows: int, depth: int) -> float:
        return 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        return 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        return {seq: self._drafts(seq, count) for seq, count in depths.items()}

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        return ()

    def reset(self) -> None:
        pass

    def _drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        known = [*self._answers[seq.id][len(seq.ids) :][:count]]
        known += [self._draw.randrange(self._size) for _ in range(count - len(known))]
        if self._draw.random() < 0.5:
            known[self._draw.randrange(count)] = self._draw.randrange(self._size)
        return tuple(known)

    def forget(self, seq: Sequence) -> None:
        pass


class EagerSpeculator(Speculator):
    """A speculator that checks drafts of every row, even if the drafts save no time.

    It checks all available drafts, or a random number of them.
    """

    def __init__(self, drafter: Drafter | None = None, draw: random.Random | None = None) -> None:
        """Without `draw` all available drafts are checked."""
        super().__init__(drafter or NgramDrafter(), lambda load: 0.0, monotonic)
        self._draw = draw
        self.most = 0  # the most drafts of a row in a step
        self.waits = False  # True while no row checks drafts

    @property
    def skips_next(self) -> bool:
        return False

    def depths(
        self, rows: int, lines: int, candidates: Many[Candidate], began: float
    ) -> dict[Sequence, int]:
        chosen = {}
        for candidate in () if self.waits else candidates:
            self.search.forget_ended(rows)
            if not self.search.follow(candidate.sequence):
                continue
            some = self.drafter.chances(candidate.sequence, max(0, min(MAX_DEPTH, candidate.room)))
            depth = len(some) if self._draw is None else self._draw.randint(0, len(some))
            if depth:
                chosen[candidate.sequence] = depth
                self.most = max(self.most, depth)
        return chosen

    def _those_that_pay(self, drafts: Drafts) -> Drafts:
        return drafts


class ClockedSpeculator(Speculator):
    """A speculator that records the reported times of steps; the test moves its clock."""

    def __init__(self) -> None:
        super().__init__(NgramDrafter(), lambda load: 0.0, lambda: self.now)
        self.now = 100.0
        self.seconds: list[float] = []  # the duration of each step

    def step_ended(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        self.seconds.append(seconds)
        super().step_ended(rows, drafts, seconds, measured=measured)
