"""Counts the KV blocks of an engine and gives them to sequences. Pure.

A sequence starts with the blocks of its prompt and one more block, and grows block by block. A
preempted sequence is admitted again only when all blocks up to its greatest length are free, so
that it is not preempted a second time.

The capacity is measured and may shrink while sequences run, because the process uses memory outside
MLX. The capacity at a sequence's first admission stays promised to this sequence, so no sequence
fails because a measurement changed. If too few blocks are free, prefix-cache entries are evicted
first, and newer sequences are preempted only after that. A sequence that runs alone may grow to its
promised capacity, into the memory reserved for a prefill chunk. Then only a failed allocation or
the memory limit of the process can stop it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mlxpool.common.errors import OutOfMemory
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.scheduling.sequence import Phase, Sequence

LOOKAHEAD = 2  # tokens that a step may write after a sequence: the next token and one in flight


class BlockMemory(Protocol):
    """The memory whose blocks are counted: KV rows of sequences, and cached prefixes."""

    def blocks_in_use(self) -> int:
        """Returns the number of blocks of cached prefixes.

        If KV rows share blocks with prefixes, returns the number of blocks of rows and prefixes
        together, each block counted once.
        """

    def blocks_of(self, seq: Sequence) -> int:
        """Returns how many blocks of a sequence's KV row the result of `blocks_in_use` includes."""

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        """Evicts prefix-cache entries to free `blocks` blocks; returns the number of freed blocks.

        Entries from which running KV rows were filled are evicted only with `in_use`, after all
        other entries.
        """

    def unpin(self, seq: Sequence) -> bool:
        """Unpins the entries that waiting sequences other than `seq` have got from the disk.

        After this, `shrink` may evict these entries. Returns whether an entry became evictable.
        """


class BlockManager:
    """Counts the blocks of an engine, and decides which sequence gets more blocks.

    `capacity`: the blocks that fit into memory, cached prefixes included; the engine sets it after
    it has measured its memory. A sequence gets only a number of blocks; the store of the KV rows
    chooses the blocks themselves.
    """

    def __init__(self, memory: BlockMemory, capacity: int = 0) -> None:
        self.capacity = capacity
        self._memory = memory
        self._given: dict[Sequence, int] = {}  # blocks of running sequences

    @property
    def available(self) -> int:
        """The free blocks. A block that KV rows and prefixes share counts as one used block."""
        memory = self._memory
        unwritten = sum(max(0, own - memory.blocks_of(seq)) for seq, own in self._given.items())
        return self.capacity - memory.blocks_in_use() - unwritten

    def given(self, seq: Sequence) -> int:
        """Returns the number of blocks that a sequence may use; 0 while it waits."""
        return self._given.get(seq, 0)

    def fits(self, seq: Sequence) -> bool:
        """Returns whether a waiting sequence can be admitted, now or later."""
        return blocks_to_admit(seq, self.capacity) <= max(self.capacity, seq.promised)

    def admit(self, seq: Sequence, *, alone: bool) -> bool:
        """Gives a waiting sequence its first blocks, if these are free.

        `alone`: no sequence runs; then the sequence gets the blocks in any case. Returns whether
        the sequence got its blocks.
        """
        need = blocks_to_admit(seq, self.capacity)
        if not self._find(need, seq) and not alone:
            return False
        self.give(seq, need)
        seq.promised = max(seq.promised, self.capacity)
        return True

    def grow(self, seq: Sequence, *, alone: bool) -> bool:
        """Gives a running sequence the blocks of its next step, if these are free.

        `alone`: no other sequence runs, so the sequence gets blocks up to its promised capacity.
        Returns whether it got the blocks.
        """
        need = blocks_for_step(seq)
        free = self._find(need - self.given(seq), seq, in_use=alone)
        if not free and not (alone and need <= seq.promised):
            return False
        self.give(seq, need)
        return True

    def find(self, blocks: int) -> bool:
        """Returns whether `blocks` blocks are free, after evicting cached prefixes if necessary."""
        return self._evicted(blocks)

    def lacks_blocks(self, seq: Sequence) -> bool:
        """Returns whether a running sequence needs more blocks for its next step."""
        return blocks_for_step(seq) > self.given(seq)

    def lacking(self, live: Iterable[Sequence]) -> list[Sequence]:
        """Returns the running sequences for which `lacks_blocks` is True, in their order."""
        blocks, running = self._given, Phase.RUNNING
        return [
            seq
            for seq in live
            if seq.phase is running
            # A cheap bound of the length: few sequences need the calculation below.
            and len(seq.prompt) + len(seq.ids) + LOOKAHEAD > blocks.get(seq, 0) * KV_BLOCK_TOKENS
            and self.lacks_blocks(seq)
        ]

    def give(self, seq: Sequence, blocks: int) -> None:
        """Sets the number of blocks that a sequence has, even if they are not free."""
        self._given[seq] = blocks

    def free(self, seq: Sequence) -> None:
        """Frees all blocks of a sequence that loses its KV row; it may have no blocks."""
        self._given.pop(seq, None)

    def refusal(self, seq: Sequence) -> OutOfMemory:
        """Returns the error of a sequence that needs more blocks than the capacity."""
        need = _least(seq)
        return OutOfMemory(
            f"{seq.length} tokens, {len(seq.prompt)} of them the prompt's, need {need} blocks"
            f" of {KV_BLOCK_TOKENS} tokens; this worker's memory has {self.capacity}",
            details={
                "prompt_tokens": len(seq.prompt),
                "need_tokens": need * KV_BLOCK_TOKENS,
                "capacity_tokens": self.capacity * KV_BLOCK_TOKENS,
            },
        )

    def _find(self, blocks: int, seq: Sequence, *, in_use: bool = False) -> bool:
        """Returns whether `blocks` blocks are free for a sequence, after the necessary evictions.

        Before blocks are refused, entries that waiting sequences got from the disk are evicted.
        With `in_use`, entries from which running KV rows were filled are evicted last.
        """
        return (
            self._evicted(blocks)
            or (self._memory.unpin(seq) and self._evicted(blocks))
            or (in_use and self._evicted(blocks, in_use=True))
        )

    def _evicted(self, blocks: int, *, in_use: bool = False) -> bool:
        """Returns whether `blocks` blocks are free, after evicting as few prefixes as possible."""
        missing = blocks - self.available
        while missing > 0 and self._memory.shrink(missing, in_use=in_use):
            missing = blocks - self.available
        return missing <= 0


def blocks_to_finish(seq: Sequence) -> int:
    """Returns the number of blocks of a sequence at its greatest length."""
    longest = len(seq.prompt) + seq.max_tokens
    return blocks_for(longest if seq.shift is None else min(longest, seq.shift.context))


def blocks_to_admit(seq: Sequence, capacity: int) -> int:
    """Returns the number of blocks that must be free before a waiting sequence is admitted."""
    whole = blocks_to_finish(seq)
    if seq.preempted:
        return min(whole, max(capacity, _least(seq)))
    return min(whole, _least(seq))


def blocks_for_step(seq: Sequence) -> int:
    """Returns the number of blocks that a running sequence must have for its next step."""
    return min(blocks_for(seq.length + LOOKAHEAD), blocks_to_finish(seq))


def _least(seq: Sequence) -> int:
    return blocks_for(seq.length) + 1
