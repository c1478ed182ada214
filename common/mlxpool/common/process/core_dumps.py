"""Turns off core dumps of processes that hold keys: a dump would contain the keys."""

from __future__ import annotations

import resource
import sys

# With a limit below the size of a page Linux writes no core file. At the limit 0 Linux still pipes
# the dump to the program of kernel.core_pattern; at the limit 1 it does not.
LIMIT = 1 if sys.platform == "linux" else 0  # bytes


def turn_off() -> None:
    """Turns off core dumps of this process and of its children."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (LIMIT if hard else 0, hard))
