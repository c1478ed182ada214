"""The shape of KV rows, one row per sequence: each layer's stored arrays, and their bytes.

The shape does not depend on the memory layout, which decides whether rows share arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.attention import int8_numbers
from mlxpool.worker.caches.kinds import CacheKind, FullCache, StateCache, WindowCache
from mlxpool.worker.caches.specs import CacheSpec, KeyValueSpec, LatentSpec, RecurrentSpec
from mlxpool.worker.caches.stored import AUTO, INT8, StoredArray

READS_AT_A_TIME = 3  # reads with dequantised numbers in memory at a time, measured with slabs
Arrays = tuple[mx.array, ...]


class RowShape(Struct, frozen=True):
    """The shape of a KV row; `capacity` and `chunk` in tokens.

    `keeps_all`: layers with a window also keep the tokens outside of the window. `kv`: keys and
    values are stored in `dtype` (`auto`), or as 8-bit integers with scales (`int8`).
    """

    caches: tuple[CacheSpec, ...]
    dtype: mx.Dtype
    capacity: int
    chunk: int = 2048
    keeps_all: bool = False
    kv: str = AUTO

    @property
    def quantised(self) -> bool:
        """True if keys and values are stored as integers and scales."""
        return self.kv == INT8

    @property
    def all_full_attention(self) -> bool:
        """True if all layers have keys and values of all tokens, without windows."""
        return all(isinstance(cache, KeyValueSpec) and not cache.window for cache in self.caches)

    @property
    def has_windows(self) -> bool:
        """True if any layer has a sliding window."""
        return any(map(self.window, range(len(self.caches))))

    @property
    def fits_blocks(self) -> bool:
        """True if no layer is recurrent, so that blocks of tokens can hold the row."""
        return not any(isinstance(cache, RecurrentSpec) for cache in self.caches)

    @property
    def token_bytes(self) -> int:
        """The bytes of one more token in all layers."""
        return sum(cache.token_bytes(self.dtype.size, self.kv) for cache in self._kept)

    @property
    def fixed_bytes(self) -> int:
        """The bytes of a row that do not depend on its number of tokens."""
        size = self.dtype.size
        return sum(cache.fixed_bytes(size, self.chunk, self.kv) for cache in self._kept)

    @property
    def state_bytes(self) -> int:
        """The bytes of one state of all recurrent layers."""
        recurrent = [cache for cache in self.caches if isinstance(cache, RecurrentSpec)]
        return sum(cache.state_bytes for cache in recurrent)

    def dequantised_bytes(self, tokens: int) -> int:
        """Returns the most memory, in bytes, that dequantised numbers take at one time.

        `tokens`: the number of tokens of a layer that MLX's operations read together. MLX begins
        the next reading before the previous reading's numbers are used and freed, so the numbers of
        several readings are in memory.
        """
        if not self.quantised:
            return 0
        caches = [cache for cache in self.caches if isinstance(cache, KeyValueSpec)]
        widest = max(cache.heads * (cache.key_dim + cache.value_dim) for cache in caches)
        return READS_AT_A_TIME * widest * self.dtype.size * tokens

    def gathered_bytes(self, tokens: int) -> int:
        """Returns the most memory, in bytes, that copies of block contents take at one time.

        `tokens`: the number of tokens of a layer that MLX's operations read together, see
        `dequantised_bytes`.
        """
        caches = [cache for cache in self.caches if isinstance(cache, KeyValueSpec)]
        each = (cache.stored(self.kv) for cache in caches)
        widest = max(sum(array.token_bytes(self.dtype.size) for array in arrays) for arrays in each)
        return READS_AT_A_TIME * widest * tokens

    def window(self, layer: int) -> int:
        """Returns the window of a layer in tokens; 0: no window."""
        cache = self.caches[layer]
        return cache.window if isinstance(cache, KeyValueSpec) else 0

    def arrays_of(self, cache: KeyValueSpec | LatentSpec) -> tuple[StoredArray, ...]:
        """Returns the arrays that a layer with this cache stores."""
        return cache.stored(self.kv)

    def zeros(self, array: StoredArray, *shape: int) -> mx.array:
        """Returns zeros [*shape, size] in the dtype of a stored array."""
        dtype = int8_numbers.dtype_of(array.numbers, self.dtype)
        return mx.zeros((*shape, array.size), dtype=dtype)

    def stored(self, new: Arrays) -> Arrays:
        """Returns a layer's new arrays [..., size] in their stored form."""
        return int8_numbers.stored(new, self.dtype, self.kv)

    def read(self, held: Arrays) -> Arrays:
        """Returns the numbers in stored arrays [..., size], the inverse of `stored`."""
        return int8_numbers.read(held, self.dtype, self.kv)

    def held_after(self, held: Arrays, before: mx.array) -> Arrays:
        """Returns the stored arrays, to be read only after `before` is computed.

        If each reading of integers waits for the attention over the previous reading, dequantised
        numbers are freed as fast as new numbers are allocated, see `dequantised_bytes`.
        """
        return tuple(mx.depends(list(held), [before])) if self.quantised else held

    @property
    def _kept(self) -> Sequence[CacheSpec]:
        if not self.keeps_all:
            return self.caches
        return [replace(c, window=0) if isinstance(c, KeyValueSpec) else c for c in self.caches]


def cache_kinds(shape: RowShape) -> list[CacheKind]:
    """Returns the cache kind of each layer, for the prefix cache."""
    return [_cache_kind(shape, layer) for layer in range(len(shape.caches))]


def _cache_kind(shape: RowShape, layer: int) -> CacheKind:
    if isinstance(shape.caches[layer], RecurrentSpec):
        return StateCache(layer)
    window = shape.window(layer)
    return WindowCache(layer, window) if window else FullCache(layer)
