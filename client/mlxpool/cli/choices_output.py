"""How `mlxpool run` prints the text of its choices: one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxpool.client import Delta


class ChoicesOutput:
    """Prints choice 0 as it comes, and the others behind it when all have ended.

    A single choice has no title.
    """

    def __init__(self, choices: int, write: Callable[[str], None]) -> None:
        self._write = write
        self._texts = [""] * choices  # of the later ones
        self._begun = choices == 1

    def add(self, delta: Delta) -> None:
        """Print a delta of choice 0, or keep that of another."""
        if not self._begun:
            self._begun = True
            self._write(_title(0))
        if delta.index:
            self._texts[delta.index] += delta.text
        else:
            self._write(delta.text)

    def end(self) -> None:
        """Print the others: all have ended."""
        for index, text in enumerate(self._texts[1:], 1):
            self._write(f"\n{_title(index)}{text}")


def _title(index: int) -> str:
    """The line in front of a choice."""
    return f"--- choice {index}\n"
