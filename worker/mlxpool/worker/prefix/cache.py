"""The prefix cache in its three modes: tree, single and off.

Used by the compute thread. A row belongs to one sequence from `begin` to `close`. Imports no MLX:
only the store knows what a row is made of.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlxpool.worker.media.spans import Spans, prefix_end
from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix.store import PrefixRow, Store
from mlxpool.worker.prefix.tree import Match, Node, Piece, Tree, common_prefix

E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)

MODES = ("tree", "single", "off")
# Tokens between two restore points of a prompt, where layers need snapshots.
RESTORE_POINT_INTERVAL = 8192


# Why a prompt got the tokens that it got from the cache.
OFF = "the cache is off"
EMPTY = "nothing is cached"
ONE_TOKEN = "the prompt has one token, which is always computed"
DIFFERENT = "no cached prompt begins alike"
NO_STATE = "no state is kept where the tokens begin to differ"
EARLIER_STATE = "the last state is kept before the tokens begin to differ"
PART = "the rest differs from what is cached"
WHOLE = "all but the last token is cached"


def _reason(cached: int, matched: int, length: int) -> str:
    """Why `cached` of the `matched` tokens of a prompt could be used, the cache not being empty."""
    if cached:
        if cached < matched:
            return EARLIER_STATE
        return WHOLE if cached == length - 1 else PART
    if length == 1:
        return ONE_TOKEN
    return NO_STATE if matched else DIFFERENT


def _most(prompt: Sequence[int], most: int | None) -> int:
    """The most tokens of a prompt that a row may begin with: without the last one."""
    return len(prompt) - 1 if most is None else min(most, len(prompt) - 1)


class PrefixCache(Generic[R]):
    """The interface of the three modes, and the mode `off`, which keeps nothing.

    Counters since the start: `hits` and `misses` of `begin`, `tokens` found by it, `evictions`, and
    `evicted_tokens` that are in no entry any more.
    `reason` says why the newest `begin` found what it found. `shares`: a row in use can be kept for
    others. `whole`: then they get all of its tokens or none. `exclusive`: one row at most can begin
    with what is kept.
    """

    shares = False
    whole = False
    exclusive = False

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
        self.evicted_tokens = 0
        self.reason = ""

    @property
    def budget(self) -> int:
        """The most bytes of the entries; a lower value evicts at once."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.shrink(self.nbytes - budget)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return 0

    def begin(
        self,
        prompt: Sequence[int],
        restore_at: int = 0,
        media: Spans = (),
        most: int | None = None,
    ) -> tuple[R, int]:
        """Returns a row for `prompt`, which is not empty, and the number of its tokens in the row.

        The last token is never in it: the caller computes its logits. `restore_at` is a position
        where a later prompt is likely to branch off, such as the end of the conversation before the
        generation prompt; 0: none. `media`: the images of the prompt; what the row has ends in no
        group of them, and neither does a restore point. `most` bounds the tokens in the row.
        """
        self._count(0, OFF)
        return self._new_row(), 0

    def next_restore_point(self, row: R) -> int | None:
        """Returns where the next prefill chunk must end, followed by `keep`; None: anywhere."""
        return None

    def keep(self, row: R, tokens: Sequence[int], *, restore_point: bool = False) -> None:
        """Keeps the tokens that the row has so far; the row stays in use.

        `restore_point`: others will begin here, whether it is the next restore point or not.
        """

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """Ends the use of a row in any phase and keeps those of `tokens` that it has.

        `tokens` are prompt and completion; the row may have fewer. What it has beyond them, such as
        a token in flight, is dropped.
        """
        self._release(row)

    def shrink(self, needed: int) -> int:
        """Evicts entries of at least `needed` bytes, if there are; returns the bytes freed."""
        return 0

    def clear(self) -> int:
        """Frees all entries; returns their bytes. Rows in use are not changed."""
        return 0

    def _count(self, cached: int, reason: str) -> None:
        self.reason = reason
        self.hits += cached > 0
        self.misses += cached == 0
        self.tokens += cached


@dataclass(frozen=True, slots=True)
class _Entry(Generic[R]):
    row: R
    tokens: tuple[int, ...]  # as many as row.offset


