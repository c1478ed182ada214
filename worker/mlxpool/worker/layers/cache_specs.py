"""What each layer keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from mlxpool.worker.layers.interface import (
    Shape,
)

ROLLBACK_STEPS = 2  # a step ahead that was for nothing, and the one whose token is drawn again
WINDOW_SLACK = 256  # tokens between two moves of a window's tokens to the front of their array


def window_capacity(window: int, chunk: int) -> int:
    """Tokens that the array of a window holds: what the first of a chunk sees, and the chunk."""
    return window + max(chunk, WINDOW_SLACK)


@dataclass(frozen=True, slots=True)
class KeyValueSpec:
    """A layer that keeps keys [heads, key_dim] and values [heads, value_dim] of each token.

    A token sees `window` tokens, itself included, and no others need be kept; 0: it sees all.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    def token_bytes(self, item: int) -> int:
        """What one token more takes, in numbers of `item` bytes."""
        return 0 if self.window else self._line * item

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """What a sequence takes besides, whatever its length, in chunks of up to `chunk` tokens."""
        return window_capacity(self.window, chunk) * self._line * item if self.window else 0

    @property
    def _line(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A layer that keeps one line [dim] of each token, which all heads read (MLA).

    Its first `rank` numbers are what scores weigh.
    """

    dim: int
    rank: int

    def token_bytes(self, item: int) -> int:
        """See KeyValueSpec."""
        return self.dim * item

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """See KeyValueSpec."""
        return 0


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A layer that keeps a state of float32 arrays of these shapes, whatever the length.

    It begins with zeros.
    """

    shapes: tuple[Shape, ...]

    def token_bytes(self, item: int) -> int:
        """See KeyValueSpec."""
        return 0

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """See KeyValueSpec. One state, and those before it, for tokens that are taken back."""
        return (1 + ROLLBACK_STEPS) * 4 * sum(math.prod(shape) for shape in self.shapes)


CacheSpec: TypeAlias = KeyValueSpec | LatentSpec | RecurrentSpec
