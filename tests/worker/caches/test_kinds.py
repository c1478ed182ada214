"""Tests how far the cache of a layer can be trimmed. Needs no MLX."""

from __future__ import annotations

from mlxpool.worker.caches.kinds import (
    FullCache,
    StateCache,
    WindowCache,
    can_rewind,
    lowest_rewind,
)


def test_each_cache_kind_has_a_lowest_rewind() -> None:
    assert [lowest_rewind(WindowCache(0, 4), end) for end in (3, 4, 9)] == [0, 4, 9]
    assert [lowest_rewind(StateCache(0), 5), lowest_rewind(FullCache(0), 5)] == [5, 0]
    window, state = WindowCache(0, 4), StateCache(0)
    assert can_rewind(window, 3, 1) and not can_rewind(window, 9, 8)
    assert can_rewind(state, 5, 5) and not can_rewind(state, 5, 4)
    assert can_rewind(FullCache(0), 9, 0)
