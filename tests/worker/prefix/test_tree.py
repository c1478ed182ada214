"""The nodes of the prefix tree: matches, splits, merges, drops. Needs no MLX."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.prefix import tree as prefix_tree
from mlxpool.worker.prefix.tree import Node, Piece, Tree, common_prefix
from support.prefix_stores import CELL, ListStore, cells_of

ListTree = Tree[list[int], list[int]]


def planted(store: ListStore, *sequences: list[int]) -> ListTree:
    """Returns a tree with these sequences, inserted in order."""
    tree: ListTree = Tree(store)
    for tokens in sequences:
        plant(tree, store, tuple(tokens))
    return tree


def plant(tree: ListTree, store: ListStore, tokens: tuple[int, ...]) -> None:
    match = tree.match(tokens, len(tokens))
    last = match.last or tree.root
    if match.tokens < last.end:
        last = tree.split(last, match.tokens)
    if match.tokens < len(tokens):
        row = store.new_row()
        row.feed(tokens)
        held = store.keep(row, match.tokens, len(tokens))
        tree.add(last, tokens[match.tokens :], [Piece(len(held), held)])
        tree.merge_or_drop(last)


def shape(node: Node[list[int], list[int]]) -> dict[tuple[int, ...], object]:
    """Returns the edges as nested dictionaries."""
    return {child.tokens: shape(child) for child in node.children.values()}


def cells(tree: ListTree, tokens: tuple[int, ...]) -> list[int]:
    match = tree.match(tokens, len(tokens))
    kept = tree.pieces_of(match, match.tokens)
    return [cell for held, count in kept for cell in held[:count]]


@pytest.mark.parametrize(
    ("tokens", "found"), [([1, 2, 3, 4, 5], 5), ([1, 2, 3, 6, 7], 5), ([1, 2, 3, 9], 3), ([9], 0)]
)
def test_the_longest_match_is_found(tokens: list[int], found: int) -> None:
    """The tree has the path [1..5], split after 3 tokens to add [6, 7].

    Covers the case FindBestMatch of the reference test suite.
    """
    tree = planted(ListStore(), [1, 2, 3, 4, 5], [1, 2, 3, 6, 7])
    assert shape(tree.root) == {(1, 2, 3): {(4, 5): {}, (6, 7): {}}}
    match = tree.match(tuple(tokens), len(tokens))
    assert match.tokens == found
    assert cells(tree, tuple(tokens)) == cells_of(tokens)[:found]


def test_a_match_ends_at_its_limit() -> None:
    tree = planted(ListStore(), [1, 2, 3, 4, 5])
    assert [tree.match((1, 2, 3, 4, 5), limit).tokens for limit in range(6)] == [0, 1, 2, 3, 4, 5]
    assert tree.match((1, 2), 0).nodes == ()


def test_a_match_begins_at_the_root() -> None:
    """A match must begin at the root: tokens from the middle of a path do not match.

    Covers 'KV snapshot [5,10) onto an empty cache: refused' of the reference test suite.
    """
    tree = planted(ListStore(), [*range(5)], [*range(10)], [0, 1, 2, 3, 4, 77])
    match = tree.match(tuple(range(10)), 10)
    assert (match.nodes[0].start, [node.end for node in match.nodes]) == (0, [5, 10])
    assert [count for _, count in tree.pieces_of(match, 7)] == [5, 2]
    assert tree.match(tuple(range(5, 10)), 5).tokens == 0


@pytest.mark.parametrize("join", [0, 4, 256])
@given(st.integers(1, 7), st.integers(1, 7))
def test_split_and_merge_round_trip(join: int, first: int, second: int) -> None:
    store = ListStore()
    tree, tokens = planted(store, [*range(8)]), tuple(range(8))
    before, prefix_tree.MAX_COPIED_JOIN = prefix_tree.MAX_COPIED_JOIN, join
    try:
        (node,) = tree.walk()
        upper = tree.split(node, first)
        assert (upper.start, upper.end, node.start, node.end) == (0, first, first, 8)
        if second != first:
            tree.split(node if second > first else upper, second)
        assert cells(tree, tokens) == cells_of(tokens)
        for piece in list(tree.walk()):
            tree.merge_or_drop(piece)
        assert shape(tree.root) == {tokens: {}}
        assert cells(tree, tokens) == cells_of(tokens)
        assert store.nbytes == 8 * CELL
    finally:
        prefix_tree.MAX_COPIED_JOIN = before


def test_a_split_outside_an_edge_raises() -> None:
    tree = planted(ListStore(), [1, 2, 3])
    (node,) = tree.walk()
    for at in (0, 3, 4):
        with pytest.raises(AssertionError, match="not inside"):
            tree.split(node, at)


def test_repeated_branching() -> None:
    tree = planted(ListStore(), [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 7], [8])
    assert shape(tree.root) == {
        (1,): {(2,): {(3,): {(4,): {}, (5,): {}}, (6,): {}}, (7,): {}},
        (8,): {},
    }


def test_drop_removes_a_leaf_and_merges_its_parent() -> None:
    store = ListStore()
    tree = planted(store, [1, 2, 3, 4, 5], [1, 2, 3, 6, 7])
    tree.drop(tree.match((1, 2, 3, 4, 5), 5).nodes[-1])
    assert shape(tree.root) == {(1, 2, 3, 6, 7): {}}
    assert store.nbytes == 5 * CELL
    assert cells(tree, (1, 2, 3, 6, 7)) == cells_of((1, 2, 3, 6, 7))


def test_only_leaves_are_dropped() -> None:
    tree = planted(ListStore(), [1, 2, 3], [1, 2, 4])
    with pytest.raises(AssertionError, match="only leaves"):
        tree.drop(tree.match((1, 2), 2).nodes[-1])


def test_a_branch_with_two_children_is_not_merged() -> None:
    tree = planted(ListStore(), [1, 2, 3], [1, 2, 4])
    before = shape(tree.root)
    for node in list(tree.walk()):
        tree.merge_or_drop(node)
    assert shape(tree.root) == before


def test_nodes_with_readers_or_restore_points_are_not_merged() -> None:
    tree = planted(ListStore(), [1, 2, 3, 4])
    upper = tree.split(next(tree.walk()), 2)
    upper.readers = 1
    tree.merge_or_drop(upper)
    upper.readers, upper.restore_point = 0, True
    tree.merge_or_drop(upper)
    assert shape(tree.root) == {(1, 2): {(3, 4): {}}}
    upper.restore_point = False
    tree.merge_or_drop(upper)
    assert shape(tree.root) == {(1, 2, 3, 4): {}}


def test_siblings_never_begin_with_the_same_token() -> None:
    tree = planted(ListStore(), [1, 2, 3])
    with pytest.raises(AssertionError, match="same token"):
        tree.add(tree.root, (1, 9), [Piece(2, [0, 0])])


def test_long_neighbours_stay_pieces_of_one_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "MAX_COPIED_JOIN", 4)
    tree = planted(ListStore(), [*range(3)], [*range(6)], [*range(7)], [*range(8)], [*range(9)])
    (node,) = tree.walk()
    assert [piece.tokens for piece in node.pieces] == [3, 4, 2]
    assert cells(tree, tuple(range(9))) == cells_of(range(9))


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def test_a_tree_that_is_cleared_leaves_nothing_in_its_nodes() -> None:
    """Other objects may still refer to the nodes, so these must not keep memory of their tokens."""
    store = ListStore()
    tree = planted(store, [1, 2, 3, 4, 5], [1, 2, 3, 6, 7])
    nodes = list(tree.walk())
    tree.clear()
    assert len(nodes) == 3 and store.nbytes == 0
    assert not any(node.pieces or node.children or node.parent for node in nodes)


def test_a_walk_goes_on_below_a_node_that_was_joined_with_its_child() -> None:
    """During a walk over the tree, the node that the walk is at is merged with its child.

    The walk then continues with the child.
    """
    tree = planted(ListStore(), [1, 2, 3, 4, 5, 6])
    (lower,) = tree.walk()
    upper, walk = tree.split(lower, 4), tree.walk()
    assert next(walk) is upper
    tree.merge_or_drop(upper)
    assert upper.parent is None and shape(tree.root) == {(1, 2, 3, 4, 5, 6): {}}
    assert list(walk) == [lower]
