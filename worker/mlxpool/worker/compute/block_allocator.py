"""Gives sequences blocks of memory: admits waiting ones, lets running ones grow, preempts."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.errors import too_many_blocks
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.interface import Engine
from mlxpool.worker.scheduling.block_manager import blocks_for_step, blocks_to_admit, promise_blocks
from mlxpool.worker.scheduling.scheduler import (
    needing_blocks,
    next_admissions,
    preemption_victim,
    running,
)
from mlxpool.worker.scheduling.sequence import Sequence


class BlockAllocator:
    """Allocates from the engine's capacity; cached prefixes are evicted first."""

    def __init__(self, engine: Engine, generations: Generations, progress: Progress) -> None:
        self._engine = engine
        self._generations = generations
        self._progress = progress

    def grow(self) -> list[Delta]:
        """Allocate the blocks that the next step's rows need, preempting the newest rows if needed.

        Returns the last rows of the sequences that cannot grow.
        """
        failed: list[Delta] = []
        while wanting := needing_blocks(self._generations.sequences()):
            sequence = wanting[0]
            need = blocks_for_step(sequence)
            victim = preemption_victim(self._generations.sequences())
            if self._find(need - sequence.blocks, in_use=victim is None):
                sequence.blocks = need
            elif victim is not None:
                self._preempt(victim)
            elif need <= sequence.promised:
                sequence.blocks = need
            else:
                failed.append(self._refuse(sequence))
        return failed

    def admit(self, max_rows: int, admit: Callable[[Sequence], list[Delta]]) -> list[Delta]:
        """Call `admit` for waiting sequences that fit into memory, until `max_rows` run.

        Returns the deltas that `admit` returned.
        """
        rows: list[Delta] = []
        for sequence in next_admissions(self._generations.sequences(), max_rows):
            capacity = self._engine.blocks
            need = blocks_to_admit(sequence, capacity)
            if need > max(capacity, sequence.promised):
                rows.append(self._refuse(sequence))
            elif self._find(need) or not running(self._generations.sequences()):
                sequence.blocks = need
                promise_blocks(sequence, capacity)
                rows += admit(sequence)
            else:
                break  # later arrivals must not take the blocks that this one waits for
        return rows

    def _find(self, wanted: int, *, in_use: bool = False) -> bool:
        """Whether so many blocks are free, after evicting cached prefixes as far as necessary."""
        taken = sum(sequence.blocks for sequence in self._generations.sequences())
        missing = wanted - (self._engine.blocks - taken - self._engine.prefix_blocks())
        if missing > 0:
            missing -= self._engine.shrink(missing, in_use=in_use)
        return missing <= 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take its row. Its keys and values stay in the prefix cache if they fit."""
        self._generations.release(sequence)
        sequence.preempt()
        self._progress.preemptions += 1

    def _refuse(self, sequence: Sequence) -> Delta:
        return self._generations.fail(sequence, too_many_blocks(sequence, self._engine.blocks))
