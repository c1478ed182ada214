"""The memory of one sequence where mlx-lm's own cache objects keep it, for our prefix cache.

Objects of the classes in zoo.KINDS can be copied out and in; where a model has any other, nothing
of it is kept for later prompts. The face is that of prefix_kinds.RecurrentRow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

Arrays = tuple[mx.array, ...]


def flat(caches: Iterable[Any]) -> list[Any]:
    """The caches, those inside of lists of caches, too."""
    found: list[Any] = []
    for cache in caches:
        found += flat(cache.caches) if type(cache).__name__ == "CacheList" else [cache]
    return found


def class_of(cache: Any) -> str:
    """The whole name of its class."""
    return f"{type(cache).__module__}.{type(cache).__name__}"


class ZooRow:
    """One sequence's caches, as mlx-lm's models take them."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self.caches = make()
        self.offset = 0  # tokens that every cache holds
        self.logits: mx.array | None = None  # [1, V] after them, if they were computed here

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every array, for one evaluation of the whole row."""
        found: list[mx.array] = []
        for cache in flat(self.caches):
            found += (one for one in _leaves(vars(cache)) if isinstance(one, mx.array))
        return found

    def advance(self, count: int) -> None:
        """Every cache has `count` tokens more."""
        self.offset += count
        self.logits = None

    def part(self, layer: int, start: int, end: int) -> Arrays:
        """Tokens [start, end) of a KVCache: keys and values [1, KV, end - start, D], views."""
        cache = flat(self.caches)[layer]
        return cache.keys[..., start:end, :], cache.values[..., start:end, :]

    def put(self, layer: int, parts: Sequence[Arrays], room: int) -> None:
        """What `part` gave, into the KVCache of an empty row; it grows by itself later."""
        cache = flat(self.caches)[layer]
        keys, values = (mx.concatenate(list(side), axis=2) for side in zip(*parts, strict=True))
        cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]

    def state(self, layer: int) -> Arrays:
        """All that a cache of another class holds."""
        cache = flat(self.caches)[layer]
        if type(cache).__name__ == "ArraysCache":
            return tuple(mx.zeros((0,)) if one is None else one for one in cache.cache)
        return cache.keys, cache.values, mx.array([cache.offset, cache._idx])

    def put_state(self, layer: int, state: Arrays) -> None:
        """What `state` gave, into the cache of an empty row."""
        cache = flat(self.caches)[layer]
        if type(cache).__name__ == "ArraysCache":
            cache.cache = [None if one.size == 0 else one[...] for one in state]
            return
        keys, values, places = state
        cache.keys, cache.values = keys[...], values[...]  # it writes them in place
        cache.offset, cache._idx = (int(place) for place in places.tolist())  # type: ignore[union-attr, arg-type]

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on, which only KVCaches can."""
        if to < self.offset:
            for cache in flat(self.caches):
                cache.trim(self.offset - to)
            self.offset, self.logits = to, None

    def release(self) -> None:
        """Its arrays go with the last reference to them."""
        self.caches, self.offset, self.logits = self._make(), 0, None


def _leaves(value: Any) -> Iterable[Any]:
    """What is in a cache object's attributes, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]
