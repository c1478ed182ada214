"""The memory of one sequence where each has arrays of its own: one object for each layer.

Arrays grow in steps of GROWTH tokens. A layer holds the only reference to its arrays, so that MLX
writes them in place. Memory past the last token is finite and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlxpool.worker.layers.cache_specs import (
    ROLLBACK_STEPS,
    CacheSpec,
    KeyValueSpec,
    LatentSpec,
    RecurrentSpec,
    window_capacity,
)
from mlxpool.worker.scheduling.block_manager import BLOCK

GROWTH = BLOCK  # tokens
Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class RowShape:
    """What one sequence's cache needs to know of a model; `capacity` and `chunk` in tokens.

    `whole`: what a token leaves is kept in every layer, also where a window sees it no more.
    """

    caches: tuple[CacheSpec, ...]
    dtype: mx.Dtype
    capacity: int
    chunk: int = 2048
    whole: bool = False

    @property
    def plain(self) -> bool:
        """Whether every layer keeps the keys and values of every token."""
        return all(isinstance(one, KeyValueSpec) and not one.window for one in self.caches)

    @property
    def windowed(self) -> bool:
        """Whether some layer sees its last tokens alone."""
        return any(map(self.window, range(len(self.caches))))

    @property
    def paged(self) -> bool:
        """Whether every layer has something of every token, so that blocks can hold it all."""
        return not any(isinstance(one, RecurrentSpec) for one in self.caches)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token more takes in all layers."""
        return sum(cache.token_bytes(self.dtype.size) for cache in self._kept)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a sequence takes whatever its length."""
        return sum(cache.fixed_bytes(self.dtype.size, self.chunk) for cache in self._kept)

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees; 0: all."""
        cache = self.caches[layer]
        return cache.window if isinstance(cache, KeyValueSpec) else 0

    @property
    def _kept(self) -> Sequence[CacheSpec]:
        if not self.whole:
            return self.caches
        return [replace(c, window=0) if isinstance(c, KeyValueSpec) else c for c in self.caches]


