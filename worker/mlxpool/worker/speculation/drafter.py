"""The interface of what proposes tokens. Pure."""

from __future__ import annotations

from typing import Protocol

from mlxpool.worker.scheduling.sequence import Sequence


class Drafter(Protocol):
    """Proposes the tokens that may follow those of running sequences; used by one thread."""

    @property
    def name(self) -> str:
        """The name for operators: a value of the setting `speculation`."""

    def follow(self, seq: Sequence) -> bool:
        """Takes the tokens that a sequence got since the last call, and learns from them.

        Returns whether it has all of them: a call does a bounded amount of work.
        """

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns how likely each of the next drafts is right, if those before it are.

        They are at most `most`, and none where nothing can be proposed behind the tokens that
        `follow` took.
        """

    def drafts(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """Returns the next `count` drafts, at most as many as `chances` has."""

    def forget(self, seq: Sequence) -> None:
        """Drops what is kept of a sequence; ignores an unknown one."""
