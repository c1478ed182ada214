"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def release_free_memory() -> None:
    """Return freed memory to the operating system, where the C library can (glibc)."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
