"""A radix tree over token ids: what sequences left behind, each token of it once. Pure.

An edge owns what was kept of its own tokens, in pieces; what a piece holds only the store knows
(prefix/store.py). Layers whose memory cannot be cut by tokens keep a whole state at the end of an
edge. Siblings never begin with the same token. An edge that somebody reads is neither dropped nor
joined to its only child.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mlxpool.worker.prefix.store import Pieces

E = TypeVar("E")  # what is kept of some tokens in a row
S = TypeVar("S")  # a whole state, kept at one place

PIECE = 2048  # no piece crosses a multiple of so many tokens: what is copied or freed at once
JOIN = 256  # tokens; where joining copies, longer neighbours stay two pieces


@dataclass(frozen=True, slots=True)
class Piece(Generic[E]):
    """`held` is what was kept of `tokens` tokens in a row."""

    tokens: int
    held: E


@dataclass(eq=False, slots=True)
class Node(Generic[E, S]):
    """An edge and its end. Lengths count from the root: the edge is tokens [start, end)."""

    start: int
    tokens: tuple[int, ...]
    pieces: list[Piece[E]]
    state: S | None = None  # of the place `end`
    chosen: bool = False  # a restore point: not joined to its child except to free memory
    parent: Node[E, S] | None = None  # None: the root, or no longer in the tree
    children: dict[int, Node[E, S]] = field(default_factory=dict)
    used: int = 0  # when somebody last landed here, by the caller's count
    readers: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match(Generic[E, S]):
    """The nodes below the root that some tokens run through, and how far they get."""

    nodes: tuple[Node[E, S], ...]
    tokens: int

    @property
    def last(self) -> Node[E, S] | None:
        """The node that the match ends in, or at the end of."""
        return self.nodes[-1] if self.nodes else None


class Tree(Generic[E, S]):
    """The shape of the tree. What is dropped goes back to `store`, nothing is freed elsewhere."""

    def __init__(self, store: Pieces[E, S]) -> None:
        self._store = store
        self.root: Node[E, S] = Node(0, (), [])

    def match(self, tokens: tuple[int, ...], limit: int) -> Match[E, S]:
        """How far the first `limit` of `tokens` run through the tree."""
        nodes, at, node = [], 0, self.root
        while at < limit and (child := node.children.get(tokens[at])) is not None:
            nodes.append(child)
            at += common(child.tokens, tokens[at : min(child.end, limit)])
            if at < child.end:
                break
            node = child
        return Match(tuple(nodes), at)

    def kept(self, match: Match[E, S], tokens: int) -> list[tuple[E, int]]:
        """The pieces that hold the first `tokens` of a match, and how much of each is wanted."""
        wanted, left = [], tokens
        for piece in (piece for node in match.nodes for piece in node.pieces):
            if left <= 0:
                break
            wanted.append((piece.held, min(piece.tokens, left)))
            left -= piece.tokens
        return wanted

    def walk(self, node: Node[E, S] | None = None) -> Iterator[Node[E, S]]:
        """`node` and all below it; None: all below the root."""
        stack = list(self.root.children.values()) if node is None else [node]
        while stack:
            one = stack.pop()
            yield one
            stack += one.children.values()

    def add(
        self, parent: Node[E, S], tokens: tuple[int, ...], pieces: list[Piece[E]]
    ) -> Node[E, S]:
        """A new leaf below `parent`; none of its children begins with the same token."""
        assert tokens and tokens[0] not in parent.children, "siblings begin with the same token"
        assert sum(p.tokens for p in pieces) == len(tokens), "an edge holds exactly its own tokens"
        leaf = Node(parent.end, tokens, pieces, parent=parent)
        parent.children[tokens[0]] = leaf
        return leaf

    def split(self, node: Node[E, S], at: int) -> Node[E, S]:
        """Ends an edge at `at` inside it; returns the new upper part.

        `node` itself becomes the lower part and keeps state, mark and readers.
        """
        assert node.start < at < node.end, f"{at} is not inside [{node.start}, {node.end})"
        assert node.parent is not None
        cut = at - node.start
        above, below = self._split_pieces(node.pieces, cut)
        upper = Node(node.start, node.tokens[:cut], above, parent=node.parent, used=node.used)
        node.parent.children[upper.tokens[0]] = upper
        upper.children[node.tokens[cut]] = node
        node.start, node.tokens, node.pieces = at, node.tokens[cut:], below
        node.parent = upper
        return upper

    def settle(self, node: Node[E, S]) -> None:
        """Joins `node` to its only child where nobody needs the place between them."""
        if node.parent is None or node.readers:
            return
        if len(node.children) == 1 and not node.chosen:
            self._join(node)
        elif not node.children and node.state is None and self._store.stateful:
            self.drop(node)  # nothing can be restored from here

    def drop(self, leaf: Node[E, S]) -> None:
        """Takes a leaf out, and what then has no reason to be there."""
        parent = leaf.parent
        assert parent is not None and not leaf.children, "only leaves are dropped"
        del parent.children[leaf.tokens[0]]
        leaf.parent = None
        for piece in leaf.pieces:
            self._store.free(piece.held)
        self._free_state(leaf)
        leaf.pieces = []
        self.settle(parent)

    def victim(self) -> Node[E, S] | None:
        """What goes first when memory is short: the leaf that was not used for the longest time.

        Where a whole state can be freed alone, its place counts as a leaf.
        """
        candidates = (
            node
            for node in self.walk()
            if not node.readers
            and (not node.children or (len(node.children) == 1 and node.state is not None))
        )
        return min(candidates, key=lambda node: (node.used, -node.end), default=None)

    def evict(self, node: Node[E, S]) -> None:
        """Frees the least that is worth it of a victim: its last piece, its state, or all of it."""
        if node.children:
            self._join(node)
        elif len(node.pieces) > 1 and not self._store.stateful:
            piece = node.pieces.pop()
            node.tokens = node.tokens[: -piece.tokens]
            self._store.free(piece.held)
        else:
            self.drop(node)

    def clear(self) -> None:
        """Gives everything up, whoever reads it."""
        for node in list(self.walk()):
            for piece in node.pieces:
                self._store.free(piece.held)
            self._free_state(node)
            node.parent = None
            node.children.clear()
        self.root.children.clear()

    def _join(self, node: Node[E, S]) -> None:
        """The only child takes over the edge of `node`."""
        (child,) = node.children.values()
        assert node.parent is not None and not node.readers
        self._free_state(node)
        child.pieces = self._join_pieces(node.pieces, child.pieces, node.end)
        child.start, child.tokens = node.start, node.tokens + child.tokens
        child.parent, child.used = node.parent, max(child.used, node.used)
        node.parent.children[child.tokens[0]] = child
        node.parent, node.pieces = None, []
        node.children.clear()

    def _free_state(self, node: Node[E, S]) -> None:
        if node.state is not None:
            self._store.free_state(node.state)
            node.state = None

    def _split_pieces(
        self, pieces: list[Piece[E]], at: int
    ) -> tuple[list[Piece[E]], list[Piece[E]]]:
        index = 0
        while at >= pieces[index].tokens:
            at -= pieces[index].tokens
            index += 1
        above, below = pieces[:index], pieces[index + 1 :]
        if at == 0:
            return above, [pieces[index], *below]
        left, right = self._store.cut(pieces[index].held, at)
        rest = pieces[index].tokens - at
        return [*above, Piece(at, left)], [Piece(rest, right), *below]

    def _join_pieces(self, above: list[Piece[E]], below: list[Piece[E]], at: int) -> list[Piece[E]]:
        left, right = above[-1], below[0]
        together = left.tokens + right.tokens
        if at % PIECE == 0 or (self._store.joins_copy and together > JOIN):
            return above + below
        joined = Piece(together, self._store.join(left.held, right.held))
        return [*above[:-1], joined, *below[1:]]


def bounds(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Tokens [start, end) as pieces."""
    at = start
    while at < end:
        to = min(at - at % PIECE + PIECE, end)
        yield at, to
        at = to


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common prefix, in a few comparisons of slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
