"""Reads the tokens and cached pieces on the path from the root of a tree to a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from mlxpool.worker.prefix.tree import Node

E = TypeVar("E")
S = TypeVar("S")


class Part(Struct, Generic[E], frozen=True):
    """The tokens [low, high) of a path, which are in the cached piece `held`.

    All positions count from the root; the first token of the piece is at `start`.
    """

    held: E
    start: int
    low: int
    high: int


def path_of(node: Node[E, S]) -> list[Node[E, S]]:
    """Returns the nodes from the root to a node; the root has no tokens."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def tokens_between(path: Sequence[Node[E, S]], start: int, end: int) -> tuple[int, ...]:
    """Returns the tokens [start, end) of a path."""
    tokens: tuple[int, ...] = ()
    for node in path:
        if node.start < end and node.end > start:
            tokens += node.tokens[max(start - node.start, 0) : end - node.start]
    return tokens


def parts_between(path: Sequence[Node[E, S]], start: int, end: int) -> Iterator[Part[E]]:
    """Yields the parts of cached pieces with the tokens [start, end) of a path, in order."""
    for node in path:
        if node.end <= start or node.start >= end:
            continue
        at = node.start
        for piece in node.pieces:
            low, high = max(start, at), min(end, at + piece.tokens)
            if low < high:
                yield Part(piece.held, at, low, high)
            at += piece.tokens
