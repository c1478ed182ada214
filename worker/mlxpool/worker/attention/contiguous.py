"""Keys and values on the CPU: blocks of tokens in a few large arrays, so that one product serves
many rows, whatever their lengths.

A slab holds BLOCKS blocks in every layer. A row's blocks lie anywhere; what it gives back others
take, and no other row's block is ever copied. Slabs nobody uses are freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby

import mlx.core as mx

from mlxpool.worker.attention.row_cache import RowShape
from mlxpool.worker.layers.cache_specs import KeyValueSpec
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of

BLOCKS = 16  # of a slab; more leave more unused, fewer take more products for a step


@dataclass(eq=False, slots=True)
class Slab:
    """`keys` and `values`: for each layer [KV, blocks * BLOCK, D].

    A slab holds the only references to its arrays, so that MLX writes them in place. Memory past a
    row's end is finite.
    """

    keys: list[mx.array]
    values: list[mx.array]
    free: list[int]  # a heap: the lowest goes first, so that what is used lies together

    @classmethod
    def empty(cls, shape: RowShape, blocks: int) -> Slab:
        """A slab nobody uses yet."""
        caches = [cache for cache in shape.caches if isinstance(cache, KeyValueSpec)]
        assert len(caches) == len(shape.caches), "slabs are for layers that keep every token"

        def zeros(heads: int, size: int) -> mx.array:
            return mx.zeros((heads, blocks * BLOCK, size), dtype=shape.dtype)

        keys = [zeros(cache.heads, cache.key_dim) for cache in caches]
        values = [zeros(cache.heads, cache.value_dim) for cache in caches]
        return cls(keys, values, list(range(blocks)))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))


class Slabs:
    """The slabs of a model. `limit` is the most blocks one slab has."""

    def __init__(self, shape: RowShape, limit: int = BLOCKS) -> None:
        self.shape = shape
        self._blocks = max(1, limit)
        self._slabs: list[Slab] = []

    @property
    def nbytes(self) -> int:
        """Allocated bytes, used or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self) -> tuple[Slab, int]:
        """A block for one row: its slab and its number there."""
        slab = next((slab for slab in self._slabs if slab.free), None)
        if slab is None:
            slab = Slab.empty(self.shape, self._blocks)
            self._slabs.append(slab)
        return slab, heappop(slab.free)

    def give(self, slab: Slab, block: int) -> None:
        """The block is anybody's again."""
        heappush(slab.free, block)
        if len(slab.free) == self._blocks and slab in self._slabs:
            self._slabs.remove(slab)

    def spoil(self) -> None:
        """What is in the slabs cannot be trusted: whoever has blocks there keeps them alone."""
        self._slabs.clear()


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of a row that are neighbours in a slab, too."""

    slab: Slab
    start: int  # in the slab's tokens
    count: int


@dataclass(eq=False)
class SlabRow:
    """The cache of one sequence: the blocks it has. Same face as cache.Row."""

    slabs: Slabs
    offset: int = 0  # tokens that every layer holds once the step in flight is done
    table: list[tuple[Slab, int]] = field(default_factory=list)

    @property
    def shape(self) -> RowShape:
        return self.slabs.shape

    def reserve(self, tokens: int) -> None:
        """Takes blocks until there are enough for so many tokens."""
        if tokens > self.slabs.shape.capacity:
            raise ValueError(
                f"a row of {self.slabs.shape.capacity} tokens was asked to hold {tokens}; "
                "the caller has to end a sequence at the context"
            )
        while len(self.table) < blocks_of(tokens):
            self.table.append(self.slabs.take())

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Puts keys, values [1, KV, n, D] behind `offset`; returns all up to there and them."""
        end = self.offset + keys.shape[2]
        self._place(layer, self.offset, keys, values)
        return self.part(layer, 0, end)

    def part(self, layer: int, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Keys and values [1, KV, end - start, D] of tokens that the layer holds."""
        runs = list(self._runs(start, end))
        return (
            _joined([run.slab.keys[layer][:, run.start : run.start + run.count] for run in runs]),
            _joined([run.slab.values[layer][:, run.start : run.start + run.count] for run in runs]),
        )

    def put(self, layer: int, parts: Sequence[tuple[mx.array, ...]], room: int) -> None:
        """Each part's keys and values, in one copy, into an empty row; see Row.put."""
        assert self.offset == 0, "only an empty row is filled"
        start = 0
        for keys, values in parts:
            self._place(layer, start, keys, values)
            start += keys.shape[2]

    def advance(self, count: int) -> None:
        """`count` more tokens are written in every layer."""
        self.offset += count

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on; `to` not above `offset` forgets nothing less."""
        self.offset = min(self.offset, max(to, 0))
        self._give(blocks_of(self.offset))

    def release(self) -> None:
        """Gives every block back."""
        self.offset = 0
        self._give(0)

    def arrays(self) -> list[mx.array]:
        """Every array it has a part in, for one evaluation of the whole row."""
        slabs = {id(slab): slab for slab, _ in self.table}.values()
        return [array for slab in slabs for array in (*slab.keys, *slab.values)]

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks, used or not."""
        return len(self.table) * BLOCK * self.slabs.shape.token_bytes

    def place(self) -> tuple[Slab, int]:
        """Where the next token goes: the slab and the token's number there."""
        slab, block = self.table[self.offset // BLOCK]
        return slab, block * BLOCK + self.offset % BLOCK

    def _place(self, layer: int, start: int, keys: mx.array, values: mx.array) -> None:
        """Writes keys, values [1, KV, n, D] from token `start` on, where its blocks lie."""
        end = start + keys.shape[2]
        self.reserve(end)
        done = 0
        for run in self._runs(start, end):
            part = slice(done, done + run.count)
            place = slice(run.start, run.start + run.count)
            run.slab.keys[layer][:, place] = keys[0, :, part]
            run.slab.values[layer][:, place] = values[0, :, part]
            done += run.count

    def _give(self, keep: int) -> None:
        while len(self.table) > keep:
            self.slabs.give(*self.table.pop())

    def _runs(self, start: int, end: int) -> Iterator[Run]:
        blocks = range(start // BLOCK, blocks_of(end))
        for _, group in groupby(blocks, lambda at: (id(self.table[at][0]), self.table[at][1] - at)):
            found = list(group)
            slab, block = self.table[found[0]]
            low, high = max(start, found[0] * BLOCK), min(end, (found[-1] + 1) * BLOCK)
            yield Run(slab, (block - found[0]) * BLOCK + low, high - low)


def _joined(parts: list[mx.array]) -> mx.array:
    return (parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1))[None]
