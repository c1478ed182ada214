"""The prefix-cache store of KV rows that share blocks with the tree (CUDA): reference counts. Pure.

A block has the keys and values of `size` neighbouring tokens in every layer; block b of a sequence
has the tokens from b * size on. Before a row writes into a block with other references, the block
is copied (copy on write). So `fill` and `keep` cause at most one copy, of a partly filled block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from mlxpool.common.errors import OutOfMemory


class BlockPool:
    """Reference counts of blocks; block ids are below `count`."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        """The number of blocks without references."""
        return len(self._free)

    def allocate(self) -> int:
        """Returns a free block with one reference. Raises OutOfMemory if no block is free."""
        if not self._free:
            raise OutOfMemory(f"all {len(self._references)} blocks of the cache are in use")
        block = self._free.pop()
        self._references[block] = 1
        return block

    def add_reference(self, block: int) -> None:
        """Adds a reference to a block in use."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] += 1

    def drop_reference(self, block: int) -> None:
        """Drops a reference; frees the block after its last reference."""
        assert self._references[block] > 0, f"block {block} is free"
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def references(self, block: int) -> int:
        """Returns the number of references to a block."""
        return self._references[block]


class BlockRow:
    """The block table of one sequence.

    `changed`: the first entry that may have changed since a reader read the table. The reader sets
    `changed` to the table's length.
    """

    __slots__ = ("block_bytes", "changed", "offset", "table")

    def __init__(self, block_bytes: int, table: Iterable[int] = ()) -> None:
        self.block_bytes = block_bytes
        self.offset = 0  # tokens in the KV row
        self.table = list(table)
        self.changed = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the KV row's blocks, including shared blocks."""
        return self.block_bytes * len(self.table)


class BlockRun(Struct, frozen=True):
    """Blocks with the tokens [start, end); the first block may also have earlier tokens."""

    start: int
    end: int
    blocks: tuple[int, ...]