class FullLayer:
    """Every token: arrays [1, heads, allocated, size], one for each of `sizes`."""

    def __init__(self, heads: int, sizes: tuple[int, ...], shape: RowShape) -> None:
        self._heads, self._sizes, self._shape = heads, sizes, shape
        self.arrays: Arrays = ()

    def write(self, at: int, new: Arrays) -> Arrays:
        """Puts arrays [1, heads, n, size] behind `at` tokens; returns all up to there and them."""
        end = at + new[0].shape[2]
        self._reserve(end)
        for held, part in zip(self.arrays, new, strict=True):
            held[:, :, at:end, :] = part
        return self.part(0, end, end)

    def part(self, start: int, end: int, offset: int) -> Arrays:
        """Tokens [start, end), as views; `offset` is how many there are."""
        return tuple(array[:, :, start:end, :] for array in self.arrays)

    def put(self, parts: Sequence[Arrays], room: int) -> None:
        """Each part's tokens, in one copy, with space for `room` in all."""
        tokens = sum(part[0].shape[2] for part in parts)
        spare = max(self._rounded(room) - tokens, 0)
        self.arrays = tuple(
            mx.concatenate([*side, self._zeros(size, spare)], axis=2)
            for size, side in zip(self._sizes, zip(*parts, strict=True), strict=True)
        )

    def trim(self, offset: int, to: int) -> None:
        """Of `offset` tokens those from `to` on are forgotten."""

    def _reserve(self, end: int) -> None:
        if end > self._shape.capacity:
            raise ValueError(
                f"a row of {self._shape.capacity} tokens was asked to hold {end}; "
                "the caller has to end a sequence at the context"
            )
        room = self._rounded(end)
        if not self.arrays:
            self.arrays = tuple(self._zeros(size, room) for size in self._sizes)
        missing = room - self.arrays[0].shape[2]
        if missing > 0:
            self.arrays = tuple(
                mx.concatenate([array, self._zeros(size, missing)], axis=2)
                for size, array in zip(self._sizes, self.arrays, strict=True)
            )

    def _rounded(self, end: int) -> int:
        return min(-(-end // GROWTH) * GROWTH, self._shape.capacity)

    def _zeros(self, size: int, tokens: int) -> mx.array:
        return mx.zeros((1, self._heads, tokens, size), dtype=self._shape.dtype)


class WindowLayer:
    """The last tokens alone: arrays [1, heads, room, size], of which [_first, _last) are held.

    At the end of the arrays what is still seen moves to their front. One token more than that
    stays, for a token that is taken back.
    """

    def __init__(self, spec: KeyValueSpec, shape: RowShape) -> None:
        self._spec, self._shape = spec, shape
        self._sizes = (spec.key_dim, spec.value_dim)
        self._room = min(window_capacity(spec.window, shape.chunk), shape.capacity)
        self._first = self._last = 0
        self.arrays: Arrays = ()

    def write(self, at: int, new: Arrays) -> Arrays:
        """Puts new tokens behind `at`; returns what the first of them still sees, and them."""
        count = new[0].shape[2]
        self._make_room(count)
        start, self._last = self._last, self._last + count
        for held, part in zip(self.arrays, new, strict=True):
            held[:, :, start : self._last, :] = part
        seen = max(self._first, start - self._spec.window + 1)
        return tuple(array[:, :, seen : self._last, :] for array in self.arrays)

    def part(self, start: int, end: int, offset: int) -> Arrays:
        """Tokens [start, end) of `offset`, which it has to hold still, as views."""
        shift = self._last - offset
        assert self._first <= start + shift, "a window was asked for what it forgot"
        return tuple(array[:, :, start + shift : end + shift, :] for array in self.arrays)

    def put(self, parts: Sequence[Arrays], room: int) -> None:
        """The last tokens of a sequence, as `part` gave them."""
        self._first = self._last = 0
        for part in parts:
            self.write(0, part)

    def trim(self, offset: int, to: int) -> None:
        """See FullLayer. It can go back by one token, or to wherever nothing was lost yet."""
        self._last = max(self._first, self._last - (offset - to))

    def _make_room(self, count: int) -> None:
        if not self.arrays:
            self.arrays = tuple(self._zeros(size, self._room) for size in self._sizes)
        if self._last + count <= self._room:
            return
        kept = min(self._last - self._first, self._spec.window)
        room = max(self._room, kept + count)
        self.arrays = tuple(
            mx.concatenate(
                [array[:, :, self._last - kept : self._last, :], self._zeros(size, room - kept)],
                axis=2,
            )
            for size, array in zip(self._sizes, self.arrays, strict=True)
        )
        self._first, self._last = 0, kept

    def _zeros(self, size: int, tokens: int) -> mx.array:
        return mx.zeros((1, self._spec.heads, tokens, size), dtype=self._shape.dtype)


class StateLayer:
    """A state after all tokens, and those before the last steps, see Recurrent."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self._spec = spec
        self._before: dict[int, Arrays] = {}  # by tokens, the oldest first
        self.arrays: Arrays = ()

    def state(self) -> Arrays:
        """What the next token goes on from."""
        return self.arrays or tuple(mx.zeros(shape) for shape in self._spec.shapes)

    def write(self, at: int, new: Arrays) -> None:
        """The state after a step that began at `at` tokens."""
        self._before[at] = self.arrays
        if len(self._before) > ROLLBACK_STEPS:
            del self._before[next(iter(self._before))]
        self.arrays = new

    def trim(self, offset: int, to: int) -> None:
        """See FullLayer. It can go back by ROLLBACK_STEPS steps, or to the beginning."""
        if to == 0:
            self._before, self.arrays = {}, ()
        elif to < offset:
            assert to in self._before, f"a state of {offset} tokens cannot go back to {to}"
            self.arrays = self._before[to]
            self._before = {at: state for at, state in self._before.items() if at < to}


Layer = FullLayer | WindowLayer | StateLayer


def _layer(cache: CacheSpec, shape: RowShape) -> Layer:
    match cache:
        case RecurrentSpec():
            return StateLayer(cache)
        case LatentSpec(dim, _):
            return FullLayer(1, (dim,), shape)
        case KeyValueSpec(heads, key_dim, value_dim, window):
            sizes = (key_dim, value_dim)
            return WindowLayer(cache, shape) if window else FullLayer(heads, sizes, shape)


class Row:
    """The cache of one sequence."""

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.offset = 0  # tokens that every layer holds once the step in flight is done
        self._layers = [_layer(cache, shape) for cache in shape.caches]

    def write(self, layer: int, *new: mx.array) -> Arrays:
        """Puts arrays [1, heads, n, size] behind `offset`; returns all that they may look back on.

        `offset` itself moves by `advance`, after the last layer.
        """
        return self._tokens(layer).write(self.offset, new)

    def part(self, layer: int, start: int, end: int) -> Arrays:
        """Tokens [start, end) that the layer holds: arrays [1, heads, end - start, size], views."""
        return self._tokens(layer).part(start, end, self.offset)

    def put(self, layer: int, parts: Sequence[Arrays], room: int) -> None:
        """What `part` gave, in one copy, into an empty row with space for `room`.

        `offset` itself moves by `advance`.
        """
        assert self.offset == 0, "only an empty row is filled"
        self._tokens(layer).put(parts, room)

    def state(self, layer: int) -> Arrays:
        """The state of a recurrent layer after `offset` tokens."""
        return self._state(layer).state()

    def put_state(self, layer: int, state: Arrays) -> None:
        """The state after the tokens of the step at work, or of an empty row that is filled."""
        self._state(layer).write(self.offset, state)

    def advance(self, count: int) -> None:
        """`count` more tokens are written in every layer."""
        self.offset += count

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on; `to` not above `offset` forgets nothing less."""
        to = max(to, 0)
        if to < self.offset:
            for layer in self._layers:
                layer.trim(self.offset, to)
            self.offset = to

    def release(self) -> None:
        """Its arrays go with the last reference to them."""
        self._layers = [_layer(cache, self.shape) for cache in self.shape.caches]
        self.offset = 0

    def arrays(self) -> list[mx.array]:
        """Every array, for one evaluation of the whole row."""
        return [array for layer in self._layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return sum(array.nbytes for array in self.arrays())

    def _tokens(self, layer: int) -> FullLayer | WindowLayer:
        return cast("FullLayer | WindowLayer", self._layers[layer])

    def _state(self, layer: int) -> StateLayer:
        return cast("StateLayer", self._layers[layer])
