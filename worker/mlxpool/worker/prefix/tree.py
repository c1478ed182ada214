"""A radix tree over the token ids of cached sequences. Pure.

An edge owns the cached pieces of its tokens; only the store (prefix/store.py) knows their content.
Layers whose memory cannot be divided by tokens have a snapshot at the end of an edge. Siblings
never begin with the same token. A node with readers (rows that were filled from it or cached at it)
is neither dropped nor merged into its only child. Each scope has its own root, so sequences of
different scopes have no common nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import Struct, field

from mlxpool.worker.prefix.store import PieceStore

E = TypeVar("E")  # the cached content of a range of tokens
S = TypeVar("S")  # a snapshot of all layers at one position

MAX_PIECE = 2048  # tokens; pieces cross no multiple of this, so each copy or free is small
MAX_COPIED_JOIN = 256  # tokens; if a join copies, longer neighbours stay separate pieces


class Piece(Struct, Generic[E], frozen=True):
    """The cached content, `held`, of `tokens` neighbouring tokens."""

    tokens: int
    held: E


class Node(Struct, Generic[E, S], eq=False):
    """An edge and the node at its end; the edge has tokens [start, end), counted from the root."""

    start: int
    tokens: tuple[int, ...]
    pieces: list[Piece[E]]
    state: S | None = None  # the snapshot at `end`
    restore_point: bool = False  # True: joined with its only child only to free memory
    parent: Node[E, S] | None = None  # None: the root, or no longer in the tree
    children: dict[int, Node[E, S]] = field(default_factory=dict)
    last_used: int = 0  # the caller's counter at the last use
    readers: int = 0
    scope: str = ""  # the scope of a root

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Match(Struct, Generic[E, S], frozen=True):
    """The nodes on the path of a token sequence, and the number of matching tokens."""

    nodes: tuple[Node[E, S], ...]
    tokens: int

    @property
    def last(self) -> Node[E, S] | None:
        """The node in whose edge the match ends; None: no token matches."""
        return self.nodes[-1] if self.nodes else None


class Tree(Generic[E, S]):
    """The nodes of all scopes; frees dropped pieces through `store`."""

    def __init__(self, store: PieceStore[E, S]) -> None:
        self._store = store
        self._roots: dict[str, Node[E, S]] = {}

    @property
    def root(self) -> Node[E, S]:
        """The root of the unnamed scope."""
        return self.root_of("")

    def root_of(self, scope: str) -> Node[E, S]:
        """Returns the root of a scope; makes the root if needed."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Node(0, (), [], scope=scope)
        return root

    def match(self, tokens: tuple[int, ...], limit: int, scope: str = "") -> Match[E, S]:
        """Returns the longest match of the first `limit` tokens."""
        nodes, at = list[Node[E, S]](), 0
        node = self._roots.get(scope)
        while node is not None and at < limit and (child := node.children.get(tokens[at])):
            nodes.append(child)
            at += common_prefix(child.tokens, tokens[at : min(child.end, limit)])
            if at < child.end:
                break
            node = child
        return Match(tuple(nodes), at)

    def pieces_of(self, match: Match[E, S], tokens: int) -> list[tuple[E, int]]:
        """Returns the pieces of a match's first `tokens` tokens, with their token counts."""
        pieces, left = [], tokens
        for piece in (piece for node in match.nodes for piece in node.pieces):
            if left <= 0:
                break
            pieces.append((piece.held, min(piece.tokens, left)))
            left -= piece.tokens
        return pieces

    def walk(self, node: Node[E, S] | None = None) -> Iterator[Node[E, S]]:
        """Yields `node` and all nodes below it; None: all nodes below the roots.

        The tree may change during the iteration. Nodes that stay in the tree are yielded.
        Nodes that have left the tree may be yielded, with the parent None.
        """
        roots = self._roots.values() if node is None else ()
        stack = [child for root in roots for child in root.children.values()]
        stack += [] if node is None else [node]
        while stack:
            current = stack.pop()
            # Before the yield, because the caller may join the node with its child.
            stack += current.children.values()
            yield current

    def add(
        self, parent: Node[E, S], tokens: tuple[int, ...], pieces: list[Piece[E]]
    ) -> Node[E, S]:
        """Adds a leaf below `parent`; no child of `parent` may begin with the same token."""
        assert tokens and tokens[0] not in parent.children, "siblings begin with the same token"
        assert sum(p.tokens for p in pieces) == len(tokens), "an edge holds exactly its own tokens"
        leaf = Node(parent.end, tokens, pieces, parent=parent)
        parent.children[tokens[0]] = leaf
        return leaf

    def split(self, node: Node[E, S], at: int) -> Node[E, S]:
        """Splits an edge at position `at`, counted from the root; returns the new upper node.

        `node` becomes the lower part and keeps its snapshot, restore point and readers.
        """
        assert node.start < at < node.end, f"{at} is not inside [{node.start}, {node.end})"
        assert node.parent is not None
        cut = at - node.start
        above, below = self._split_pieces(node.pieces, cut)
        upper = Node(
            node.start, node.tokens[:cut], above, parent=node.parent, last_used=node.last_used
        )
        node.parent.children[upper.tokens[0]] = upper
        upper.children[node.tokens[cut]] = node
        node.start, node.tokens, node.pieces = at, node.tokens[cut:], below
        node.parent = upper
        return upper

    def merge_or_drop(self, node: Node[E, S]) -> None:
        """Removes a node that is not needed any more.

        A node without readers is merged into its only child, unless it is a restore point. A leaf
        without readers is dropped if no row can be restored from it, because it lacks a snapshot.
        """
        if node.readers:
            return
        if node.parent is None:
            if not node.children and self._roots.get(node.scope) is node:
                del self._roots[node.scope]  # the scope has no entries left
            return
        if len(node.children) == 1 and not node.restore_point:
            self._join(node)
        elif not node.children and node.state is None and self._store.stateful:
            self.drop(node)  # no row can be restored from this node

    def drop(self, leaf: Node[E, S]) -> None:
        """Drops a leaf, and its parent if the parent is no longer needed."""
        parent = leaf.parent
        assert parent is not None and not leaf.children, "only leaves are dropped"
        del parent.children[leaf.tokens[0]]
        leaf.parent = None
        for piece in leaf.pieces:
            self._store.free(piece.held)
        self._free_state(leaf)
        leaf.pieces = []
        self.merge_or_drop(parent)

    def eviction_candidate(self) -> Node[E, S] | None:
        """Returns the least recently used leaf without readers (LRU), or None.

        An inner node with a snapshot and one child is also a candidate, because its snapshot can be
        freed alone.
        """
        candidates = (
            node
            for node in self.walk()
            if not node.readers
            and (not node.children or (len(node.children) == 1 and node.state is not None))
        )
        return min(candidates, key=lambda node: (node.last_used, -node.end), default=None)

    def evict(self, node: Node[E, S]) -> None:
        """Frees the last piece of an eviction candidate, or its snapshot, or the whole node."""
        if node.children:
            self._join(node)
        elif len(node.pieces) > 1 and not self._store.stateful:
            piece = node.pieces.pop()
            node.tokens = node.tokens[: -piece.tokens]
            self._store.free(piece.held)
        else:
            self.drop(node)

    def clear(self) -> None:
        """Frees all nodes, including nodes with readers."""
        for node in list(self.walk()):
            for piece in node.pieces:
                self._store.free(piece.held)
            self._free_state(node)
            node.parent, node.pieces = None, []  # lists of nodes to save may have the node
            node.children.clear()
        self._roots.clear()

    def _join(self, node: Node[E, S]) -> None:
        """Merges the edge of `node` into its only child."""
        (child,) = node.children.values()
        assert node.parent is not None and not node.readers
        self._free_state(node)
        child.pieces = self._join_pieces(node.pieces, child.pieces, node.end)
        child.start, child.tokens = node.start, node.tokens + child.tokens
        child.parent, child.last_used = node.parent, max(child.last_used, node.last_used)
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
        if at % MAX_PIECE == 0 or (self._store.join_copies and together > MAX_COPIED_JOIN):
            return above + below
        joined = Piece(together, self._store.join(left.held, right.held))
        return [*above[:-1], joined, *below[1:]]


def piece_bounds(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Divides the tokens [start, end) into pieces; yields the bounds of the pieces."""
    at = start
    while at < end:
        to = min(at - at % MAX_PIECE + MAX_PIECE, end)
        yield at, to
        at = to


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the longest common prefix, by bisection."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