class BlockStore:
    """A Store (prefix/store.py) of block tables. `copy(source, target)` copies one block.

    `nbytes` counts the tree's blocks, each block once. `changes` counts the operations, except
    `reserve`, that may have changed or shared the blocks of KV rows in use.
    """

    stateful = False
    # No copy is needed: two pieces that meet inside a block both refer to it until they are joined.
    join_copies = False

    def __init__(
        self, pool: BlockPool, size: int, block_bytes: int, copy: Callable[[int, int], None]
    ) -> None:
        self._pool = pool
        self._size = size
        self._bytes = block_bytes
        self._copy = copy
        self._kept: dict[int, int] = {}  # block -> number of references of the tree
        self.changes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the tree's blocks, each block counted once; see Store."""
        return self._bytes * len(self._kept)

    def own_bytes(self, rows: Iterable[BlockRow]) -> int:
        """Returns the bytes of the different blocks of `rows` to which the tree does not refer."""
        blocks = {block for row in rows for block in row.table}
        return self._bytes * len(blocks - self._kept.keys())

    def blocks_of(self, row: BlockRow) -> int:
        """Returns the number of a row's blocks.

        Does not count a shared block that the row's next write will copy.
        """
        at = row.offset // self._size
        writes = row.offset % self._size > 0 and at < len(row.table)
        return len(row.table) - (writes and self._pool.references(row.table[at]) > 1)

    @property
    def free_blocks(self) -> int:
        """The number of blocks that neither a KV row nor the tree refers to."""
        return self._pool.free

    def new_row(self) -> BlockRow:
        """Returns a KV row without blocks; see Store."""
        return BlockRow(self._bytes)

    def reserve(self, row: BlockRow, tokens: int) -> None:
        """Allocates blocks for `tokens` tokens; copies the shared block that the row will write.

        Raises OutOfMemory; the KV row then keeps the blocks allocated so far.
        """
        table, size = row.table, self._size
        if row.offset % size and row.offset < tokens:
            first = row.offset // size
            if self._pool.references(table[first]) > 1:
                table[first] = self._copied(table[first])
                row.changed = min(row.changed, first)
        while len(table) * size < tokens:
            table.append(self._pool.allocate())

    def short(self, rows: Sequence[BlockRow], ends: Sequence[int]) -> list[int]:
        """Returns the indices of the rows that need `reserve` before a step writes to them.

        `ends`: each row's number of tokens after the step. One call checks all rows of a step,
        because most rows need no block.
        """
        size, references = self._size, self._pool.references
        return [
            number
            for number, (row, end) in enumerate(zip(rows, ends, strict=True))
            if len(row.table) * size < end
            or (row.offset % size and references(row.table[row.offset // size]) > 1)
        ]

    def release(self, row: BlockRow) -> None:
        """Drops the KV row's references to its blocks; see Store."""
        for block in row.table:
            self._pool.drop_reference(block)
        row.table, row.offset, row.changed = [], 0, 0

    def rewind(self, row: BlockRow, to: int) -> bool:
        """Removes the tokens from `to` on; always returns True; see Store."""
        self.changes += 1
        row.offset = min(row.offset, to)
        while (len(row.table) - 1) * self._size >= row.offset and row.table:
            self._pool.drop_reference(row.table.pop())
        row.changed = min(row.changed, len(row.table))
        return True

    def fill(
        self,
        row: BlockRow,
        kept: Sequence[tuple[BlockRun, int]],
        state: None,
        tokens: int,
        capacity: int,
    ) -> None:
        """Fills an empty KV row with the blocks of cached runs, which have its first tokens.

        `kept`: consecutive runs, each with the number of its first tokens that are used. If two
        runs meet inside a block, uses the block of the later run, which has the tokens of both
        runs. `tokens`: the number of tokens of all runs.
        """
        self.changes += 1
        by_number = {}
        for run, count in kept:
            for number, block in enumerate(run.blocks, run.start // self._size):
                if number * self._size < run.start + count:
                    by_number[number] = block
        row.table = [by_number[number] for number in range(len(by_number))]
        row.offset, row.changed = tokens, 0
        for block in row.table:
            self._pool.add_reference(block)

    def fit(self, row: BlockRow, start: int, end: int, free: int) -> int:
        """Returns the position in [start, end] up to which `free` bytes suffice for `keep`."""
        return min(end, max(start, (start // self._size + free // self._bytes) * self._size))

    def keep(self, row: BlockRow, start: int, end: int) -> BlockRun:
        """Caches tokens [start, end) of a KV row; see Store.

        The KV row's last block is copied before its next write.
        """
        blocks = self._between(row, start, end)
        for block in blocks:
            self._hold(block)
        return BlockRun(start, end, blocks)

    def take_block(self, start: int, end: int, fill: Callable[[int], None]) -> BlockRun:
        """Caches tokens [start, end) in a new block, whose contents `fill(block)` writes.

        Returns the block as a BlockRun. `fill` also writes the earlier tokens that belong to the
        block. Raises OutOfMemory if no block is free.
        """
        block = self._pool.allocate()
        try:
            fill(block)
            self._hold(block)
        finally:
            self._pool.drop_reference(block)
        return BlockRun(start, end, (block,))

    def cut(self, held: BlockRun, at: int) -> tuple[BlockRun, BlockRun]:
        """Splits a run after its first `at` tokens; see PieceStore."""
        middle = held.start + at
        first = held.start // self._size
        left = held.blocks[: -(-middle // self._size) - first]
        right = held.blocks[middle // self._size - first :]
        if middle % self._size:
            self._hold(right[0])
        return BlockRun(held.start, middle, left), BlockRun(middle, held.end, right)

    def join(self, left: BlockRun, right: BlockRun) -> BlockRun:
        """Joins two neighbouring runs into one; see PieceStore."""
        blocks = left.blocks
        if left.end % self._size:
            self._let_go(blocks[-1])
            blocks = blocks[:-1]
        return BlockRun(left.start, right.end, blocks + right.blocks)

    def free(self, held: BlockRun) -> None:
        """Drops the tree's references to the blocks of a run; see PieceStore."""
        for block in held.blocks:
            self._let_go(block)

    def state_bytes(self, row: BlockRow) -> int:
        """Returns 0: the blocks have the tokens of every layer, so no layer needs a snapshot."""
        return 0

    def keep_state(self, row: BlockRow) -> None:
        """Does nothing: the blocks have the tokens of every layer; no layer needs a snapshot."""

    def free_state(self, state: None) -> None:
        """Does nothing: there are no snapshots."""

    def lowest(self, state: None) -> int:
        """Returns 0: a KV row in blocks can be shortened to any number of tokens."""
        return 0

    def _between(self, row: BlockRow, start: int, end: int) -> tuple[int, ...]:
        return tuple(row.table[start // self._size : -(-end // self._size)])

    def _copied(self, block: int) -> int:
        own = self._pool.allocate()
        self._copy(block, own)
        self._pool.drop_reference(block)
        return own

    def _hold(self, block: int) -> None:
        self.changes += 1
        self._pool.add_reference(block)
        self._kept[block] = self._kept.get(block, 0) + 1

    def _let_go(self, block: int) -> None:
        self._pool.drop_reference(block)
        self._kept[block] -= 1
        if not self._kept[block]:
            del self._kept[block]
