"""Runs a peer process beside a stream, and measures the gaps of the stream."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running(name: str, command: Sequence[str], start: float = 1.0) -> Iterator[None]:
    """Run the command meanwhile, after `start` seconds to begin. Raises SystemExit if it ends."""
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
    """Milliseconds between consecutive items."""
    times = [time.perf_counter() for _ in deltas]
    return [1000 * (after - before) for before, after in itertools.pairwise(times)]
