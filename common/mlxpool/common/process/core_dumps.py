"""Core dumps of processes that hold keys: a dump has their memory, and with it the keys."""

from __future__ import annotations

import resource
import sys

# Linux writes no file with a limit below a page. With 1 it does not start the program of
# kernel.core_pattern either, which gets a dump at the limit 0.
LIMIT = 1 if sys.platform == "linux" else 0  # bytes


def turn_off() -> None:
    """Has the kernel make no core dump of this process and of its children."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (LIMIT if hard else 0, hard))
