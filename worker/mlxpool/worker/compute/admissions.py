"""Admits, grows, preempts and refuses sequences, by the blocks that the BlockManager counts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from time import monotonic

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.scheduler import (
    next_admissions,
    preemption_victim,
    running,
    victim_for,
    waiting,
)
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.shared_prompts import awaited_prompt


class Admissions:
    """Gets blocks for sequences from the BlockManager; ends sequences that cannot get blocks."""

    def __init__(self, engine: Engine, generations: Generations, progress: Progress) -> None:
        self._blocks = engine.blocks
        self._prefix = engine.prefix
        self._disk = engine.disk
        self._generations = generations
        self._progress = progress

    def grow(self) -> list[Delta]:
        """Give the next step's rows their blocks; preempt the newest rows if needed.

        Ends the sequences that cannot grow; returns their last deltas.
        """
        failed: list[Delta] = []
        for sequence in self._blocks.lacking(self._generations.sequences()):
            while sequence.phase is Phase.RUNNING and self._blocks.lacks_blocks(sequence):
                victim = preemption_victim(self._generations.sequences())
                if self._blocks.grow(sequence, alone=victim is None):
                    continue
                if victim is None:
                    failed.append(self._refuse(sequence))
                else:
                    self._preempt(victim)
        return failed

    def admit(self, max_sequences: int, admit: Callable[[Sequence], list[Delta]]) -> list[Delta]:
        """Call `admit` for waiting sequences that fit into memory.

        Stops when `max_sequences` sequences run. Skips a sequence that waits for the disk, or for
        another sequence that reads the beginning of its prompt. Returns the deltas that `admit`
        returned.
        """
        deltas: list[Delta] = []
        live = self._generations.sequences()
        if self._disk is not None:
            for sequence in waiting(live):
                self._disk.begin(sequence, monotonic())
        self._free_row(live, max_sequences)
        for sequence in next_admissions(live, max_sequences, partial(self._waits, live)):
            if not self._blocks.fits(sequence):
                deltas.append(self._refuse(sequence))
            elif self._finds_blocks(sequence):
                deltas += admit(sequence)
            else:
                break  # later sequences must not take the blocks that this sequence waits for
        return deltas

    def _free_row(self, live: Many[Sequence], max_sequences: int) -> None:
        """Preempt a row for a waiting prompt of a `decide` call, if no row is free.

        The broker reserves a row for each stream, but not for the prompts of `decide`. A row that
        still reads its prompt is not preempted, so that every row makes progress.
        """
        rows = len(running(live))
        if rows < max_sequences or rows == len(live):
            return
        first = next(next_admissions(live, rows + 1, partial(self._waits, live)), None)
        victim = None if first is None else victim_for(first, live)
        if victim is not None and not victim.reads_prompt:
            self._preempt(victim)

    def _finds_blocks(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks, if possible. Returns whether it got them.

        May preempt rows of an owner that has more running rows than the sequence's owner.
        """
        while True:
            sequences = self._generations.sequences()
            if self._blocks.admit(sequence, alone=not running(sequences)):
                return True
            victim = victim_for(sequence, sequences)
            if victim is None:
                return False
            self._preempt(victim)

    def _waits(self, live: Many[Sequence], sequence: Sequence) -> bool:
        """Return whether a sequence waits for the disk, or for another sequence with its prompt.

        The other sequence is reading the beginning of the same prompt. Marks the other sequence as
        shared: the prefix cache then stores that prompt as soon as it is read.
        """
        if sequence.restoring:
            return True
        if self._prefix is None or not self._prefix.shares:
            return False
        reader = awaited_prompt(
            sequence, live, whole=self._prefix.whole, by_owner=self._prefix.by_owner
        )
        if reader is not None:
            reader.shared = True
        return reader is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's row away. Its keys and values stay in the prefix cache if they fit."""
        self._generations.release(sequence)
        sequence.preempt()
        self._progress.preemptions += 1

    def _refuse(self, sequence: Sequence) -> Delta:
        return self._generations.fail(sequence, self._blocks.refusal(sequence))
