"""What finished sequences leave behind for later prompts that begin alike: tree, single or off.

Lives in the compute thread. A row belongs to the one sequence it was begun for, from `begin` to
`close`. No MLX here: what a row is made of only the store knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix.store import PrefixRow, Store
from mlxpool.worker.prefix.tree import Match, Node, Piece, Tree, common

E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)

MODES = ("tree", "single", "off")
EVERY = 8192  # tokens between two restore points of a prompt, where layers need them


class PrefixCache(Generic[R]):
    """The three modes share this face; by itself it is `off` and keeps nothing.

    Counters since the start: `hits` and `misses` of `begin`, `tokens` it found, `evictions` of what
    had to make room.
    """

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        if budget < 0:
            raise ValueError(f"the prefix cache's budget is {budget} bytes, must not be negative")
        self._new_row = store.new_row
        self._release = store.release
        self._budget = budget
        self.hits = 0
        self.misses = 0
        self.tokens = 0
        self.evictions = 0

    @property
    def budget(self) -> int:
        """Bytes that what is kept may take; a smaller one applies at once."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.shrink(self.nbytes - budget)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return 0

    def begin(self, prompt: Sequence[int], restore_at: int = 0) -> tuple[R, int]:
        """A row for `prompt`, which may not be empty, and how many of its tokens it holds.

        At least the last token is left to compute: its logits are what the caller is after.
        `restore_at` is a place to which a later prompt is likely to come back, such as the end of
        the conversation before the generation prompt; 0: none.
        """
        self._count(0)
        return self._new_row(), 0

    def next_stop(self, row: R) -> int | None:
        """Where a prefill chunk has to end, with a call of `keep`; None: wherever it likes."""
        return None

    def keep(self, row: R, tokens: Sequence[int]) -> None:
        """The row goes on, and what it holds so far is kept already."""

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """The sequence is over, whatever its phase. `tokens` are those really in the row.

        It may hold fewer, when `tokens` are prompt and completion: those are kept. What it holds
        beyond them, such as a token in flight, is forgotten.
        """
        self._release(row)

    def shrink(self, needed: int) -> int:
        """Frees at least `needed` bytes if there are so many to be had; returns the bytes freed."""
        return 0

    def clear(self) -> int:
        """Gives everything up; returns the bytes it had. Rows at work keep what they have."""
        return 0

    def _count(self, cached: int) -> None:
        self.hits += cached > 0
        self.misses += cached == 0
        self.tokens += cached


@dataclass(frozen=True, slots=True)
class _Entry(Generic[R]):
    row: R
    tokens: tuple[int, ...]  # as many as row.offset


class SingleCache(PrefixCache[R]):
    """One entry: the row of the sequence closed last, taken as it is by the next prompt."""

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self._rewind = store.rewind
        self._entry: _Entry[R] | None = None

    @property
    def nbytes(self) -> int:
        """See PrefixCache: allocated bytes of the entry's row."""
        return self._entry.row.nbytes if self._entry else 0

    def begin(self, prompt: Sequence[int], restore_at: int = 0) -> tuple[R, int]:
        """See PrefixCache. The entry is taken even when nothing of it fits."""
        entry, self._entry = self._entry, None
        cached = common(entry.tokens, tuple(prompt)) if entry else 0
        cached = min(cached, len(prompt) - 1)
        if entry is not None and cached > 0 and self._rewind(entry.row, cached):
            self._count(cached)
            return entry.row, cached
        if entry is not None:
            self._release(entry.row)
        return super().begin(prompt)

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """See PrefixCache. Replaces the entry, unless there is nothing in the row."""
        end = min(row.offset, len(tokens))
        if end > 0 and row.nbytes <= self._budget and self._rewind(row, end):
            self.clear()
            self._entry = _Entry(row, tuple(tokens[:end]))
        else:
            self._release(row)

    def shrink(self, needed: int) -> int:
        """See PrefixCache."""
        if needed <= 0 or self._entry is None:
            return 0
        self.evictions += 1
        return self.clear()

    def clear(self) -> int:
        """See PrefixCache."""
        freed, entry = self.nbytes, self._entry
        self._entry = None
        if entry is not None:
            self._release(entry.row)
        return freed


