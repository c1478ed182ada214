"""Spreads the work of the disk tier's threads over time, while sequences run.

On a CPU, a step of a model computes on all cores and ends with the slowest core: 0.2 ms of other
work on one core makes the step 0.8 ms longer. So the threads work in pieces of some hundredths of a
millisecond and pause between pieces. Then each step is delayed a little, instead of a few steps a
lot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

REST = 39.0  # seconds of pause per second of processor time, while sequences run
PIECE = 256 * 1024  # bytes of a piece of work: copied, checked or written
MIN_REST = 0.004  # seconds of the shortest pause; a shorter pause is added to the next
# PIECE and MIN_REST if sequences run on the processor cores that the thread uses.
SMALL_PIECE = 32 * 1024
SMALL_MIN_REST = 0.001
POLL = 0.02  # seconds between two checks whether a pause may end


class Pace:
    """The pauses (rests) of one thread; used only by that thread.

    `hurries` returns whether the thread may work without pauses; it is also called during a pause.
    `on_cores`: whether the model's steps compute on the processor cores that the thread uses; True
    without a GPU.
    """

    def __init__(self, hurries: Callable[[], bool], *, on_cores: bool = True) -> None:
        self._hurries, self._on_cores = hurries, on_cores
        self._min_rest = SMALL_MIN_REST if on_cores else MIN_REST
        self._owed = 0.0  # seconds of pause that are due
        self._counted = 0.0  # seconds of the thread's processor time that `_owed` includes

    @property
    def piece(self) -> int:
        """The most bytes to copy, check or write before the next `rest`."""
        return SMALL_PIECE if self._on_cores and not self._hurries() else PIECE

    def begin(self) -> None:
        """Begins to count the thread's work; earlier work leads to no pause."""
        self._owed, self._counted = 0.0, time.thread_time()

    def rest(self, most: float = math.inf) -> float:
        """Pauses in proportion to the work since the last call, for at most `most` seconds.

        Work is measured in processor time, because a thread that waits for the disk does not delay
        steps. Pause time that exceeds `most`, or that is too short for a pause, is added to the
        next pause. Returns the planned seconds of this pause. A pause that ends early, because the
        thread may hurry, is not made up for later.
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
        """Yields pieces of work, with a pause between two pieces."""
        for piece in pieces:
            yield piece
            self.rest()
