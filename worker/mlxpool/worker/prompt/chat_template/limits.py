"""Bounds of the process that renders chat templates."""

from __future__ import annotations

MAX_RENDERER_MEMORY = 2**30  # bytes of address space
RENDERER_NICENESS = 10  # so that it gives way to the threads that decode
RENDER_TIMEOUT = 2.0  # seconds for one chat
NORMAL_PRIORITY_TIME = 0.05  # seconds of a core, after which a chat is rendered in SCHED_IDLE