class SingleCache(PrefixCache[R]):
    """One entry: the row of the last sequence, which the next prompt takes over."""

    exclusive = True

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self._rewind = store.rewind
        self._entry: _Entry[R] | None = None

    @property
    def nbytes(self) -> int:
        """See PrefixCache: the allocated bytes of the row."""
        return self._entry.row.nbytes if self._entry else 0

    def begin(
        self,
        prompt: Sequence[int],
        restore_at: int = 0,
        media: Spans = (),
        most: int | None = None,
    ) -> tuple[R, int]:
        """See PrefixCache. Drops the entry when the prompt cannot use it."""
        entry, self._entry = self._entry, None
        cached = common_prefix(entry.tokens, tuple(prompt)) if entry else 0
        cached = prefix_end(media, min(cached, _most(prompt, most)))
        if entry is not None and cached > 0 and self._rewind(entry.row, cached):
            self._count(cached, _reason(cached, cached, len(prompt)))
            return entry.row, cached
        self._count(0, EMPTY if entry is None else _reason(0, cached, len(prompt)))
        if entry is not None:
            self._release(entry.row)
        return self._new_row(), 0

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """See PrefixCache. Replaces the entry, unless the row is empty or too large."""
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
        self.evicted_tokens += len(self._entry.tokens)
        return self.clear()

    def clear(self) -> int:
        """See PrefixCache."""
        freed, entry = self.nbytes, self._entry
        self._entry = None
        if entry is not None:
            self._release(entry.row)
        return freed


@dataclass(slots=True)
class _ActiveRow(Generic[R, E, S]):
    """A row in use; the reference keeps its id unique."""

    row: R
    node: Node[E, S]  # the deepest node that the row began from or was kept at
    stops: list[int]  # the next restore points
    goal: int  # the end of its prefill; a row that is closed before gets a restore point there


