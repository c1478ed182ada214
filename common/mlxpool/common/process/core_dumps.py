"""Core dumps of processes that hold keys: a dump would have the keys in the process's memory."""

from __future__ import annotations

import resource
import sys

# With a limit below a page Linux writes no file. At the limit 0 it still starts the program of
# kernel.core_pattern with a dump; at the limit 1 it does not.
LIMIT = 1 if sys.platform == "linux" else 0  # bytes


def turn_off() -> None:
    """Turn off core dumps of this process and of its children."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (LIMIT if hard else 0, hard))
