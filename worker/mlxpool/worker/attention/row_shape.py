"""What the rows of a model keep of each token, layer by layer, and the bytes of it.

It is the same in every layout.
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

READS_AT_A_TIME = 3  # of integers that become numbers of the model, measured over slabs
Arrays = tuple[mx.array, ...]


class RowShape(Struct, frozen=True):
    """The shape of a row; `capacity` and `chunk` in tokens.

    `keeps_all`: layers with a window keep the tokens outside of it, too. `kv`: the setting of this
    name, which decides what is stored, see caches/stored.py.
    """

    caches: tuple[CacheSpec, ...]
    dtype: mx.Dtype
    capacity: int
    chunk: int = 2048
    keeps_all: bool = False
    kv: str = AUTO

    @property
    def quantised(self) -> bool:
        """Whether keys and values are stored as integers and scales."""
        return self.kv == INT8

    @property
    def all_full_attention(self) -> bool:
        """Whether all layers have keys and values of all tokens, without windows."""
        return all(isinstance(one, KeyValueSpec) and not one.window for one in self.caches)

    @property
    def has_windows(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(map(self.window, range(len(self.caches))))

    @property
    def fits_blocks(self) -> bool:
        """Whether no layer is recurrent, so that blocks of tokens can hold the row."""
        return not any(isinstance(one, RecurrentSpec) for one in self.caches)

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token in all layers."""
        return sum(cache.token_bytes(self.dtype.size, self.kv) for cache in self._kept)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a row besides its tokens."""
        size = self.dtype.size
        return sum(cache.fixed_bytes(size, self.chunk, self.kv) for cache in self._kept)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of each recurrent layer."""
        recurrent = [one for one in self.caches if isinstance(one, RecurrentSpec)]
        return sum(one.state_bytes for one in recurrent)

    def dequantised_bytes(self, tokens: int) -> int:
        """Returns the bytes of the numbers that MLX's operations make of integers at a time, where
        they read so many tokens of a layer at once: MLX begins to read the next ones before those
        that were read before are used and freed.
        """
        if not self.quantised:
            return 0
        caches = [one for one in self.caches if isinstance(one, KeyValueSpec)]
        widest = max(one.heads * (one.key_dim + one.value_dim) for one in caches)
        return READS_AT_A_TIME * widest * self.dtype.size * tokens

    def gathered_bytes(self, tokens: int) -> int:
        """Returns the bytes of what MLX's operations copy out of blocks at a time, where they read
        so many tokens of a layer at once, see `dequantised_bytes`.
        """
        caches = [one for one in self.caches if isinstance(one, KeyValueSpec)]
        each = (one.stored(self.kv) for one in caches)
        widest = max(sum(array.token_bytes(self.dtype.size) for array in arrays) for arrays in each)
        return READS_AT_A_TIME * widest * tokens

    def window(self, layer: int) -> int:
        """Returns the window of a layer in tokens; 0: none."""
        cache = self.caches[layer]
        return cache.window if isinstance(cache, KeyValueSpec) else 0

    def arrays_of(self, cache: KeyValueSpec | LatentSpec) -> tuple[StoredArray, ...]:
        """Returns the arrays that a layer with this cache stores."""
        return cache.stored(self.kv)

    def zeros(self, array: StoredArray, *shape: int) -> mx.array:
        """Returns zeros [*shape, size] of the numbers of a stored array."""
        dtype = int8_numbers.dtype_of(array.numbers, self.dtype)
        return mx.zeros((*shape, array.size), dtype=dtype)

    def stored(self, new: Arrays) -> Arrays:
        """Returns what is stored of new arrays [..., size] of a layer: itself, where nothing is
        quantised.
        """
        return int8_numbers.stored(new, self.dtype, self.kv)

    def read(self, held: Arrays) -> Arrays:
        """Returns what attention reads of stored arrays [..., size], see `stored`."""
        return int8_numbers.read(held, self.dtype, self.kv)

    def held_after(self, held: Arrays, before: mx.array) -> Arrays:
        """Returns stored arrays that are not read before `before` is computed.

        Where each reading of integers waits for the attention that uses the one before, the numbers
        that they become are freed as fast as others are allocated, see `dequantised_bytes`.
        """
        return tuple(mx.depends(list(held), [before])) if self.quantised else held

    @property
    def _kept(self) -> Sequence[CacheSpec]:
        if not self.keeps_all:
            return self.caches
        return [replace(c, window=0) if isinstance(c, KeyValueSpec) else c for c in self.caches]


def cache_kinds(shape: RowShape) -> list[CacheKind]:
    """Returns how the prefix cache keeps each layer."""
    return [_cache_kind(shape, layer) for layer in range(len(shape.caches))]


def _cache_kind(shape: RowShape, layer: int) -> CacheKind:
    if isinstance(shape.caches[layer], RecurrentSpec):
        return StateCache(layer)
    window = shape.window(layer)
    return WindowCache(layer, window) if window else FullCache(layer)
