"""Calls of the connection's thread into an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have the loop run a call; a closed loop runs nothing."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass
