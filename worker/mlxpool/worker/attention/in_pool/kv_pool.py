"""Keys and values on CUDA: a pool of blocks that rows and the prefix cache share.

A row is a block table (prefix/shared_blocks.py). On a GPU our kernels write and read the pool;
MLX's operations do the same more slowly for passes with images, and in tests without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.stored_arrays import (
    DeviceArray,
    arrays_of,
    device_array,
    device_arrays,
)
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec
from mlxpool.worker.kernels import block_write
from mlxpool.worker.prefix.paths import Part
from mlxpool.worker.prefix.shared_blocks import BlockPool, BlockRow, BlockRun, BlockStore
from mlxpool.worker.prefix_disk.reading import ReadRecord
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for


class KVPool:
    """The memory of all KV blocks.

    `arrays`: the stored arrays of each layer, see caches/stored.py. The shape of an array is
    [blocks, heads, KV_BLOCK_TOKENS, size].
    """

    def __init__(self, shape: RowShape, blocks: int, *, in_place: bool) -> None:
        """Allocates `blocks` blocks. `in_place`: our kernels write into these arrays."""
        self.shape = replace(shape, keeps_all=True)
        self.blocks, self.in_place = blocks, in_place
        self.renew()

    def renew(self) -> None:
        """Replaces the arrays by zeros."""
        self.arrays: list[Arrays] = []  # frees the old arrays first
        self.arrays = [self._zeros(cache) for cache in self.shape.caches]
        self.pending: list[mx.array] = []  # unevaluated results of writes in place
        mx.eval(self.arrays)

    def _zeros(self, cache: object) -> Arrays:
        if not isinstance(cache, KeyValueSpec | LatentSpec):
            raise TypeError(f"a pool of blocks cannot store {cache}")
        return tuple(
            self.shape.zeros(array, self.blocks, array.heads, KV_BLOCK_TOKENS)
            for array in self.shape.arrays_of(cache)
        )

    @property
    def nbytes(self) -> int:
        """The allocated bytes."""
        return sum(array.nbytes for arrays in self.arrays for array in arrays)

    def copy(self, source: int, target: int) -> None:
        """Copies one block in all layers.

        The copy is a separate MLX evaluation after all submitted passes: in one evaluation no
        kernel may write memory that another kernel reads.
        """
        if self.in_place:
            mx.async_eval(*self.written())  # type: ignore[no-untyped-call]
            blocks = mx.array([source, target], dtype=mx.int32)
            self.pending += [
                block_write.copy_block(array, blocks) for arrays in self.arrays for array in arrays
            ]
        else:
            for arrays in self.arrays:
                for array in arrays:
                    array[target] = array[source]
        mx.async_eval(*self.written())  # type: ignore[no-untyped-call]

    def block(self, block: int, tokens: int) -> list[tuple[str, mx.array]]:
        """Returns copies [heads, tokens, size] of a block's first `tokens` tokens, by name.

        A name is the number of the layer and the number of the array in the layer: "3.0". The
        copies happen after all submitted passes.
        """
        mx.async_eval(*self.written())  # type: ignore[no-untyped-call]
        copies = [
            (f"{layer}.{number}", mx.contiguous(array[block, :, :tokens]))
            for layer, arrays in enumerate(self.arrays)
            for number, array in enumerate(arrays)
        ]
        mx.async_eval(*(array for _, array in copies))  # type: ignore[no-untyped-call]
        return copies

    def fill_block(self, block: int, content: Mapping[str, mx.array]) -> None:
        """Writes arrays that the method `block` returned into a block that no pass reads."""
        mx.async_eval(*self.written())  # type: ignore[no-untyped-call]
        for layer, arrays in enumerate(self.arrays):
            for number, array in enumerate(arrays):
                fresh = content[f"{layer}.{number}"].swapaxes(0, 1)
                first = block * KV_BLOCK_TOKENS
                slots = mx.arange(first, first + fresh.shape[0], dtype=mx.int32)
                if self.in_place:
                    self.pending.append(block_write.write_tokens(array, fresh, slots))
                else:
                    array[block, :, : fresh.shape[0]] = fresh.swapaxes(0, 1)
        mx.async_eval(*self.written())  # type: ignore[no-untyped-call]

    def written(self) -> list[mx.array]:
        """Returns arrays whose evaluation completes all writes so far."""
        pending, self.pending = self.pending, []
        return pending or [array for arrays in self.arrays for array in arrays]

    def write(self, layer: int, fresh: Arrays, slots: mx.array, table: mx.array) -> mx.array:
        """Writes new keys and values [n, heads, size] into slots [n] of a layer.

        Returns an array that is equal to `table`. Readers of the written tokens must use the
        returned array, see worker/kernels.
        """
        for array, new in zip(self.arrays[layer], self.shape.stored(fresh), strict=True):
            if self.in_place:
                done = block_write.write_tokens(array, new, slots)
                self.pending.append(done)
                table = table + done
            else:
                blocks, places = slots // KV_BLOCK_TOKENS, slots % KV_BLOCK_TOKENS
                array[blocks, :, places] = new.astype(array.dtype)
        return table

    def gather(self, layer: int, table: mx.array) -> Arrays:
        """Returns a layer's stored arrays [R, heads, B * KV_BLOCK_TOKENS, size].

        The block tables `table` [R, B] list the blocks.
        """
        gathered = []
        for array in self.arrays[layer]:
            _, heads, _, size = array.shape
            blocks = array[table].swapaxes(1, 2)
            gathered.append(blocks.reshape(table.shape[0], heads, -1, size))
        return tuple(gathered)


class PagedRow(BlockRow):
    """The block table of one sequence, with the methods of RowCache."""

    __slots__ = ("_place", "_store", "pool")

    def __init__(self, pool: KVPool, store: PagedStore) -> None:
        super().__init__(store.block_bytes)
        self.pool = pool
        self._store = store
        self._place: tuple[tuple[int, int], mx.array, mx.array] | None = None

    @property
    def shape(self) -> RowShape:
        return self.pool.shape

    def reserve(self, tokens: int) -> None:
        """Allocates blocks for `tokens` tokens; copies a shared block that will be written.

        Raises ValueError above the capacity, OutOfMemory if no block is free.
        """
        capacity = self.pool.shape.capacity
        if tokens > capacity:
            raise ValueError(
                f"{tokens} tokens do not fit into a row of {capacity}; "
                "the caller must end a sequence at the context"
            )
        self._store.reserve(self, tokens)

    def write(self, layer: int, *new: mx.array) -> Arrays:
        """Writes arrays [1, heads, n, size] after `offset` tokens.

        Returns the stored arrays of the tokens that the new tokens see.
        """
        end, window = self.offset + new[0].shape[2], self.shape.window(layer)
        slots, table = self._placed(end)
        fresh = tuple(array.squeeze(0).swapaxes(0, 1) for array in new)
        table = self.pool.write(layer, fresh, slots, table)
        if self.offset == 0 and not self.shape.quantised:
            return tuple(array.astype(self.shape.dtype) for array in new)
        start = max(0, self.offset + 1 - window) if window else 0
        first = start // KV_BLOCK_TOKENS
        seen = self.pool.gather(layer, table[:, first:])
        unseen = first * KV_BLOCK_TOKENS
        return tuple(array[:, :, start - unseen : end - unseen] for array in seen)

    def _placed(self, end: int) -> tuple[mx.array, mx.array]:
        """Returns the slots of tokens [offset, end) and the block table [1, B] up to `end`."""
        if self._place is None or self._place[0] != (self.offset, end):
            self.reserve(end)
            slots = [self.slot(at) for at in range(self.offset, end)]
            table = [self.table[: blocks_for(end)]]
            arrays = mx.array(slots, dtype=mx.int32), mx.array(table, dtype=mx.int32)
            self._place = ((self.offset, end), *arrays)
        return self._place[1:]

    def slot(self, token: int) -> int:
        """Returns the slot of a token: its number among the tokens of the pool."""
        return self.table[token // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + token % KV_BLOCK_TOKENS

    def advance(self, count: int) -> None:
        """Records that `count` more tokens are written in each layer."""
        self.offset += count
        self._place = None

    def trim(self, to: int) -> None:
        """Removes the tokens from `to` on, if the row has any."""
        self._place = None
        self._store.rewind(self, max(to, 0))

    def release(self) -> None:
        """Frees all blocks."""
        self._place = None
        self._store.release(self)

    def arrays(self) -> list[mx.array]:
        """Returns arrays whose evaluation completes all writes."""
        return self.pool.written()


class PagedStore(BlockStore):
    """The prefix-cache store of paged rows."""

    def __init__(self, pool: KVPool) -> None:
        self.block_bytes = KV_BLOCK_TOKENS * pool.shape.token_bytes
        super().__init__(BlockPool(pool.blocks), KV_BLOCK_TOKENS, self.block_bytes, pool.copy)
        self._memory = pool

    def new_row(self) -> PagedRow:
        """Returns a row without blocks."""
        return PagedRow(self._memory, self)

    # ---- the disk tier, see stored_arrays.py -----------------------------------------------------

    def stored(self, parts: Sequence[Part[BlockRun]]) -> list[DeviceArray]:
        """Returns the arrays of one block for the disk tier.

        If the block's tokens belong to several runs, the last run's KV block has all these tokens.
        """
        last, block = parts[-1], parts[0].low // KV_BLOCK_TOKENS
        run = last.held
        tokens = last.high - block * KV_BLOCK_TOKENS
        arrays = self._memory.block(run.blocks[block - run.start // KV_BLOCK_TOKENS], tokens)
        return device_arrays((name, ((array, 0, tokens),)) for name, array in arrays)

    def stored_state(self, state: None) -> list[DeviceArray]:
        """Not called: blocks have no snapshots. Raises NotImplementedError."""
        raise NotImplementedError("a pool of blocks has no snapshots")

    def bytes_of(self, record: ReadRecord, start: int, end: int) -> int:
        """Returns the bytes of the blocks for tokens [start, end), as `restored` allocates them."""
        return self.block_bytes * (blocks_for(end) - start // KV_BLOCK_TOKENS)

    def restored(self, record: ReadRecord, start: int, end: int) -> BlockRun:
        """Returns a record's tokens [start, end) in a new block. Raises OutOfMemory."""
        tokens = end - record.header.start
        content = {
            name: device_array(dtype, array[:, :tokens])
            for name, (dtype, array) in arrays_of(record).items()
        }
        return self.take_block(start, end, lambda block: self._memory.fill_block(block, content))

    def restored_state(self, record: ReadRecord) -> None:
        """Not called: blocks have no snapshots. Raises NotImplementedError."""
        raise NotImplementedError("a pool of blocks has no snapshots")
