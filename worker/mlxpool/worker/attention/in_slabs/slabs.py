"""Keys and values on the CPU: blocks of tokens in a few large arrays, the slabs.

With slabs one matrix product attends for many rows of any lengths. A slab has SLAB_BLOCKS blocks in
every layer. The blocks of a row may be in any slab. Freed blocks are reused, and blocks are never
moved. A slab is freed with its last used block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby

import mlx.core as mx
from msgspec import Struct, field

from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

# The blocks of a slab. Larger slabs have more unused blocks; with smaller slabs a step needs more
# products.
SLAB_BLOCKS = 16


class Slab(Struct, eq=False):
    """A few arrays with blocks of tokens; the blocks may belong to different rows.

    `layers`: the stored arrays of each layer, [KV, blocks * KV_BLOCK_TOKENS, size]. A slab has the
    only references to its arrays, so that MLX writes them in place. Unused tokens are finite
    numbers.
    """

    layers: list[Arrays]
    free_blocks: list[int]  # a heap: the lowest block first, so that used blocks are neighbours

    @classmethod
    def empty(cls, shape: RowShape, blocks: int) -> Slab:
        """Returns a slab without used blocks."""
        caches = [cache for cache in shape.caches if isinstance(cache, KeyValueSpec)]
        assert len(caches) == len(shape.caches), "slabs are for layers that keep every token"
        tokens = blocks * KV_BLOCK_TOKENS
        layers = [
            tuple(shape.zeros(array, array.heads, tokens) for array in shape.arrays_of(cache))
            for cache in caches
        ]
        return cls(layers, list(range(blocks)))

    def arrays(self) -> list[mx.array]:
        """Returns all arrays, to evaluate them together."""
        return [array for arrays in self.layers for array in arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


class Slabs:
    """The slabs of a model. A slab has `limit` blocks, at least one."""

    def __init__(self, shape: RowShape, limit: int = SLAB_BLOCKS) -> None:
        self.shape = shape
        self._blocks = max(1, limit)
        self._slabs: list[Slab] = []

    @property
    def nbytes(self) -> int:
        """The allocated bytes, used or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def allocate(self) -> tuple[Slab, int]:
        """Returns a free block: its slab, and its number in the slab."""
        slab = next((slab for slab in self._slabs if slab.free_blocks), None)
        if slab is None:
            slab = Slab.empty(self.shape, self._blocks)
            self._slabs.append(slab)
        return slab, heappop(slab.free_blocks)

    def free_block(self, slab: Slab, block: int) -> None:
        """Frees a block, and its slab if no other block of the slab is used."""
        heappush(slab.free_blocks, block)
        if len(slab.free_blocks) == self._blocks and slab in self._slabs:
            self._slabs.remove(slab)

    def invalidate(self) -> None:
        """Drops all slabs after a failed pass; rows keep their slabs until they release them."""
        self._slabs.clear()


class TokenRun(Struct, frozen=True):
    """Neighbouring tokens of a row that are also neighbours in a slab."""

    slab: Slab
    start: int  # token number in the slab
    count: int

    @property
    def end(self) -> int:
        """The index in the slab just after the last token."""
        return self.start + self.count


class SlabRow(Struct, eq=False):
    """The blocks of one sequence, with the methods of RowCache."""

    slabs: Slabs
    offset: int = 0  # the row's tokens in every layer, after the step in flight
    table: list[tuple[Slab, int]] = field(default_factory=list)

    @property
    def shape(self) -> RowShape:
        return self.slabs.shape

    def reserve(self, tokens: int) -> None:
        """Allocates missing blocks for `tokens` tokens. Raises ValueError above the capacity."""
        if tokens > self.slabs.shape.capacity:
            raise ValueError(
                f"{tokens} tokens do not fit into a row of {self.slabs.shape.capacity}; "
                "the caller must end a sequence at the context"
            )
        while len(self.table) < blocks_for(tokens):
            self.table.append(self.slabs.allocate())

    def write(self, layer: int, keys: mx.array, values: mx.array) -> Arrays:
        """Writes keys, values [1, KV, n, D] after `offset` tokens.

        Returns the stored arrays of all tokens.
        """
        self.place(layer, keys, values)
        return self.part(layer, 0, self.offset + keys.shape[2])

    def place(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Writes keys, values [1, KV, n, D] after `offset` tokens."""
        self._place(layer, self.offset, self.shape.stored((keys, values)))

    def part(self, layer: int, start: int, end: int) -> Arrays:
        """Returns the stored arrays [1, KV, end - start, size] of tokens [start, end)."""
        pieces = [
            [array[:, run.start : run.end] for array in run.slab.layers[layer]]
            for run in self._runs(start, end)
        ]
        return tuple(_joined(list(side)) for side in zip(*pieces, strict=True))

    def put(self, layer: int, parts: Sequence[Arrays], capacity: int) -> None:
        """Copies `parts`, which `part` returned, into an empty row for `capacity` tokens."""
        assert self.offset == 0, "only an empty row is filled"
        start = 0
        for stored in parts:
            self._place(layer, start, stored)
            start += stored[0].shape[2]

    def advance(self, count: int) -> None:
        """Records that `count` more tokens are written in each layer."""
        self.offset += count

    def trim(self, to: int) -> None:
        """Removes the tokens from `to` on, if the row has any."""
        self.offset = min(self.offset, max(to, 0))
        self._keep_blocks(blocks_for(self.offset))

    def release(self) -> None:
        """Frees all blocks."""
        self.offset = 0
        self._keep_blocks(0)

    def arrays(self) -> list[mx.array]:
        """Returns all arrays with blocks of the row, to evaluate them together."""
        slabs = {id(slab): slab for slab, _ in self.table}.values()
        return [array for slab in slabs for array in slab.arrays()]

    @property
    def nbytes(self) -> int:
        """The bytes of the row's blocks, including unused tokens."""
        return len(self.table) * KV_BLOCK_TOKENS * self.slabs.shape.token_bytes

    def place_of(self, token: int) -> tuple[Slab, int]:
        """Returns the slab of a token of the row, and the token's number in the slab."""
        at, inside = divmod(token, KV_BLOCK_TOKENS)
        slab, block = self.table[at]
        return slab, block * KV_BLOCK_TOKENS + inside

    def _place(self, layer: int, start: int, stored: Arrays) -> None:
        """Writes stored arrays [1, KV, n, size] into the row's blocks, from token `start` on."""
        end = start + stored[0].shape[2]
        self.reserve(end)
        done = 0
        for run in self._runs(start, end):
            part = slice(done, done + run.count)
            for array, new in zip(run.slab.layers[layer], stored, strict=True):
                array[:, run.start : run.end] = new[0, :, part]
            done += run.count

    def _keep_blocks(self, keep: int) -> None:
        while len(self.table) > keep:
            self.slabs.free_block(*self.table.pop())

    def _runs(self, start: int, end: int) -> Iterator[TokenRun]:
        blocks = range(start // KV_BLOCK_TOKENS, blocks_for(end))
        for _, group in groupby(blocks, lambda at: (id(self.table[at][0]), self.table[at][1] - at)):
            run = list(group)
            slab, block = self.table[run[0]]
            low = max(start, run[0] * KV_BLOCK_TOKENS)
            high = min(end, (run[-1] + 1) * KV_BLOCK_TOKENS)
            yield TokenRun(slab, (block - run[0]) * KV_BLOCK_TOKENS + low, high - low)


def _joined(parts: list[mx.array]) -> mx.array:
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1))[None]
