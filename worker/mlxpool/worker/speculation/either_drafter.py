"""Drafts of n-grams where these are likely to be right, else of a draft model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import Drafter, Drafts

COMPARED = 6  # drafts of each, whose expected number of right ones is compared


@dataclass(slots=True)
class EitherDrafter:
    """The Drafter of two: of `free`, whose drafts take no time, and of `asked`."""

    free: Drafter
    asked: Drafter
    name: str = "auto"
    _asking: set[Sequence] = field(default_factory=set)  # those that `asked` has drafts for

    def follow(self, seq: Sequence) -> bool:
        """See Drafter. While `free` does not have all tokens it has no drafts."""
        self.free.follow(seq)
        return self.asked.follow(seq)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """See Drafter. They are those of the one whose drafts are expected to go further."""
        free, asked = self.free.chances(seq, most), self.asked.chances(seq, most)
        asks = expected_right(asked[:COMPARED]) > expected_right(free[:COMPARED])
        (self._asking.add if asks else self._asking.discard)(seq)
        return asked if asks else free

    def seconds(self, rows: int, depth: int) -> float:
        """See Drafter."""
        asking = min(rows, len(self._asking))
        return self.asked.seconds(asking, depth) if asking else 0.0

    def reading(self, seq: Sequence, depth: int) -> float:
        """See Drafter."""
        return self.asked.reading(seq, depth) if seq in self._asking else 0.0

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """See Drafter."""
        asking = {seq: count for seq, count in depths.items() if seq in self._asking}
        others = {seq: count for seq, count in depths.items() if seq not in asking}
        found: dict[Sequence, tuple[int, ...]] = {}
        if asking:
            found.update(self.asked.drafts(asking))
        if others:
            found.update(self.free.drafts(others))
        return found

    def sure(self, seq: Sequence) -> tuple[float, ...]:
        """See Drafter."""
        return self.asked.sure(seq) if seq in self._asking else self.free.sure(seq)

    def forget(self, seq: Sequence) -> None:
        """See Drafter."""
        self._asking.discard(seq)
        self.free.forget(seq)
        self.asked.forget(seq)

    def reset(self) -> None:
        """See Drafter."""
        self._asking.clear()
        self.free.reset()
        self.asked.reset()


def expected_right(chances: Many[float]) -> float:
    """Returns how many drafts are expected to be right until one is wrong."""
    product, total = 1.0, 0.0
    for chance in chances:
        product *= chance
        total += product
    return total
