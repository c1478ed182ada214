"""How many bytes the answers of calls may have that are computed, or wait for the disk. Pure.

The size of an answer is known when its request was read. So a job that may be a call is read from
the store only while there is room for the largest answer: none is begun without room, and none is
charged with a start that it did not have.
"""

from __future__ import annotations

from collections import Counter

from mlxpool.common.protocol.bounds import MAX_BLOB

MAX_ANSWERS = 128 * 1024 * 1024  # bytes of all models; one call more of each that has none
LARGEST = MAX_BLOB  # bytes of an answer


class AnswerRoom:
    """Counts the bytes of each model's answers."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def take(self, model: str, size: int) -> None:
        """A call is begun whose answer has at most `size` bytes; of other jobs it is 0."""
        self._bytes[model] += size

    def give_back(self, model: str, size: int) -> None:
        """An answer is on the disk, or there is none."""
        self._bytes[model] -= size

    def taken(self, model: str) -> int:
        return self._bytes[model]

    def calls(self, model: str, reads: Counter[str]) -> int:
        """How many calls of a model may be read beside those that are: `reads` of each model.

        One at least of a model that has none, so that no model waits for another one's answers.
        """
        left = MAX_ANSWERS - sum(self._bytes.values()) - LARGEST * sum(reads.values())
        least = 0 if self._bytes[model] or reads[model] else 1
        return max(least, left // LARGEST)
