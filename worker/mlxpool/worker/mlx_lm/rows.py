"""A KV row whose keys, values and states are in mlx-lm's own cache objects.

Objects of the classes in weights.mlx_lm_models.CACHE_KINDS can be copied to and from the prefix
cache. A model with cache objects of any other class has no prefix cache. Implements
caches.kinds.RecurrentRow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxpool.worker.attention.row_copies import RowStore

Arrays = tuple[mx.array, ...]


def flatten(caches: Iterable[Any]) -> list[Any]:
    """Returns the cache objects of nested lists in one list."""
    objects: list[Any] = []
    for cache in caches:
        objects += flatten(cache.caches) if type(cache).__name__ == "CacheList" else [cache]
    return objects


def class_name(cache: Any) -> str:
    """Returns the module and name of a cache's class."""
    return f"{type(cache).__module__}.{type(cache).__name__}"


class MlxLmRow:
    """The caches of one sequence, as mlx-lm's models read them."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self.caches = make()
        self.offset = 0  # tokens that each cache holds
        self.logits: mx.array | None = None  # [1, V] after the last token, if computed

    @property
    def nbytes(self) -> int:
        """The allocated bytes, including unused bytes."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Returns all arrays of the KV row, to evaluate them together."""
        arrays: list[mx.array] = []
        for cache in flatten(self.caches):
            arrays += (leaf for leaf in _leaves(vars(cache)) if isinstance(leaf, mx.array))
        return arrays

    def advance(self, count: int) -> None:
        """Records that each cache has `count` more tokens."""
        self.offset += count
        self.logits = None

    def part(self, layer: int, start: int, end: int) -> Arrays:
        """Returns views of a KVCache's tokens [start, end): keys and values [1, KV, n, D]."""
        cache = flatten(self.caches)[layer]
        return cache.keys[..., start:end, :], cache.values[..., start:end, :]

    def put(self, layer: int, parts: Sequence[Arrays], capacity: int) -> None:
        """Writes keys and values, as the method `part` returns them, into an empty row's KVCache.

        Ignores `capacity`, because a KVCache grows by itself.
        """
        cache = flatten(self.caches)[layer]
        keys, values = (mx.concatenate(list(side), axis=2) for side in zip(*parts, strict=True))
        cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]

    def state(self, layer: int) -> Arrays:
        """Returns all arrays of a cache that is not a KVCache."""
        cache = flatten(self.caches)[layer]
        if type(cache).__name__ == "ArraysCache":
            return tuple(mx.zeros((0,)) if array is None else array for array in cache.cache)
        return cache.keys, cache.values, mx.array([cache.offset, cache._idx])

    def put_state(self, layer: int, state: Arrays) -> None:
        """Writes the arrays of `state` into the cache of an empty KV row."""
        cache = flatten(self.caches)[layer]
        if type(cache).__name__ == "ArraysCache":
            cache.cache = [None if array.size == 0 else array[...] for array in state]
            return
        keys, values, places = state
        cache.keys, cache.values = keys[...], values[...]  # copies: the cache writes in place
        cache.offset, cache._idx = (int(place) for place in places.tolist())  # type: ignore[union-attr, arg-type]

    def trim(self, to: int) -> None:
        """Removes the tokens from `to` on; only possible if all caches are KVCaches."""
        if to < self.offset:
            for cache in flatten(self.caches):
                cache.trim(self.offset - to)
            self.offset, self.logits = to, None

    def release(self) -> None:
        """Empties the KV row; its arrays are freed with their last reference."""
        self.caches, self.offset, self.logits = self._make(), 0, None


class MlxLmLayout:
    """The RowLayout of MlxLmRows: each KV row has its own arrays, without shared blocks."""

    holds_prefixes = False
    blocks = 0
    free_blocks = None

    def __init__(self, store: RowStore[MlxLmRow]) -> None:
        self.store = store
        self.fixed = 0  # bytes of a KV row besides its tokens

    def blocks_of(self, row: MlxLmRow) -> int:
        """Returns 0: KV rows share no blocks."""
        return 0

    def left(self, rows: Iterable[MlxLmRow], whole: int) -> int:
        """Returns the bytes that `rows` do not use, of a capacity of `whole` bytes.

        See RowLayout.
        """
        return whole - sum(max(0, row.nbytes - self.fixed) for row in rows)

    def kv_bytes(self, rows: Iterable[MlxLmRow]) -> tuple[int, int]:
        """Returns the bytes of all `rows`, and 0 as the bytes of free blocks; see RowLayout."""
        return sum(row.nbytes for row in rows), 0


def _leaves(value: Any) -> Iterable[Any]:
    """Returns the values in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]
