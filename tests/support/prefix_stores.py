"""Stores for tests of the prefix cache, with contents that can be checked, without MLX.

A cell (an int) replaces the keys and values of a token. It depends on all tokens up to it, so a
check detects memory at a wrong position or under a wrong prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.shared_blocks import BlockPool, BlockRow, BlockStore
from mlxpool.worker.prefix.tree import Node
from mlxpool.worker.prefix.tree_cache import TreeCache

CELL = 10  # bytes of a token
STATE = 70  # bytes of a snapshot


def chain(before: int, token: int) -> int:
    """Returns the cell of a token after the cell `before`; `before` is 0 for the first token."""
    return (before * 48271 + token + 1) % (2**31 - 1)


def cells_of(tokens: Sequence[int]) -> list[int]:
    cells: list[int] = []
    for token in tokens:
        cells.append(chain(cells[-1] if cells else 0, token))
    return cells


@dataclass(eq=False)
class ListRow:
    cells: list[int] = field(default_factory=list)
    state: int = 0  # 0 before the first token
    stateful: bool = False

    @property
    def offset(self) -> int:
        return len(self.cells)

    @property
    def nbytes(self) -> int:
        return CELL * len(self.cells)

    def feed(self, tokens: Sequence[int]) -> None:
        """Computes the cells of the next tokens, and appends them to the row.

        A row with a state computes them from the state, like a recurrent layer.
        """
        for token in tokens:
            before = self.state if self.stateful else self.cells[-1] if self.cells else 0
            self.cells.append(chain(before, token))
            self.state = self.cells[-1]


class ListStore:
    """A store whose rows and cached pieces are lists of cells."""

    join_copies = True

    def __init__(self, stateful: bool = False, window: int = 0) -> None:
        """A snapshot of at most `window` tokens can also restore any smaller number of tokens.

        A longer snapshot restores only its own number of tokens.
        """
        self.stateful = stateful
        self.nbytes = 0
        self.rows = 0  # rows that were made and not yet released
        self.window = window
        self.broken = False  # True: allocations fail

    def new_row(self) -> ListRow:
        self.rows += 1
        return ListRow(stateful=self.stateful)

    def release(self, row: ListRow) -> None:
        self.rows -= 1

    def rewind(self, row: ListRow, to: int) -> bool:
        if self.stateful and to < row.offset:
            return False
        del row.cells[to:]
        return True

    def fill(
        self,
        row: ListRow,
        kept: Sequence[tuple[list[int], int]],
        state: list[int] | None,
        tokens: int,
        room: int,
    ) -> None:
        assert room > tokens
        if self.broken:
            raise MemoryError("no memory for a row")
        row.cells = [cell for held, count in kept for cell in held[:count]]
        assert len(row.cells) == tokens and (state is not None) == self.stateful
        if state is not None:
            row.state = state[tokens - 1]
            assert tokens == len(state) or len(state) <= self.window

    def fit(self, row: ListRow, start: int, end: int, free: int) -> int:
        return min(end, start + free // CELL)

    def keep(self, row: ListRow, start: int, end: int) -> list[int]:
        assert end <= row.offset
        self.nbytes += CELL * (end - start)
        return row.cells[start:end]

    def state_bytes(self, row: ListRow) -> int:
        return STATE

    def keep_state(self, row: ListRow) -> list[int]:
        if self.broken:
            raise MemoryError("no memory for a state")
        self.nbytes += STATE
        return list(row.cells)

    def lowest(self, state: list[int]) -> int:
        return 0 if len(state) <= self.window else len(state)

    def cut(self, held: list[int], at: int) -> tuple[list[int], list[int]]:
        assert 0 < at < len(held)
        return held[:at], held[at:]

    def join(self, left: list[int], right: list[int]) -> list[int]:
        return left + right

    def free(self, held: list[int]) -> None:
        self.nbytes -= CELL * len(held)

    def free_state(self, state: list[int]) -> None:
        self.nbytes -= STATE


class PagedMemory:
    """The cells of all blocks: replaces the GPU memory of a pool of blocks."""

    def __init__(self, blocks: int, size: int) -> None:
        self.cells = [[-1] * size for _ in range(blocks)]
        self.size = size
        self.copies = 0
        self.pool = BlockPool(blocks)
        self.store = BlockStore(self.pool, size, CELL * size, self._copy)

    def _copy(self, source: int, target: int) -> None:
        self.copies += 1
        self.cells[target] = list(self.cells[source])

    def feed(self, row: BlockRow, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self.read(row)[-1] if row.offset else 0
            at = row.offset
            self.store.reserve(row, at + 1)
            row.offset += 1
            block = row.table[at // self.size]
            assert self.pool.references(block) == 1, "a shared block is written"
            self.cells[block][at % self.size] = chain(before, token)

    def read(self, row: BlockRow) -> list[int]:
        cells = [cell for block in row.table for cell in self.cells[block]]
        return cells[: row.offset]


def edges(cache: TreeCache[Any, Any, Any]) -> dict[tuple[int, ...], Node[Any, Any]]:
    """Returns each node by its tokens from the root."""
    nodes: dict[tuple[int, ...], Node[Any, Any]] = {}
    for node in cache.tree.walk():
        path: tuple[int, ...] = ()
        above = node
        while above.parent is not None:
            path, above = (*above.tokens, *path), above.parent
        nodes[path] = node
    return nodes


def unique_tokens(cache: TreeCache[Any, Any, Any]) -> int:
    return sum(len(node.tokens) for node in cache.tree.walk())


def check_shape(cache: TreeCache[Any, Any, Any], *, stateful: bool = False) -> None:
    """Asserts the invariants of the tree between two calls."""
    for node in cache.tree.walk():
        assert node.parent is not None and node.start == node.parent.end
        assert node.tokens and node.parent.children[node.tokens[0]] is node
        assert sum(piece.tokens for piece in node.pieces) == len(node.tokens)
        assert node.readers >= 0
        if len(node.children) == 1:
            assert node.readers or node.restore_point, "a place that nobody needs"
        if stateful and not node.children:
            assert node.readers or node.state is not None, "a leaf that serves nobody"


def serve(
    cache: PrefixCache[ListRow],
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    *,
    stop_at: int | None = None,
    restore_at: int = 0,
) -> int:
    """Serves a request; returns the number of cached tokens.

    With `stop_at` the request is cancelled after this many prompt tokens. The last generated token
    is never computed. Prefill chunks end at restore points of the cache; `restore_at` requests a
    restore point at this position.
    """
    row, cached = cache.begin(list(prompt), restore_at)
    assert row.cells == cells_of(prompt)[:cached] and row.offset == cached
    last = min(len(prompt) - 1, len(prompt) if stop_at is None else stop_at)
    while row.offset < last:
        stop = cache.next_restore_point(row)
        row.feed(prompt[row.offset : min(last, stop or last)])
        if row.offset == stop:
            cache.keep(row, prompt)
    tokens = [*prompt, *generated]
    if stop_at is None:
        row.feed(tokens[row.offset : len(prompt) + max(0, len(generated) - 1)])
        assert row.cells == cells_of(tokens)[: row.offset]
    cache.close(row, tokens)
    return cached
