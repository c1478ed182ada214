"""The prefix cache's store where rows and tree share blocks (CUDA): only references change. Pure.

A block holds the keys and values of `size` neighbouring tokens in every layer; block b of a
sequence holds the tokens from b * size on. Whoever wants to write into a block that others hold
too gets a copy of it first, so entering and leaving copy at most one partly filled block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxpool.common.errors import OutOfMemory


class BlockPool:
    """Counts who holds which block; block ids are below `count`."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A block for one holder. Raises OutOfMemory when there is none."""
        if not self._free:
            raise OutOfMemory(f"all {len(self._holders)} blocks of the cache are in use")
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One holder more."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._holders[block] += 1

    def leave(self, block: int) -> None:
        """One holder less."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def holders(self, block: int) -> int:
        """How many hold it."""
        return self._holders[block]


@dataclass(eq=False, slots=True)
class BlockRow:
    """The block table of one sequence."""

    block_bytes: int
    offset: int = 0  # tokens
    table: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks, shared or not."""
        return self.block_bytes * len(self.table)


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that hold the tokens [start, end); the first may hold some before them too."""

    start: int
    end: int
    blocks: tuple[int, ...]


class BlockStore:
    """A Store (prefix/store.py) of block tables. `copy(source, target)` copies one block.

    The bytes counted are those of blocks that something kept refers to, each once.
    """

    stateful = False
    joins_copy = False  # and a block where two pieces meet is needed twice until they are joined

    def __init__(
        self, pool: BlockPool, size: int, block_bytes: int, copy: Callable[[int, int], None]
    ) -> None:
        self._pool = pool
        self._size = size
        self._bytes = block_bytes
        self._copy = copy
        self._kept: dict[int, int] = {}  # block -> how often the tree refers to it

    @property
    def nbytes(self) -> int:
        """See Store."""
        return self._bytes * len(self._kept)

    def new_row(self) -> BlockRow:
        """See Store."""
        return BlockRow(self._bytes)

    def reserve(self, row: BlockRow, tokens: int) -> None:
        """Makes blocks that the row may write into, up to so many tokens.

        Raises OutOfMemory; what it got till then it keeps.
        """
        first = row.offset // self._size
        shared = row.offset < tokens and row.offset % self._size
        if shared and self._pool.holders(row.table[first]) > 1:
            row.table[first] = self._copied(row.table[first])
        while len(row.table) * self._size < tokens:
            row.table.append(self._pool.take())

    def release(self, row: BlockRow) -> None:
        """See Store."""
        for block in row.table:
            self._pool.leave(block)
        row.table, row.offset = [], 0

    def rewind(self, row: BlockRow, to: int) -> bool:
        """See Store."""
        row.offset = min(row.offset, to)
        while (len(row.table) - 1) * self._size >= row.offset and row.table:
            self._pool.leave(row.table.pop())
        return True

    def fill(
        self, row: BlockRow, kept: Sequence[tuple[Run, int]], state: None, tokens: int, room: int
    ) -> None:
        """See Store. Where two runs meet inside a block, the later one's has the tokens of both."""
        found = {}
        for run, count in kept:
            for number, block in enumerate(run.blocks, run.start // self._size):
                if number * self._size < run.start + count:
                    found[number] = block
        row.table = [found[number] for number in range(len(found))]
        row.offset = tokens
        for block in row.table:
            self._pool.share(block)

    def fit(self, row: BlockRow, start: int, end: int, free: int) -> int:
        """See Store."""
        return min(end, max(start, (start // self._size + free // self._bytes) * self._size))

    def keep(self, row: BlockRow, start: int, end: int) -> Run:
        """See Store. The row goes on in a copy of its last block, if it does."""
        blocks = self._between(row, start, end)
        for block in blocks:
            self._hold(block)
        return Run(start, end, blocks)

    def cut(self, held: Run, at: int) -> tuple[Run, Run]:
        """See Pieces."""
        middle = held.start + at
        first = held.start // self._size
        left = held.blocks[: -(-middle // self._size) - first]
        right = held.blocks[middle // self._size - first :]
        if middle % self._size:
            self._hold(right[0])
        return Run(held.start, middle, left), Run(middle, held.end, right)

    def join(self, left: Run, right: Run) -> Run:
        """See Pieces."""
        blocks = left.blocks
        if left.end % self._size:
            self._let_go(blocks[-1])
            blocks = blocks[:-1]
        return Run(left.start, right.end, blocks + right.blocks)

    def free(self, held: Run) -> None:
        """See Pieces."""
        for block in held.blocks:
            self._let_go(block)

    def state_bytes(self, row: BlockRow) -> int:
        """See Store: blocks have no whole states yet."""
        return 0

    def keep_state(self, row: BlockRow) -> None:
        """See Store."""

    def free_state(self, state: None) -> None:
        """See Pieces."""

    def lowest(self, state: None) -> int:
        """See Store."""
        return 0

    def _between(self, row: BlockRow, start: int, end: int) -> tuple[int, ...]:
        return tuple(row.table[start // self._size : -(-end // self._size)])

    def _copied(self, block: int) -> int:
        own = self._pool.take()
        self._copy(block, own)
        self._pool.leave(block)
        return own

    def _hold(self, block: int) -> None:
        self._pool.share(block)
        self._kept[block] = self._kept.get(block, 0) + 1

    def _let_go(self, block: int) -> None:
        self._pool.leave(block)
        self._kept[block] -= 1
        if not self._kept[block]:
            del self._kept[block]
