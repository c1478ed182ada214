"""Makes the prefix cache for a mode."""

from __future__ import annotations

from typing import TypeVar

from mlxpool.worker.prefix.cache import PrefixCache, SingleCache
from mlxpool.worker.prefix.store import PrefixRow, Store
from mlxpool.worker.prefix.tree_cache import TreeCache

E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)

MODES = ("tree", "single", "off")


def make_prefix_cache(
    mode: str, store: Store[R, E, S], budget: int, *, by_owner: bool = False
) -> PrefixCache[R]:
    """Makes the cache for a mode of MODES, with a budget in bytes.

    `by_owner`: a sequence finds only entries of its own owner. Raises ValueError for an unknown
    mode or a negative budget.
    """
    if mode not in MODES:
        raise ValueError(f"prefix cache mode is {mode!r}, must be one of {', '.join(MODES)}")
    cache: PrefixCache[R]
    if mode == "tree":
        cache = TreeCache(store, budget)
    else:
        cache = SingleCache(store, budget) if mode == "single" else PrefixCache(store, budget)
    cache.by_owner = by_owner
    return cache
