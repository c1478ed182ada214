"""How much of an engine's memory the prefix cache may have, in blocks. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.store import PrefixRow

R = TypeVar("R", bound=PrefixRow)


class PrefixRoom(Generic[R]):
    """The prefix cache of an engine whose blocks take `block_bytes`; `most` bounds it, in bytes."""

    def __init__(self, prefix: PrefixCache[R], most: int, block_bytes: int) -> None:
        self._prefix = prefix
        self._most = most
        self.block_bytes = block_bytes

    def bound(self, left: int) -> None:
        """`left` bytes of the capacity no row has taken; they may be fewer than none."""
        self._prefix.budget = min(self._most, max(0, left))

    def blocks(self) -> int:
        """See Engine.prefix_blocks."""
        return -(-self._prefix.nbytes // self.block_bytes)

    def shrink(self, blocks: int, *, in_use: bool) -> int:
        """See Engine.shrink."""
        before = self.blocks()
        self._prefix.shrink(self._prefix.nbytes - (before - blocks) * self.block_bytes)
        if in_use and before - self.blocks() < blocks:
            self._prefix.clear()
        return before - self.blocks()
