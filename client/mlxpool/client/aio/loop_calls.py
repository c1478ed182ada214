"""Calls of the connection's thread into an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have the loop run a call; a closed loop runs nothing."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass


def put_in_loop(loop: asyncio.AbstractEventLoop, items: asyncio.Queue[Item], item: Item) -> None:
    """Have the loop put an item into its queue; a closed loop drops it."""
    call_in_loop(loop, lambda: items.put_nowait(item))