class TreeCache(PrefixCache[R], Generic[R, E, S]):
    """A radix tree of all closed sequences, bounded by the budget."""

    shares = True

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self.whole = store.stateful
        self._store = store
        self._tree: Tree[E, S] = Tree(store)
        self._readers: dict[int, _ActiveRow[R, E, S]] = {}
        self._now = 0  # a counter of uses, for LRU eviction

    @property
    def nbytes(self) -> int:
        """See PrefixCache."""
        return self._store.nbytes

    @property
    def tree(self) -> Tree[E, S]:
        """The tree, for inspection."""
        return self._tree

    def begin(
        self,
        prompt: Sequence[int],
        restore_at: int = 0,
        media: Spans = (),
        most: int | None = None,
    ) -> tuple[R, int]:
        """See PrefixCache. The path that the row began from is not evicted until `close`."""
        prompt = tuple(prompt)
        empty = not self.nbytes
        self._now += 1
        match = self._match(prompt, media, _most(prompt, most))
        cached, state = self._restorable(match)
        row = self._filled(match, cached, state, len(prompt))
        node = match.last or self._tree.root
        if match.tokens == node.end:
            node.last_used = self._now
        node.readers += 1
        places = {restore_at, match.tokens}
        stops = self._stops(len(prompt), cached, places, media)
        self._readers[id(row)] = _ActiveRow(row, node, stops, len(prompt) - 1)
        self._count(cached, EMPTY if empty else _reason(cached, match.tokens, len(prompt)))
        return row, cached

    def next_restore_point(self, row: R) -> int | None:
        """See PrefixCache."""
        reader = self._readers.get(id(row))
        return reader.stops[0] if reader is not None and reader.stops else None

    def keep(self, row: R, tokens: Sequence[int], *, restore_point: bool = False) -> None:
        """See PrefixCache. Makes a restore point where `next_restore_point` said so."""
        reader = self._readers[id(row)]
        node = self._insert(row, tuple(tokens[: row.offset]))
        if node is not None:
            node.restore_point |= restore_point or row.offset in reader.stops
            node.readers += 1
            before, reader.node = reader.node, node
            self._leave(before)
        reader.stops = [stop for stop in reader.stops if stop > row.offset]

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """See PrefixCache. Keeps only what the tree does not have; ignores an unknown row."""
        reader = self._readers.pop(id(row), None)
        if reader is None:
            return
        try:
            if not self._store.stateful or row.offset <= len(tokens):
                node = self._insert(row, tuple(tokens[: row.offset]))
                if node is not None and self._store.stateful and row.offset < reader.goal:
                    node.restore_point = True
        finally:
            self._release(row)
            self._leave(reader.node)
            self.shrink(self.nbytes - self._budget)

    def shrink(self, needed: int) -> int:
        """See PrefixCache. Does not evict what a row in use began from."""
        before = self.nbytes
        while (
            before - self.nbytes < needed
            and (victim := self._tree.eviction_candidate()) is not None
        ):
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

    def _match(self, prompt: tuple[int, ...], media: Spans, most: int) -> Match[E, S]:
        """Returns the longest match of `most` tokens at most that ends in no group of `media`."""
        match = self._tree.match(prompt, prefix_end(media, most))
        end = prefix_end(media, match.tokens)
        return match if end == match.tokens else self._tree.match(prompt, end)

    def _filled(self, match: Match[E, S], cached: int, state: S | None, capacity: int) -> R:
        row = self._store.new_row()
        try:
            if cached:
                self._store.fill(row, self._tree.pieces_of(match, cached), state, cached, capacity)
        except BaseException:
            self._store.release(row)
            raise
        return row

    def _restorable(self, match: Match[E, S]) -> tuple[int, S | None]:
        """Returns how many tokens of a match a row can get, and the snapshot for them."""
        if not self._store.stateful or match.last is None:
            return match.tokens, None
        best: tuple[int, S | None] = (0, None)
        for node in (*match.nodes[:-1], *self._tree.walk(match.last)):
            at = min(node.end, match.tokens)
            if node.state is not None and at > best[0] and self._store.lowest(node.state) <= at:
                best = (at, node.state)
        return best

    def _stops(self, length: int, cached: int, places: Set[int], media: Spans) -> list[int]:
        """Returns the restore points of a prompt after its cached tokens.

        They are `places` (the caller's hint, and where an earlier prompt branched off) and every
        multiple of RESTORE_POINT_INTERVAL; one inside a group of `media` is before the group.
        """
        if not self._store.stateful:
            return []
        every = places | {*range(RESTORE_POINT_INTERVAL, length, RESTORE_POINT_INTERVAL)}
        ends = {prefix_end(media, place) for place in every}
        return sorted(at for at in ends if cached < at < length)

    def _insert(self, row: R, tokens: tuple[int, ...]) -> Node[E, S] | None:
        """Inserts what the tree lacks of a row's `tokens`; returns the node at their end.

        Keeps nothing beyond the budget and, where layers need a snapshot, nothing without one.
        Returns None when not all tokens could be kept.
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
            end = self._require_space(row, match.tokens, len(tokens), need_state)
            if end < len(tokens) and (need_state or end <= match.tokens):
                return None
            node = self._grow(row, tokens[:end], match.tokens, last, need_state)
            node.last_used = self._now
            return node if end == len(tokens) else None
        finally:
            self._leave(last)

    def _require_space(self, row: R, start: int, end: int, need_state: bool) -> int:
        """Evicts the least recently used; returns the position up to which the row can be kept."""
        store = self._store
        state = store.state_bytes(row) if need_state else 0

        def reach() -> int:
            free = self._budget - store.nbytes - state
            return -1 if free < 0 else store.fit(row, start, end, free)

        if end == start and not state:
            return end
        while (to := reach()) < end and (victim := self._tree.eviction_candidate()) is not None:
            self._evict(victim)
        return to

    def _evict(self, victim: Node[E, S]) -> None:
        tokens, drops = len(victim.tokens), not victim.children
        self._tree.evict(victim)
        self.evictions += 1
        if drops:
            self.evicted_tokens += tokens - (len(victim.tokens) if victim.parent else 0)

    def _grow(
        self, row: R, tokens: tuple[int, ...], start: int, last: Node[E, S], need_state: bool
    ) -> Node[E, S]:
        """Extends the tree below `last` by the tokens from `start` on; returns the last node."""
        end = len(tokens)
        pieces, state = self._take(row, start, end, need_state)
        if last.end > start and (pieces or need_state):
            last = self._tree.split(last, start)
            last.last_used, last.restore_point = self._now, not pieces
        if pieces:
            last = self._tree.add(last, tokens[start:], pieces)
        if state is not None:
            last.state = state
        return last

    def _take(
        self, row: R, start: int, end: int, need_state: bool
    ) -> tuple[list[Piece[E]], S | None]:
        """Keeps tokens [start, end) of a row and its snapshot; frees all of it on failure."""
        pieces: list[Piece[E]] = []
        try:
            for at, to in prefix_tree.piece_bounds(start, end):
                pieces.append(Piece(to - at, self._store.keep(row, at, to)))
            return pieces, self._store.keep_state(row) if need_state else None
        except BaseException:
            for piece in pieces:
                self._store.free(piece.held)
            raise

    def _leave(self, node: Node[E, S]) -> None:
        node.readers -= 1
        self._tree.merge_or_drop(node)


def make_prefix_cache(mode: str, store: Store[R, E, S], budget: int) -> PrefixCache[R]:
    """Makes the cache of a mode in MODES, with a budget in bytes.

    Raises ValueError for another mode or a negative budget.
    """
    if mode not in MODES:
        raise ValueError(f"prefix cache mode is {mode!r}, must be one of {', '.join(MODES)}")
    if mode == "tree":
        return TreeCache(store, budget)
    return SingleCache(store, budget) if mode == "single" else PrefixCache(store, budget)
