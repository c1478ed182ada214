"""What may happen beside a stream, and what the stream's reader sees of it."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def beside(name: str, command: Sequence[str], start: float = 1.0) -> Iterator[None]:
    """A peer at work, in a process of its own that has `start` seconds to begin."""
    child = subprocess.Popen(command)
    try:
        time.sleep(start)
        yield
        if child.poll() is not None:
            raise SystemExit(f"the peer {name!r} ended by itself: there is no figure")
    finally:
        child.kill()
        child.wait()


def gaps_between(deltas: Iterable[object]) -> list[float]:
    """Milliseconds between what comes."""
    times = [time.perf_counter() for _ in deltas]
    return [1000 * (after - before) for before, after in itertools.pairwise(times)]
