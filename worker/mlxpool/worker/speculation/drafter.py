"""The interface of drafters, which propose tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from mlxpool.worker.scheduling.sequence import Sequence

# Values of the setting `speculation`.
OFF, NGRAM, MTP, DRAFT, AUTO = "off", "ngram", "mtp", "draft", "auto"

Drafts: TypeAlias = Mapping[Sequence, tuple[int, ...]]


class Drafter(Protocol):
    """Proposes next tokens of running sequences; used by one thread."""

    @property
    def name(self) -> str:
        """The value of the setting `speculation` for this drafter."""

    def follow(self, seq: Sequence) -> bool:
        """Reads a sequence's new tokens since the last call, and learns from them.

        Returns whether the drafter can draft now. It cannot while some tokens are still unread,
        because one call does only a bounded amount of work. It also cannot if its input for a draft
        is missing, such as a hidden state.
        """

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns the probability of each next draft to be right if the drafts before it are right.

        At most `most` values; empty if nothing can be proposed after the newest token.
        """

    def seconds(self, rows: int, depth: int) -> float:
        """Predicts the seconds of `drafts` for `rows` sequences with at most `depth` drafts each.

        Returns 0 if the time is part of the time of the step that checks the drafts.
        """

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        """Predicts the seconds to read unread tokens, which has to precede `depth` drafts."""

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the next drafts of sequences; `depths`: the number of drafts of each.

        The last call of the method `chances` returned a value for each possible draft. A sequence
        can have at most that many drafts. Returns fewer drafts if no more can be proposed; omits a
        sequence without drafts.
        """

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        """Returns updated chances of the drafts that `drafts` returned, as `chances` does.

        Empty if the chances have not changed since `chances`.
        """

    def reset(self) -> None:
        """Drops the state of all sequences, after `drafts` raised an exception."""

    def forget(self, seq: Sequence) -> None:
        """Drops the state of a sequence; ignores an unknown sequence."""
