"""Spreads the work of the tier's threads over time, while sequences run.

A step of a model on a CPU computes on all cores, and lasts as long as the core that is late: work
of 0.2 ms on one of them makes it 0.8 ms longer. So the threads work in pieces of some hundredths of
a millisecond and rest between them: each step loses a little, instead of some of them a lot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

REST = 39.0  # times the processor time of its work, that a thread rests while sequences run
PIECE = 256 * 1024  # bytes that are copied, checked or written at a time
MIN_REST = 0.004  # seconds; a shorter rest is added to the next one
# The same while sequences run on the cores of this machine.
SMALL_PIECE = 32 * 1024
SMALL_MIN_REST = 0.001
POLL = 0.02  # seconds between two looks at whether the thread may go on


class Pace:
    """The rests of one thread, which alone uses it.

    `hurries`: whether there is no reason to rest; it is asked again in the middle of a rest.
    `on_cores`: whether steps compute on the cores that the thread uses, as they do without a GPU.
    """

    def __init__(self, hurries: Callable[[], bool], *, on_cores: bool = True) -> None:
        self._hurries, self._on_cores = hurries, on_cores
        self._min_rest = SMALL_MIN_REST if on_cores else MIN_REST
        self._owed = 0.0  # seconds of rest
        self._counted = 0.0  # processor time of the thread up to which `_owed` counts, seconds

    @property
    def piece(self) -> int:
        """How many bytes to copy, check or write until the next `rest`, at most."""
        return SMALL_PIECE if self._on_cores and not self._hurries() else PIECE

    def begin(self) -> None:
        """Work begins: what the thread did before is not counted."""
        self._owed, self._counted = 0.0, time.thread_time()

    def rest(self, most: float = math.inf) -> float:
        """Rests for the work since the last call, at most `most` seconds; the next call does more.

        Processor time counts, not time: a thread that waits for the disk disturbs nobody. Returns
        the seconds for which it need not rest again, 0 for a rest that was too short to be taken.
        """
        now = time.thread_time()
        self._owed += REST * (now - self._counted)
        self._counted = now
        left = min(self._owed, most)
        if left < self._min_rest:
            return 0.0
        self._owed -= left
        now = time.monotonic()
        until = now + left
        while now < until and not self._hurries():
            time.sleep(min(until - now, POLL))
            now = time.monotonic()
        return left

    def between(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yields pieces of work, with rests between them."""
        for piece in pieces:
            yield piece
            self.rest()
