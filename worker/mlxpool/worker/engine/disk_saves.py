"""Chooses the records of the prefix tree that go to the disk next, in the compute thread.

Records go to the writer one by one. While the worker is idle, and before it ends, all records are
saved. While sequences run, only the records that may soon be evicted are saved, one step of work
between two passes. The work of a step is bounded, however large the tree is and however long its
paths are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from msgspec import Struct, field

from mlxpool.worker.attention.stored_arrays import (
    DeviceArray,
    PortableStore,
    host_arrays,
    stored_bytes,
)
from mlxpool.worker.prefix.paths import parts_between, path_of, tokens_between
from mlxpool.worker.prefix.tree import Node
from mlxpool.worker.prefix.tree_cache import TreeCache
from mlxpool.worker.prefix_disk.records import BLOCK_TOKENS, Kind, block_key, packed, root_key
from mlxpool.worker.prefix_disk.tier import DiskTier
from mlxpool.worker.prefix_disk.writing import NewRecord

MIN_PART = 32  # the least tokens of a record shorter than a block; fewer tokens are computed again
MAX_REMEMBERED = 2**20  # the most remembered keys of records that went to the writer
STEP_BLOCKS = 8  # the blocks of a path whose keys one step computes
STEP_NODES = 64  # the nodes of the tree that one step visits


class Block(Struct, frozen=True):
    """Inputs that the disk stores as one record: [start, end) of a path in the prefix tree.

    `ids`: the ids of these inputs. `key` identifies the record, and `parent` the record before it.
    """

    start: int
    end: int
    parent: bytes
    key: bytes
    ids: tuple[int, ...]


class _Target(Struct):
    """A node whose path is saved.

    `blocks`: the blocks of the path, from the root on; valid while the node still ends at `end`.
    """

    node: Node[Any, Any]
    end: int
    root: bytes  # the key of an empty path
    blocks: list[Block] = field(default_factory=list)
    chained: bool = False  # whether `blocks` are complete
    passed: int = 0  # the number of `blocks` that the disk has or was given

    @property
    def current(self) -> bool:
        """True if the node is still in the tree, with the same tokens."""
        return self.node.parent is not None and self.node.end == self.end


class _Next(Struct, frozen=True):
    """A record that waits until the tier accepts `size` bytes of arrays."""

    block: Block
    kind: Kind
    arrays: list[DeviceArray]
    size: int

    def record(self) -> NewRecord:
        block = self.block
        arrays = host_arrays(self.arrays)
        return NewRecord(self.kind, block.start, block.parent, block.key, block.ids, arrays)


class DiskSaves:
    """Finds the records of a tree that the disk lacks."""

    def __init__(
        self, tier: DiskTier, cache: TreeCache[Any, Any, Any], store: PortableStore[Any, Any]
    ) -> None:
        self._tier, self._cache, self._store = tier, cache, store
        self._stateful = cache.whole
        self._given: set[tuple[Kind, bytes]] = set()
        # By the id of a node: the node, and its end when it was saved.
        self._saved: dict[int, tuple[Node[Any, Any], int]] = {}
        self._walk: Iterator[Node[Any, Any]] | None = None  # a walk of the tree, for a plan
        self._found: list[Node[Any, Any]] = []  # nodes of the walk so far
        self._plan: deque[Node[Any, Any]] = deque()
        self._target: _Target | None = None
        self._planned_at = -1  # `uses` of the cache when the plan was made
        self._next: _Next | None = None

    @property
    def may_have(self) -> bool:
        """True if the tree may have records to save."""
        begun = self._next or self._target or self._plan or self._walk
        return bool(begun) or self._planned_at != self._cache.uses

    def step(self, *, leaving: bool) -> bool:
        """Does one step of saving: a search, a copy on the device, or a record for the writer.

        `leaving`: saves the least recently used nodes first. Returns False if all records are
        saved, or the tier's queue is full.
        """
        if self._next is None:
            return self._find(leaving=leaving)
        if self._tier.writes.takes(self._next.size):
            record, self._next = self._next.record(), None
            self._tier.writes.put(record)
            return True
        return False

    def again(self) -> None:
        """Forgets which records were saved, because the disk may have deleted some of these.

        The next steps search the whole tree again.
        """
        self._given.clear()
        self._saved.clear()
        self._plan.clear()
        self._target = self._walk = None
        self._planned_at = -1

    def give_up(self) -> None:
        """Drops the record and the path in progress."""
        self._next = self._target = None

    def _find(self, *, leaving: bool) -> bool:
        """Searches for the next record that the disk lacks; returns False at the end of the search.

        One call visits a few nodes or blocks.
        """
        target = self._target
        if target is None or not target.current:
            self._target = None
            if not self._plan:
                return self._make_plan(leaving=leaving)
            node = self._plan.popleft()
            if node.parent is not None:
                self._target = _Target(node, node.end, root_key(path_of(node)[0].scope))
            return True
        missing = self._missing(target)
        if missing is not None:
            block, kind = missing
            self._remember(kind, block.key)
            arrays = self._arrays(target, block, kind)
            self._next = _Next(block, kind, arrays, stored_bytes(arrays))
        elif not target.chained:
            self._chain(target)
        else:
            self._saved[id(target.node)] = target.node, target.end
            self._target = None
        return True

    def _make_plan(self, *, leaving: bool) -> bool:
        """Visits some nodes of the tree, to choose the nodes whose paths are saved.

        Returns False if the tree has not changed since the last choice.
        """
        if self._walk is None:
            if self._planned_at == self._cache.uses:
                return False
            self._planned_at = self._cache.uses  # the next plan has nodes added during the walk
            self._walk, self._found = self._cache.tree.walk(), []
        some = list(islice(self._walk, STEP_NODES))
        self._found += (
            node
            for node in some
            if (node.state is not None if self._stateful else not node.children)
        )
        if len(some) == STEP_NODES:
            return True
        nodes, self._walk, self._found = self._found, None, []
        ends = {id(node): self._saved.get(id(node)) for node in nodes}
        self._saved = {key: end for key, end in ends.items() if end is not None}
        nodes = [node for node in nodes if self._saved.get(id(node)) != (node, node.end)]
        nodes.sort(key=lambda node: node.last_used, reverse=not leaving)
        self._plan.extend(nodes)
        return True

    def _chain(self, target: _Target) -> None:
        """Adds the next blocks of a path, with their keys."""
        path, blocks = path_of(target.node), target.blocks
        for _ in range(STEP_BLOCKS):
            start = blocks[-1].end if blocks else 0
            end = min(start + BLOCK_TOKENS, target.end)
            short = end - start < MIN_PART and start and not self._stateful
            if start == end or short:
                target.chained = True
                return
            ids = tokens_between(path, start, end)
            parent = blocks[-1].key if blocks else target.root
            blocks.append(Block(start, end, parent, block_key(parent, packed(ids)), ids))

    def _missing(self, target: _Target) -> tuple[Block, Kind] | None:
        """Returns the next record of the target's `blocks` that the disk lacks, or None."""
        while target.passed < len(target.blocks):
            block = target.blocks[target.passed]
            target.passed += 1
            if not self._known(Kind.TOKENS, block.key):
                return block, Kind.TOKENS
        if target.chained and target.node.state is not None and target.blocks:
            last = target.blocks[-1]
            if not self._known(Kind.STATE, last.key):
                return last, Kind.STATE
        return None

    def _known(self, kind: Kind, key: bytes) -> bool:
        return (kind, key) in self._given or self._tier.index.has(kind, key)

    def _remember(self, kind: Kind, key: bytes) -> None:
        if len(self._given) >= MAX_REMEMBERED:
            self._given.clear()
        self._given.add((kind, key))

    def _arrays(self, target: _Target, block: Block, kind: Kind) -> list[DeviceArray]:
        if kind is Kind.STATE:
            return self._store.stored_state(target.node.state)
        parts = list(parts_between(path_of(target.node), block.start, block.end))
        return self._store.stored(parts)
