"""A row with its own arrays: one cache object for each layer.

Arrays grow in steps of ROW_GROWTH tokens. A layer has the only reference to its arrays, so that MLX
writes them in place. Unused tokens are finite numbers and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.caches.specs import (
    ROLLBACK_STEPS,
    CacheSpec,
    KeyValueSpec,
    LatentSpec,
    RecurrentSpec,
    window_capacity,
)
from mlxpool.worker.caches.stored import StoredArray
from mlxpool.worker.kernels.recurrent.span_states import StateSlice
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

ROW_GROWTH = KV_BLOCK_TOKENS  # tokens


class FullLayer:
    """The cache of a layer that keeps all tokens, in stored arrays [1, heads, allocated, size]."""

    def __init__(self, spec: KeyValueSpec | LatentSpec, shape: RowShape) -> None:
        self._stored, self._shape = shape.arrays_of(spec), shape
        self.arrays: Arrays = ()

    def write(self, at: int, new: Arrays) -> Arrays:
        """Writes arrays [1, heads, n, size] after `at` tokens.

        Returns the stored arrays of all tokens up to the end.
        """
        end = at + new[0].shape[2]
        self._reserve(end)
        for held, part in zip(self.arrays, self._shape.stored(new), strict=True):
            held[:, :, at:end, :] = part
        return self.part(0, end, end)

    def part(self, start: int, end: int, offset: int) -> Arrays:
        """Returns views of the stored arrays of tokens [start, end) of a row of `offset` tokens."""
        return tuple(array[:, :, start:end, :] for array in self.arrays)

    def put(self, parts: Sequence[Arrays], capacity: int) -> None:
        """Copies the tokens of all parts into new arrays for at least `capacity` tokens."""
        tokens = sum(part[0].shape[2] for part in parts)
        spare = max(self._rounded(capacity) - tokens, 0)
        self.arrays = tuple(
            mx.concatenate([*side, self._zeros(stored, spare)], axis=2)
            for stored, side in zip(self._stored, zip(*parts, strict=True), strict=True)
        )

    def trim(self, offset: int, to: int) -> None:
        """Removes the tokens [to, offset); their memory is overwritten later."""

    def _reserve(self, end: int) -> None:
        if end > self._shape.capacity:
            raise ValueError(
                f"{end} tokens do not fit into a row of {self._shape.capacity}; "
                "the caller must end a sequence at the context"
            )
        capacity = self._rounded(end)
        if not self.arrays:
            self.arrays = tuple(self._zeros(stored, capacity) for stored in self._stored)
        missing = capacity - self.arrays[0].shape[2]
        if missing > 0:
            self.arrays = tuple(
                mx.concatenate([array, self._zeros(stored, missing)], axis=2)
                for stored, array in zip(self._stored, self.arrays, strict=True)
            )

    def _rounded(self, end: int) -> int:
        return min(-(-end // ROW_GROWTH) * ROW_GROWTH, self._shape.capacity)

    def _zeros(self, stored: StoredArray, tokens: int) -> mx.array:
        return self._shape.zeros(stored, 1, stored.heads, tokens)


class WindowLayer:
    """The cache of a layer with a window, in stored arrays [1, heads, capacity, size].

    The tokens [_first, _last) of the arrays are in use. When the arrays are full, the tokens of the
    window and the one token before the window move to the front. If `trim` then removes the last
    token, the window can begin with that earlier token.
    """

    def __init__(self, spec: KeyValueSpec, shape: RowShape) -> None:
        self._spec, self._shape = spec, shape
        self._stored = shape.arrays_of(spec)
        self._capacity = min(window_capacity(spec.window, shape.chunk), shape.capacity)
        self._first = self._last = 0
        self.arrays: Arrays = ()

    def write(self, at: int, new: Arrays) -> Arrays:
        """Writes new tokens after `at`.

        Returns the stored arrays of the tokens that the new tokens see.
        """
        return self._append(self._shape.stored(new))

    def part(self, start: int, end: int, offset: int) -> Arrays:
        """Returns views of the stored arrays of tokens [start, end); the row has `offset` tokens.

        The tokens must be inside the window.
        """
        shift = self._last - offset
        assert self._first <= start + shift, "a window was asked for what it forgot"
        return tuple(array[:, :, start + shift : end + shift, :] for array in self.arrays)

    def put(self, parts: Sequence[Arrays], capacity: int) -> None:
        """Replaces the contents by the last tokens of `parts`, consecutive parts of a sequence."""
        self._first = self._last = 0
        for part in parts:
            self._append(part)

    def trim(self, offset: int, to: int) -> None:
        """Removes the tokens [to, offset).

        If the row has dropped tokens before its window, only one token can be removed.
        """
        self._last = max(self._first, self._last - (offset - to))

    def _append(self, new: Arrays) -> Arrays:
        """Stores new tokens; returns the stored arrays of the tokens that the new tokens see."""
        count = new[0].shape[2]
        self._require_space(count)
        start, self._last = self._last, self._last + count
        for held, part in zip(self.arrays, new, strict=True):
            held[:, :, start : self._last, :] = part
        seen = max(self._first, start - self._spec.window + 1)
        return tuple(array[:, :, seen : self._last, :] for array in self.arrays)

    def _require_space(self, count: int) -> None:
        if not self.arrays:
            self.arrays = tuple(self._zeros(stored, self._capacity) for stored in self._stored)
        if self._last + count <= self._capacity:
            return
        kept = min(self._last - self._first, self._spec.window)
        capacity = max(self._capacity, kept + count)
        self.arrays = tuple(
            mx.concatenate(
                [
                    array[:, :, self._last - kept : self._last, :],
                    self._zeros(stored, capacity - kept),
                ],
                axis=2,
            )
            for stored, array in zip(self._stored, self.arrays, strict=True)
        )
        self._first, self._last = 0, kept

    def _zeros(self, stored: StoredArray, tokens: int) -> mx.array:
        return self._shape.zeros(stored, 1, stored.heads, tokens)


class StateLayer:
    """The cache of a recurrent layer: the state after all tokens, and states before recent steps.

    A state has its own arrays, or is a line of an array that the rows of a pass share. The empty
    tuple is the initial state.
    """

    def __init__(self, spec: RecurrentSpec) -> None:
        self._spec = spec
        # Earlier states by number of tokens, oldest first.
        self._before: dict[int, Arrays | StateSlice] = {}
        self._now: Arrays | StateSlice = ()

    @property
    def arrays(self) -> Arrays:
        """The arrays whose evaluation completes the state; other rows may share them."""
        return (self._now.whole,) if isinstance(self._now, StateSlice) else self._now

    @property
    def nbytes(self) -> int:
        """The bytes of the state after all tokens."""
        return self._spec.state_bytes if self._now else 0

    def held(self) -> list[mx.array]:
        """Returns the arrays of the newest and the earlier states, each array once."""
        held: dict[int, mx.array] = {}
        for state in (self._now, *self._before.values()):
            arrays = (state.whole,) if isinstance(state, StateSlice) else state
            held |= {id(array): array for array in arrays}
        return list(held.values())

    def state(self) -> Arrays:
        """Returns the state after all tokens."""
        if isinstance(self._now, StateSlice):
            return self._now.arrays(self._spec.shapes)
        return self._now or tuple(mx.zeros(shape) for shape in self._spec.shapes)

    def slice(self) -> StateSlice | None:
        """Returns the state after all tokens as a line of an array; None: a state of zeros."""
        if isinstance(self._now, StateSlice):
            return self._now
        if not self._now:
            return None
        numbers = [array.reshape(-1) for array in self._now]
        return StateSlice(mx.concatenate(numbers)[None], 0)

    def write(self, at: int, *new: Arrays | StateSlice) -> None:
        """Stores the state after a step that began at `at` tokens.

        For a step that checks drafts, `new` has the state after each of its tokens.
        """
        for further, state in enumerate(new):
            self._before[at + further] = self._now
            self._now = state
        while len(self._before) > max(ROLLBACK_STEPS, len(new)):
            del self._before[next(iter(self._before))]

    def settle(self) -> None:
        """Drops all earlier states; the row cannot be trimmed to these states any more."""
        self._before = {}

    def own(self) -> list[mx.array]:
        """Copies states out of arrays that other rows share; returns all arrays of the states."""
        now, *before = (_alone(state) for state in (self._now, *self._before.values()))
        self._now, self._before = now, dict(zip(self._before, before, strict=True))
        return self.held()

    def trim(self, offset: int, to: int) -> None:
        """Restores the state after the first `to` tokens of a row of `offset` tokens.

        `to` must be 0, or the row's length before one of the newest ROLLBACK_STEPS steps. If a step
        checked drafts, the lengths before each of its tokens are possible, too.
        """
        if to == 0:
            self._before, self._now = {}, ()
        elif to < offset:
            assert to in self._before, f"a state of {offset} tokens cannot go back to {to}"
            self._now = self._before[to]
            self._before = {at: state for at, state in self._before.items() if at < to}


def _alone(state: Arrays | StateSlice) -> Arrays | StateSlice:
    return state.alone() if isinstance(state, StateSlice) else state


LayerArrays = FullLayer | WindowLayer | StateLayer


def _layer(cache: CacheSpec, shape: RowShape) -> LayerArrays:
    match cache:
        case RecurrentSpec():
            return StateLayer(cache)
        case KeyValueSpec() if cache.window:
            return WindowLayer(cache, shape)
        case LatentSpec() | KeyValueSpec():
            return FullLayer(cache, shape)


class RowCache:
    """The keys, values and states of one sequence."""

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.offset = 0  # tokens in each layer, including the tokens of the step in flight
        self.layers = [_layer(cache, shape) for cache in shape.caches]

    def write(self, layer: int, *new: mx.array) -> Arrays:
        """Writes arrays [1, heads, n, size] after `offset` tokens; does not change `offset`.

        Returns the stored arrays of all tokens that the new tokens see; `RowShape.read` converts
        these arrays. The caller calls `advance` after the last layer.
        """
        return self._tokens(layer).write(self.offset, new)

    def part(self, layer: int, start: int, end: int) -> Arrays:
        """Returns views [1, heads, end - start, size] of a layer's stored arrays of some tokens."""
        return self._tokens(layer).part(start, end, self.offset)

    def put(self, layer: int, parts: Sequence[Arrays], capacity: int) -> None:
        """Copies parts, which `part` returned, into an empty row with space for `capacity` tokens.

        Does not change `offset`; the caller calls `advance`.
        """
        assert self.offset == 0, "only an empty row is filled"
        self._tokens(layer).put(parts, capacity)

    def state(self, layer: int) -> Arrays:
        """Returns the state of a recurrent layer after `offset` tokens."""
        return self._state(layer).state()

    def put_state(self, layer: int, state: Arrays) -> None:
        """Stores the state after this step, or after the tokens that fill an empty row."""
        self._state(layer).write(self.offset, state)

    def state_slice(self, layer: int) -> StateSlice | None:
        """Returns a layer's `state` as a line of an array; None: a state of zeros."""
        return self._state(layer).slice()

    def put_states(self, layer: int, *states: Arrays | StateSlice) -> None:
        """Stores the state after this step or, for a check of drafts, after each of its tokens."""
        self._state(layer).write(self.offset, *states)

    def state_layers(self) -> list[StateLayer]:
        """Returns the recurrent layers."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def advance(self, count: int) -> None:
        """Records that `count` more tokens are written in each layer."""
        self.offset += count

    def trim(self, to: int) -> None:
        """Removes the tokens from `to` on, if the row has any."""
        to = max(to, 0)
        if to < self.offset:
            for layer in self.layers:
                layer.trim(self.offset, to)
            self.offset = to

    def release(self) -> None:
        """Empties the row; its arrays are freed with their last reference."""
        self.layers = [_layer(cache, self.shape) for cache in self.shape.caches]
        self.offset = 0

    def arrays(self) -> list[mx.array]:
        """Returns all arrays of the row, to evaluate them together."""
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """The allocated bytes, including unused tokens."""
        return sum(
            layer.nbytes
            if isinstance(layer, StateLayer)
            else sum(array.nbytes for array in layer.arrays)
            for layer in self.layers
        )

    def _tokens(self, layer: int) -> FullLayer | WindowLayer:
        return cast("FullLayer | WindowLayer", self.layers[layer])

    def _state(self, layer: int) -> StateLayer:
        return cast("StateLayer", self.layers[layer])
