"""Chooses the idle models that are unloaded to free memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.broker.models.model import Model


def to_evict(models: Iterable[Model], missing: int) -> list[Model]:
    """Idle models whose workers free `missing` bytes, least recently used first; [] if they cannot.

    Models that the settings keep for ever and workers that dialled in are not evicted; those that
    a client keeps for ever go last.
    """
    idle = [m for m in models if m.idle_since and m.local_workers and m.config.keep_alive >= 0]
    chosen, freed = [], 0
    for model in sorted(idle, key=lambda m: (m.keep_alive < 0, m.idle_since)):
        if freed >= missing:
            break
        chosen.append(model)
        freed += model.need * len(model.local_workers)
    return chosen if freed >= missing else []
