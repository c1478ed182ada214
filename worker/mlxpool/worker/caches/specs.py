"""The bytes that each layer of a model stores for a sequence, to compute later tokens."""

from __future__ import annotations

import math
from typing import TypeAlias

from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO, StoredArray, keys_and_values

ROLLBACK_STEPS = 2  # steps: an unused step submitted ahead, and the step whose token is drawn again
WINDOW_SLACK = 256  # tokens between two moves of a window's tokens to the front of their array


def window_capacity(window: int, chunk: int) -> int:
    """Returns the capacity in tokens of a sliding window's array: the window, then a chunk."""
    return window + max(chunk, WINDOW_SLACK)


class KeyValueSpec(Struct, frozen=True):
    """The cache of a layer: keys [heads, key_dim] and values [heads, value_dim] of each token.

    If `window` is not 0, a token sees `window` tokens, itself included, and older tokens are
    dropped. If `window` is 0, a token sees all tokens.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    def stored(self, kv: str = AUTO) -> tuple[StoredArray, ...]:
        """Returns the arrays that the layer stores with this value of the setting `kv`."""
        return keys_and_values(self.heads, self.key_dim, self.value_dim, kv)

    def token_bytes(self, item: int, kv: str = AUTO) -> int:
        """Returns the bytes of one more token, if the model's numbers have `item` bytes."""
        return 0 if self.window else self._bytes(item, kv)

    def fixed_bytes(self, item: int, chunk: int, kv: str = AUTO) -> int:
        """Returns the constant bytes of a sequence; `chunk`: the most tokens of a chunk."""
        return window_capacity(self.window, chunk) * self._bytes(item, kv) if self.window else 0

    def _bytes(self, item: int, kv: str) -> int:
        return sum(array.token_bytes(item) for array in self.stored(kv))


class LatentSpec(Struct, frozen=True):
    """The cache of a layer: one latent vector [dim] of each token, shared by all heads (MLA).

    The first `rank` numbers are the compressed keys and values, the others the rotated key.
    """

    dim: int
    rank: int

    def stored(self, kv: str = AUTO) -> tuple[StoredArray, ...]:
        """Returns the array of latents. They always have the model's dtype; `kv` is ignored."""
        return (StoredArray("latents", 1, self.dim),)

    def token_bytes(self, item: int, kv: str = AUTO) -> int:
        """Returns the bytes of one more token, if the model's numbers have `item` bytes."""
        return self.dim * item

    def fixed_bytes(self, item: int, chunk: int, kv: str = AUTO) -> int:
        """Returns the constant bytes of a sequence: 0, as all memory belongs to tokens."""
        return 0


class RecurrentSpec(Struct, frozen=True):
    """The cache of a layer: a state of float32 arrays of `shapes`, at any length of the sequence.

    The initial state has only zeros.
    """

    shapes: tuple[tuple[int, ...], ...]

    def token_bytes(self, item: int, kv: str = AUTO) -> int:
        """Returns 0: a recurrent state does not grow with tokens."""
        return 0

    def fixed_bytes(self, item: int, chunk: int, kv: str = AUTO) -> int:
        """Returns the constant bytes of a sequence: its state, and earlier states for rollbacks."""
        return (1 + ROLLBACK_STEPS) * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """The bytes of one state."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)


CacheSpec: TypeAlias = KeyValueSpec | LatentSpec | RecurrentSpec
