"""The mode `tree` of the prefix cache: a radix tree of all closed sequences.

Used by the compute thread. Imports no MLX: only the store knows the contents of a KV row (a
sequence's KV cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Generic, TypeVar

from msgspec import Struct

from mlxpool.worker.media.spans import Spans, prefix_end
from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix.cache import EMPTY, PrefixCache, reason_of, usable
from mlxpool.worker.prefix.store import PrefixRow, Store
from mlxpool.worker.prefix.tree import Match, Node, Piece, Tree

E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)

# Tokens between two restore points of a prompt, if layers need snapshots.
RESTORE_POINT_INTERVAL = 8192


class _ActiveRow(Struct, Generic[R, E, S]):
    """A KV row in use, with its position in the tree and its remaining restore points.

    While this object refers to the row, no other row has the same id().
    """

    row: R
    node: Node[E, S]  # the deepest node that the KV row began from or was cached at
    stops: list[int]  # the next restore points
    goal: int  # the end of the row's prefill; a row closed earlier gets a restore point at its end
    scope: str


class TreeCache(PrefixCache[R], Generic[R, E, S]):
    """A radix tree of all closed sequences, bounded by the budget."""

    shares = True

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self.whole = store.stateful
        self._store = store
        self._tree: Tree[E, S] = Tree(store)
        self._readers: dict[int, _ActiveRow[R, E, S]] = {}
        self._now = 0  # the counter of uses, for LRU eviction

    @property
    def nbytes(self) -> int:
        """The bytes of all entries; see PrefixCache."""
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
        owner: str = "",
    ) -> tuple[R, int]:
        """Returns a KV row with the cached tokens of a prompt; see PrefixCache.

        The nodes from which the row was filled are not evicted until `close`.
        """
        prompt = tuple(prompt)
        empty = not self.nbytes
        self._now += 1
        scope = self._scope(owner)
        match = self._match(prompt, media, usable(prompt, most), scope)
        cached, state = self._restorable(match)
        row = self._filled(match, cached, state, len(prompt))
        node = match.last or self._tree.root_of(scope)
        if match.tokens == node.end:
            node.last_used = self._now
        node.readers += 1
        places = {restore_at, match.tokens}
        stops = self._stops(len(prompt), cached, places, media)
        self._readers[id(row)] = _ActiveRow(row, node, stops, len(prompt) - 1, scope)
        self._count(cached, EMPTY if empty else reason_of(cached, match.tokens, len(prompt)))
        return row, cached

    def next_restore_point(self, row: R) -> int | None:
        """Returns the position where the next prefill chunk must end; see PrefixCache."""
        reader = self._readers.get(id(row))
        return reader.stops[0] if reader is not None and reader.stops else None

    def keep(self, row: R, tokens: Sequence[int], *, restore_point: bool = False) -> None:
        """Caches the tokens that the KV row has so far; see PrefixCache.

        Also makes a restore point at a position from `next_restore_point`.
        """
        reader = self._readers[id(row)]
        node = self._insert(row, tuple(tokens[: row.offset]), reader.scope)
        if node is not None:
            node.restore_point |= restore_point or row.offset in reader.stops
            node.readers += 1
            before, reader.node = reader.node, node
            self._leave(before)
        reader.stops = [stop for stop in reader.stops if stop > row.offset]

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """Ends the use of a KV row, and caches the tokens that the tree lacks; see PrefixCache.

        Ignores an unknown KV row.
        """
        reader = self._readers.pop(id(row), None)
        if reader is None:
            return
        try:
            if not self._store.stateful or row.offset <= len(tokens):
                node = self._insert(row, tuple(tokens[: row.offset]), reader.scope)
                if node is not None and self._store.stateful and row.offset < reader.goal:
                    node.restore_point = True
        finally:
            self._release(row)
            self._leave(reader.node)
            self.shrink(self.nbytes - self._budget)

    def shrink(self, needed: int) -> int:
        """Evicts entries until `needed` bytes are freed, if possible; see PrefixCache.

        Does not evict nodes from which KV rows in use were filled.
        """
        before = self.nbytes
        while (
            before - self.nbytes < needed
            and (victim := self._tree.eviction_candidate()) is not None
        ):
            self._evict(victim)
        return before - self.nbytes

    def clear(self) -> int:
        """Frees all entries and returns their bytes; see PrefixCache."""
        before = self.nbytes
        self._tree.clear()
        for reader in self._readers.values():
            reader.node = self._tree.root_of(reader.scope)
            reader.node.readers += 1
        return before - self.nbytes

    # ---- contents from another memory, for example a disk ----------------------------------------

    @property
    def uses(self) -> int:
        """The number of `begin`, `graft` and insertions so far; constant while nothing is added."""
        return self._now

    def probe(
        self, prompt: Sequence[int], media: Spans = (), most: int | None = None, owner: str = ""
    ) -> tuple[int, int]:
        """Returns how many first tokens of a prompt the tree has, and how many can be restored."""
        tokens, scope = tuple(prompt), self._scope(owner)
        match = self._match(tokens, media, usable(prompt, most), scope)
        return match.tokens, self._restorable(match)[0]

    def graft(
        self,
        tokens: tuple[int, ...],
        owner: str,
        least: int,
        bytes_of: Callable[[int, int], int],
        piece: Callable[[int, int], E],
        state: tuple[int, Callable[[], S]] | None = None,
        *,
        claim: Callable[[int], bool],
    ) -> tuple[Node[E, S], int] | None:
        """Adds the part of `tokens` that the tree lacks, with contents from a disk, for example.

        `piece(start, end)` makes the content of the tokens [start, end); `bytes_of(start, end)`
        returns the size of the content in bytes. `state`: the size of the snapshot at the end of
        the tokens, and a function that makes the snapshot. `claim(needed)` returns whether `needed`
        bytes of memory are free. The tree itself cannot know this, because KV rows may own memory
        that they have not written yet.

        Returns the node at the end of the tokens, and the number of added tokens. The node is not
        evicted until `leave`. Returns None if there is no room for the tokens, or if the tree
        lacks some of the first `least` tokens.
        """
        scope = self._scope(owner)
        match = self._tree.match(tokens, len(tokens), scope)
        if match.tokens < least:
            return None
        last, start = match.last or self._tree.root_of(scope), match.tokens
        self._now += 1
        last.readers += 1
        try:
            if state is not None and start == len(tokens) == last.end and last.state is not None:
                state = None
            needed = bytes_of(start, len(tokens)) if start < len(tokens) else 0
            needed += 0 if state is None else state[0]
            if not self._free(needed) or not claim(needed):
                return None
            pieces = self._made(start, len(tokens), piece)
            try:
                held = None if state is None else state[1]()
            except BaseException:
                self._free_pieces(pieces)
                raise
            node = self._extend(last, tokens, start, pieces, held)
            node.last_used = self._now
            node.readers += 1
            return node, len(tokens) - start
        finally:
            self._leave(last)

    def leave(self, node: Node[E, S]) -> None:
        """Ends the protection from eviction that `graft` gave to a node."""
        self._leave(node)

    def _free(self, needed: int) -> bool:
        """Evicts least recently used entries until the budget has room for `needed` bytes.

        Returns whether the budget has room.
        """
        while (
            self._budget - self.nbytes < needed
            and (victim := self._tree.eviction_candidate()) is not None
        ):
            self._evict(victim)
        return needed <= max(0, self._budget - self.nbytes)

    def _made(self, start: int, end: int, piece: Callable[[int, int], E]) -> list[Piece[E]]:
        """Makes the pieces of tokens [start, end); on failure, frees all these pieces."""
        pieces: list[Piece[E]] = []
        try:
            for at, to in prefix_tree.piece_bounds(start, end):
                pieces.append(Piece(to - at, piece(at, to)))
            return pieces
        except BaseException:
            self._free_pieces(pieces)
            raise

    def _free_pieces(self, pieces: Sequence[Piece[E]]) -> None:
        for piece in pieces:
            self._store.free(piece.held)

    # ---- the tree --------------------------------------------------------------------------------

    def _match(self, prompt: tuple[int, ...], media: Spans, most: int, scope: str) -> Match[E, S]:
        """Returns the longest match, up to `most` tokens, that does not end inside `media`."""
        match = self._tree.match(prompt, prefix_end(media, most), scope)
        end = prefix_end(media, match.tokens)
        return match if end == match.tokens else self._tree.match(prompt, end, scope)

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
        """Returns the number of restorable tokens of a match, and the snapshot that restores them.

        The snapshot is None if the layers need none.
        """
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

        Restore points are `places` (the caller's hint, and the point where an earlier prompt
        branched off) and every multiple of RESTORE_POINT_INTERVAL. A point inside a group of
        `media` moves to the beginning of the group.
        """
        if not self._store.stateful:
            return []
        stops = places | {*range(RESTORE_POINT_INTERVAL, length, RESTORE_POINT_INTERVAL)}
        ends = {prefix_end(media, place) for place in stops}
        return sorted(at for at in ends if cached < at < length)

    def _insert(self, row: R, tokens: tuple[int, ...], scope: str) -> Node[E, S] | None:
        """Inserts the part of a KV row's `tokens` that the tree lacks, as far as the budget allows.

        If layers need a snapshot, inserts all tokens and the snapshot, or nothing. Returns the node
        at the end of the tokens; None if not all tokens are cached.
        """
        if not tokens:
            return None
        match = self._tree.match(tokens, len(tokens), scope)
        last = match.last or self._tree.root_of(scope)
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
        """Evicts least recently used entries to make room for a KV row's tokens [start, end).

        Returns the position up to which there is room for the tokens. Returns -1 if the budget
        has no room at all, or none for the needed snapshot.
        """
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
        """Adds the tokens from `start` on below the node `last`, with a KV row's contents.

        Returns the last node.
        """
        pieces = self._made(start, len(tokens), lambda at, to: self._store.keep(row, at, to))
        try:
            state = self._store.keep_state(row) if need_state else None
        except BaseException:
            self._free_pieces(pieces)
            raise
        return self._extend(last, tokens, start, pieces, state)

    def _extend(
        self,
        last: Node[E, S],
        tokens: tuple[int, ...],
        start: int,
        pieces: list[Piece[E]],
        state: S | None,
    ) -> Node[E, S]:
        """Adds the tokens from `start` on below the node `last`, with pieces and snapshot.

        If `last` ends after `start`, first splits the edge of `last` at `start`. Returns the last
        node.
        """
        if last.end > start and (pieces or state is not None):
            last = self._tree.split(last, start)
            last.last_used, last.restore_point = self._now, not pieces
        if pieces:
            last = self._tree.add(last, tokens[start:], pieces)
        if state is not None:
            last.state = state
        return last

    def _leave(self, node: Node[E, S]) -> None:
        node.readers -= 1
        self._tree.merge_or_drop(node)