@dataclass(slots=True)
class _Reader(Generic[R, E, S]):
    """A row at work; held, so that its id is nobody else's."""

    row: R
    node: Node[E, S]  # the deepest it began from or was kept at: the path to it stays
    stops: list[int]  # restore points ahead
    goal: int  # a prefill that ends before was cut off: its end is a restore point


class TreeCache(PrefixCache[R], Generic[R, E, S]):
    """Every sequence closed so far, each token once, as far as the budget goes."""

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self._store = store
        self._tree: Tree[E, S] = Tree(store)
        self._readers: dict[int, _Reader[R, E, S]] = {}
        self._now = 0  # counts calls: what "recently used" means

    @property
    def nbytes(self) -> int:
        """See PrefixCache."""
        return self._store.nbytes

    @property
    def tree(self) -> Tree[E, S]:
        """For those who look."""
        return self._tree

    def begin(self, prompt: Sequence[int], restore_at: int = 0) -> tuple[R, int]:
        """See PrefixCache. The path that the row began from stays until it is closed."""
        prompt = tuple(prompt)
        self._now += 1
        match = self._tree.match(prompt, len(prompt) - 1)
        cached, state = self._restorable(match)
        row = self._filled(match, cached, state, len(prompt))
        node = match.last or self._tree.root
        if match.tokens == node.end:
            node.used = self._now
        node.readers += 1
        stops = self._stops(len(prompt), cached, match.tokens, restore_at)
        self._readers[id(row)] = _Reader(row, node, stops, len(prompt) - 1)
        self._count(cached)
        return row, cached

    def next_stop(self, row: R) -> int | None:
        """See PrefixCache."""
        reader = self._readers.get(id(row))
        return reader.stops[0] if reader is not None and reader.stops else None

    def keep(self, row: R, tokens: Sequence[int]) -> None:
        """See PrefixCache. At a stop this makes a restore point."""
        reader = self._readers[id(row)]
        node = self._insert(row, tuple(tokens[: row.offset]))
        if node is not None:
            node.chosen = node.chosen or row.offset in reader.stops
            node.readers += 1
            before, reader.node = reader.node, node
            self._leave(before)
        reader.stops = [stop for stop in reader.stops if stop > row.offset]

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """See PrefixCache. Copies only what the tree does not have; a row not begun is ignored."""
        reader = self._readers.pop(id(row), None)
        if reader is None:
            return
        try:
            if not self._store.stateful or row.offset <= len(tokens):
                node = self._insert(row, tuple(tokens[: row.offset]))
                if node is not None and self._store.stateful and row.offset < reader.goal:
                    node.chosen = True
        finally:
            self._release(row)
            self._leave(reader.node)
            self.shrink(self.nbytes - self._budget)

    def shrink(self, needed: int) -> int:
        """See PrefixCache. What a row at work began from is not touched."""
        before = self.nbytes
        while before - self.nbytes < needed and (victim := self._tree.victim()) is not None:
            self._evict(victim)
        return before - self.nbytes

    def clear(self) -> int:
        """See PrefixCache."""
        before = self.nbytes
        self._tree.clear()
        for reader in self._readers.values():
            reader.node = self._tree.root
        self._tree.root.readers = len(self._readers)
        return before - self.nbytes

    def _filled(self, match: Match[E, S], cached: int, state: S | None, room: int) -> R:
        row = self._store.new_row()
        try:
            if cached:
                self._store.fill(row, self._tree.kept(match, cached), state, cached, room)
        except BaseException:
            self._store.release(row)
            raise
        return row

    def _restorable(self, match: Match[E, S]) -> tuple[int, S | None]:
        """How many tokens of a match a row can get, and the whole state for them."""
        if not self._store.stateful or match.last is None:
            return match.tokens, None
        best: tuple[int, S | None] = (0, None)
        for node in (*match.nodes[:-1], *self._tree.walk(match.last)):
            at = min(node.end, match.tokens)
            if node.state is not None and at > best[0] and self._store.lowest(node.state) <= at:
                best = (at, node.state)
        return best

    def _stops(self, length: int, cached: int, matched: int, hint: int) -> list[int]:
        """Restore points on the way through a prompt: the hint, where another prompt went on
        differently, and one every so often. The last token comes with decode.
        """
        if not self._store.stateful:
            return []
        places = {hint, matched, *range(EVERY, length, EVERY)}
        return sorted(at for at in places if cached < at < length)

    def _insert(self, row: R, tokens: tuple[int, ...]) -> Node[E, S] | None:
        """Puts what a row has of `tokens` into the tree; returns the node that it runs into.

        Copies nothing that is there, nothing beyond the budget, and, where layers need a whole
        state, nothing without one. None when the tree then ends before the row.
        """
        if not tokens:
            return None
        match = self._tree.match(tokens, len(tokens))
        last = match.last or self._tree.root
        self._now += 1
        last.readers += 1
        try:
            there = match.tokens == last.end == len(tokens) and last.state is not None
            need_state = self._store.stateful and not there
            end = self._make_room(row, match.tokens, len(tokens), need_state)
            if end < len(tokens) and (need_state or end <= match.tokens):
                return None
            node = self._grow(row, tokens[:end], match.tokens, last, need_state)
            node.used = self._now
            return node if end == len(tokens) else None
        finally:
            self._leave(last)

    def _make_room(self, row: R, start: int, end: int, need_state: bool) -> int:
        """Drops what was not used for long; returns how far the row can be kept from `start`."""
        store = self._store
        state = store.state_bytes(row) if need_state else 0

        def reach() -> int:
            free = self._budget - store.nbytes - state
            return -1 if free < 0 else store.fit(row, start, end, free)

        if end == start and not state:
            return end
        while (to := reach()) < end and (victim := self._tree.victim()) is not None:
            self._evict(victim)
        return to

    def _evict(self, victim: Node[E, S]) -> None:
        self._tree.evict(victim)
        self.evictions += 1

    def _grow(
        self, row: R, tokens: tuple[int, ...], start: int, last: Node[E, S], need_state: bool
    ) -> Node[E, S]:
        """The node that `tokens` run into, of which the tree has `start`, down to `last`."""
        end = len(tokens)
        pieces, state = self._take(row, start, end, need_state)
        if last.end > start and (pieces or need_state):
            last = self._tree.split(last, start)
            last.used, last.chosen = self._now, not pieces
        if pieces:
            last = self._tree.add(last, tokens[start:], pieces)
        if state is not None:
            last.state = state
        return last

    def _take(
        self, row: R, start: int, end: int, need_state: bool
    ) -> tuple[list[Piece[E]], S | None]:
        """Owned copies of what the row has at [start, end), and of its state; all or nothing."""
        pieces: list[Piece[E]] = []
        try:
            for at, to in prefix_tree.bounds(start, end):
                pieces.append(Piece(to - at, self._store.keep(row, at, to)))
            return pieces, self._store.keep_state(row) if need_state else None
        except BaseException:
            for piece in pieces:
                self._store.free(piece.held)
            raise

    def _leave(self, node: Node[E, S]) -> None:
        node.readers -= 1
        self._tree.settle(node)


def build(mode: str, store: Store[R, E, S], budget: int) -> PrefixCache[R]:
    """The cache of a mode: one of MODES. `budget` in bytes."""
    if mode not in MODES:
        raise ValueError(f"prefix cache mode is {mode!r}, must be one of {', '.join(MODES)}")
    if mode == "tree":
        return TreeCache(store, budget)
    return SingleCache(store, budget) if mode == "single" else PrefixCache(store, budget)
