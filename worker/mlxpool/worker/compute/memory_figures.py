"""The figures of a worker's memory in heartbeats: parts that add up to a total, and peaks.

The compute thread reads the memory after steps, at most once every READ_INTERVAL. The main thread
sends the newest figures with each heartbeat. A peak is the largest value since the last heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from mlxpool.worker.engine.engine import MemoryUse

READ_INTERVAL = 0.1  # seconds between two readings of the memory, because a reading takes time
PARTS = ("weights", "kv", "prefix", "compute")  # the figures that add up to `total`


class MemoryFigures:
    """Memory figures in bytes, written by the compute thread and taken by the main thread.

    `latest` has the figures of the newest reading, taken between two steps.
    """

    def __init__(self) -> None:
        self.latest: dict[str, int] = {}
        self._read_at = 0.0  # monotonic seconds
        self._kept = 0  # bytes of weights, rows, prefixes and images at the newest reading
        self._highest = 0  # peak since the start
        self._lock = Lock()  # guards the attributes below
        self._peak = 0  # peak since the last heartbeat
        self._compute = 0  # the most bytes of a step since the last heartbeat

    def loaded(self, size: int) -> None:
        """Sets the figures to `size` bytes of loaded weights and nothing else."""
        self.latest = _summed({**dict.fromkeys(PARTS, 0), "weights": size, "active": size})

    def is_due(self, now: float) -> bool:
        """Returns whether READ_INTERVAL has passed since the newest reading."""
        return now - self._read_at >= READ_INTERVAL

    def read(self, use: MemoryUse, now: float) -> None:
        """Stores a reading of an engine's memory; `now`: monotonic seconds."""
        self._read_at = now
        kept = use.weights + use.draft + use.kv + use.kv_free + use.prefix + use.images
        peak = max(use.peak, use.active)
        self._highest = max(self._highest, peak)
        self.latest = {
            "weights": use.weights + use.draft,
            "draft": use.draft,
            "kv": use.kv + use.kv_free,
            "kv_used": use.kv,
            "prefix": use.prefix + use.images,
            "images": use.images,
            "compute": max(0, use.active + use.cache - kept),
            "active": use.active,
            "cache": use.cache,
            "highest": self._highest,
            "limit": use.limit,
            "device_free": use.device_free,
        }
        # Memory that rows took or freed since the last reading does not count as memory of a step.
        needed = peak - max(kept, self._kept)
        self._kept = kept
        with self._lock:
            self._peak = max(self._peak, peak)
            self._compute = max(self._compute, needed)

    def take(self) -> dict[str, int]:
        """Returns the figures for a heartbeat, and resets the peaks."""
        with self._lock:
            peak, compute = self._peak, self._compute
            self._peak = self._compute = 0
        latest = self.latest
        if not latest:
            return {}
        return _summed(
            {
                **latest,
                "compute": max(latest["compute"], compute),
                "peak": max(latest["active"], peak),
            }
        )


def _summed(figures: Mapping[str, int]) -> dict[str, int]:
    return {**figures, "total": sum(figures[part] for part in PARTS)}
