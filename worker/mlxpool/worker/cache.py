"""Keys and values of one sequence: contiguous arrays per layer, grown in steps of 256 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.blocks import BLOCK

GROWTH = BLOCK  # tokens


@dataclass(frozen=True, slots=True)
class RowShape:
    """What one sequence's cache needs to know of a model; `capacity` in tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    capacity: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.size


class Row:
    """The cache of one sequence; its arrays are [1, KV, allocated, D].

    A row holds the only reference to its arrays, so that MLX writes them in place. Memory past
    `offset` is finite and never read.
    """

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.offset = 0  # tokens that every layer holds once the step in flight is done
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Puts keys, values [1, KV, n, D] behind `offset`; returns all up to there and them.

        `offset` itself moves by `advance`, after the last layer.
        """
        end = self.offset + keys.shape[2]
        self._reserve(layer, end)
        self._keys[layer][:, :, self.offset : end, :] = keys
        self._values[layer][:, :, self.offset : end, :] = values
        return self._keys[layer][:, :, :end, :], self._values[layer][:, :, :end, :]

    def part(self, layer: int, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values [1, KV, end - start, D] of tokens that the layer holds, as views."""
        return self._keys[layer][:, :, start:end, :], self._values[layer][:, :, start:end, :]

    def put(self, layer: int, parts: Sequence[tuple[mx.array, ...]], room: int) -> None:
        """Keys and values of each part, in one copy, into an empty row with space for `room`.

        Layers come in their order; `offset` itself moves by `advance`.
        """
        assert layer == len(self._keys) and self.offset == 0, "only an empty row is filled"
        tokens = sum(part[0].shape[2] for part in parts)
        spare = self._zeros(max(self._rounded(room) - tokens, 0))
        keys, values = zip(*parts, strict=True)
        self._keys.append(mx.concatenate([*keys, spare], axis=2))
        self._values.append(mx.concatenate([*values, spare], axis=2))

    def advance(self, count: int) -> None:
        """`count` more tokens are written in every layer."""
        self.offset += count

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on; `to` not above `offset` forgets nothing less."""
        self.offset = min(self.offset, max(to, 0))

    def release(self) -> None:
        """Its arrays go with the last reference to them."""
        self._keys, self._values, self.offset = [], [], 0

    def arrays(self) -> list[mx.array]:
        """Every array, for one evaluation of the whole row."""
        return [*self._keys, *self._values]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return sum(array.nbytes for array in self.arrays())

    def _reserve(self, layer: int, end: int) -> None:
        if end > self.shape.capacity:
            raise ValueError(
                f"a row of {self.shape.capacity} tokens was asked to hold {end}; "
                "the caller has to end a sequence at the context"
            )
        if layer == len(self._keys):
            self._keys.append(self._zeros(self._rounded(end)))
            self._values.append(self._zeros(self._rounded(end)))
        missing = self._rounded(end) - self._keys[layer].shape[2]
        if missing > 0:
            self._keys[layer] = self._grown(self._keys[layer], missing)
            self._values[layer] = self._grown(self._values[layer], missing)

    def _rounded(self, end: int) -> int:
        return min(-(-end // GROWTH) * GROWTH, self.shape.capacity)

    def _grown(self, array: mx.array, missing: int) -> mx.array:
        return mx.concatenate([array, self._zeros(missing)], axis=2)

    def _zeros(self, tokens: int) -> mx.array:
        shape = self.shape
        return mx.zeros((1, shape.kv_heads, tokens, shape.head_dim), dtype=shape.dtype)
