"""Copies the engine's memory and prefix-cache figures into the progress, for the heartbeats."""

from __future__ import annotations

from time import monotonic

from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.interface import Engine
from mlxpool.worker.scheduling.block_manager import BLOCK_SIZE

REPORT_INTERVAL = 0.1  # seconds; reading the figures takes time


class MemoryReport:
    """Refreshes `Progress.memory` and `Progress.prefix`."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine = engine
        self._progress = progress
        self._refreshed = 0.0

    def refresh(self, now: float) -> None:
        """Refresh the figures unless they are younger than REPORT_INTERVAL."""
        if now - self._refreshed >= REPORT_INTERVAL:
            self._refreshed = now
            self._read()

    def refresh_now(self) -> None:
        """Refresh the figures, however young they are."""
        self._refreshed = monotonic()
        self._read()

    def _read(self) -> None:
        memory = self._engine.memory()
        self._progress.memory = {
            "weights": memory.weights,
            "kv": memory.kv,
            "prefix": memory.prefix,
            "active": memory.active,
            "cache": memory.cache,
            "peak": memory.peak,
            "limit": memory.limit,
            "device_free": memory.device_free,
            "capacity_tokens": self._engine.blocks * BLOCK_SIZE,
            "preemptions": self._progress.preemptions,
        }
        counters = getattr(self._engine, "prefix", None)
        if counters is not None:
            self._progress.prefix = {
                "hits": counters.hits,
                "misses": counters.misses,
                "tokens": counters.tokens,
                "evictions": counters.evictions,
            }
