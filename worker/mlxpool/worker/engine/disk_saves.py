"""Which records of the prefix tree go to the disk next, in the compute thread.

Records are given away one by one: all of them while the worker has nothing to do and before it
ends, and while sequences run those that will leave the memory soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxpool.worker.attention.stored_arrays import (
    DeviceArray,
    PortableStore,
    host_arrays,
    stored_bytes,
)
from mlxpool.worker.prefix.paths import parts_between, path_of, tokens_of
from mlxpool.worker.prefix.tree import Node
from mlxpool.worker.prefix.tree_cache import TreeCache
from mlxpool.worker.prefix_disk.contents import NewRecord
from mlxpool.worker.prefix_disk.keys import BLOCK_TOKENS, block_key, packed, root_key
from mlxpool.worker.prefix_disk.records import Kind
from mlxpool.worker.prefix_disk.tier import DiskTier

MIN_PART = 32  # tokens of a record of less than a block; fewer are computed again
MAX_REMEMBERED = 2**20  # keys of records that were given away


@dataclass(frozen=True, slots=True)
class Block:
    """A record of a node's path: inputs [start, end), which have a key."""

    start: int
    end: int
    parent: bytes
    key: bytes


@dataclass(slots=True)
class _Target:
    """A node whose path is saved; `blocks` hold while it ends where it did."""

    node: Node[Any, Any]
    end: int
    tokens: tuple[int, ...]
    blocks: list[Block]

    @property
    def current(self) -> bool:
        """Whether the node is still in the tree, with the same tokens."""
        return self.node.parent is not None and self.node.end == self.end


@dataclass(frozen=True, slots=True)
class _Next:
    """A record that waits until the tier takes `size` bytes of arrays."""

    block: Block
    kind: Kind
    ids: tuple[int, ...]
    arrays: list[DeviceArray]
    size: int

    def record(self) -> NewRecord:
        block = self.block
        arrays = host_arrays(self.arrays)
        return NewRecord(self.kind, block.start, block.parent, block.key, self.ids, arrays)


class DiskSaves:
    """Finds what the disk lacks of a tree."""

    def __init__(
        self, tier: DiskTier, cache: TreeCache[Any, Any, Any], store: PortableStore[Any, Any]
    ) -> None:
        self._tier, self._cache, self._store = tier, cache, store
        self._stateful = cache.whole
        self._given: set[tuple[Kind, bytes]] = set()
        self._saved: dict[int, tuple[Node[Any, Any], int]] = {}  # nodes by id, and their ends then
        self._plan: deque[Node[Any, Any]] = deque()
        self._target: _Target | None = None
        self._planned_at = -1  # `uses` of the cache; the plan is for this state of it
        self._next: _Next | None = None

    @property
    def may_have(self) -> bool:
        """Whether there may be something to save."""
        begun = self._next is not None or self._target is not None or bool(self._plan)
        return begun or self._planned_at != self._cache.uses

    def step(self, *, leaving: bool) -> bool:
        """Looks at one node, copies the next record on the device, or gives away what was copied.

        `leaving`: first what was used least recently. Returns False where there is nothing to do:
        all is saved, or the tier takes no more now.
        """
        if self._next is None:
            return self._find(leaving=leaving)
        if self._tier.takes(self._next.size):
            record, self._next = self._next.record(), None
            self._tier.write(record)
            return True
        return False

    def again(self) -> None:
        """Looks at the whole tree again: the disk may have deleted what it was given."""
        self._given.clear()
        self._saved.clear()
        self._plan.clear()
        self._target, self._planned_at = None, -1

    def give_up(self) -> None:
        """Drops the record and the path that were begun."""
        self._next = self._target = None

    def _find(self, *, leaving: bool) -> bool:
        """Looks for the next record that the disk lacks; returns whether there is more to look at.

        One call looks at one node, for a path may be long.
        """
        target = self._target
        if target is None or not target.current:
            self._target = None
            if not self._plan and not self._make_plan(leaving=leaving):
                return False
            node = self._plan.popleft()
            if node.parent is not None:
                self._target = self._target_of(node)
            return True
        found = next(self._missing(target), None)
        if found is None:
            self._saved[id(target.node)] = target.node, target.end
            self._target = None
            return True
        block, kind = found
        self._remember(kind, block.key)
        arrays = self._arrays(target, block, kind)
        ids = target.tokens[block.start : block.end]
        self._next = _Next(block, kind, ids, arrays, stored_bytes(arrays))
        return True

    def _make_plan(self, *, leaving: bool) -> bool:
        """Lists the nodes whose paths are to be saved; False if none is."""
        if self._planned_at == self._cache.uses:
            return False
        self._planned_at = self._cache.uses
        nodes = [
            node
            for node in self._cache.tree.walk()
            if (node.state is not None if self._stateful else not node.children)
        ]
        found = {id(node): self._saved.get(id(node)) for node in nodes}
        self._saved = {key: one for key, one in found.items() if one is not None}
        nodes = [node for node in nodes if self._saved.get(id(node)) != (node, node.end)]
        nodes.sort(key=lambda node: node.last_used, reverse=not leaving)
        self._plan.extend(nodes)
        return bool(nodes)

    def _target_of(self, node: Node[Any, Any]) -> _Target:
        path = path_of(node)
        tokens = tokens_of(path)
        key, blocks = root_key(path[0].scope), []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            end = min(start + BLOCK_TOKENS, len(tokens))
            if end - start < MIN_PART and start and not self._stateful:
                break
            parent, key = key, block_key(key, packed(tokens[start:end]))
            blocks.append(Block(start, end, parent, key))
        return _Target(node, node.end, tokens, blocks)

    def _missing(self, target: _Target) -> Iterator[tuple[Block, Kind]]:
        known = partial(self._known, Kind.TOKENS)
        yield from ((block, Kind.TOKENS) for block in target.blocks if not known(block.key))
        if target.node.state is not None and target.blocks:
            last = target.blocks[-1]
            if not self._known(Kind.STATE, last.key):
                yield last, Kind.STATE

    def _known(self, kind: Kind, key: bytes) -> bool:
        return (kind, key) in self._given or self._tier.has(kind, key)

    def _remember(self, kind: Kind, key: bytes) -> None:
        if len(self._given) >= MAX_REMEMBERED:
            self._given.clear()
        self._given.add((kind, key))

    def _arrays(self, target: _Target, block: Block, kind: Kind) -> list[DeviceArray]:
        if kind is Kind.STATE:
            return self._store.stored_state(target.node.state)
        parts = list(parts_between(path_of(target.node), block.start, block.end))
        return self._store.stored(parts)
