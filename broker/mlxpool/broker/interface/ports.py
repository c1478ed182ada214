"""The one way into the core for everything around it."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.interface.events import Event

# Lets the core handle an event at a time in seconds, then performs the actions that it decided.
Perform = Callable[[Event, float], None]
