"""The interface of what proposes tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from mlxpool.worker.scheduling.sequence import Sequence

# Values of the setting `speculation`.
OFF, NGRAM, MTP, DRAFT, AUTO = "off", "ngram", "mtp", "draft", "auto"

Drafts: TypeAlias = Mapping[Sequence, tuple[int, ...]]


class Drafter(Protocol):
    """Proposes the tokens that may follow those of running sequences; used by one thread."""

    @property
    def name(self) -> str:
        """Its value in the setting `speculation`."""

    def follow(self, seq: Sequence) -> bool:
        """Takes the tokens that a sequence got since the last call, and learns from them.

        Returns whether it can draft now: not while it lags behind, for a call does a bounded amount
        of work, nor while it lacks what it drafts from.
        """

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns how likely each of the next drafts is right, if those before it are.

        At most `most` of them; none where nothing can be proposed behind the newest token.
        """

    def seconds(self, rows: int, depth: int) -> float:
        """Predicts the time of `drafts` of so many sequences, the deepest of which has `depth`.

        It is 0 where that is counted as part of the step that checks them.
        """

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Predicts the seconds to read what it lacks of a sequence, before `depth` drafts."""

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the next drafts of sequences: so many of each, at most as `chances` has.

        Fewer where no more can be proposed; a sequence without one is left out.
        """

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns how likely each of the drafts is that `drafts` returned, if those before it are.

        Empty where they are as `chances` said.
        """

    def reset(self) -> None:
        """Drops what is kept of all sequences, after `drafts` raised an exception."""

    def forget(self, seq: Sequence) -> None:
        """Drops what is kept of a sequence; ignores an unknown one."""
