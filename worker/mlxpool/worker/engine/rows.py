"""Gives sequences their rows, stores prefixes in the prefix cache, and frees the rows."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Generic, TypeVar

from mlxpool.worker.engine.memory import EngineMemory
from mlxpool.worker.media.spans import readable_end
from mlxpool.worker.prefix.store import PrefixRow
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span

R = TypeVar("R", bound=PrefixRow)


class Rows(Generic[R]):
    """Begins and frees the rows of an engine's sequences, and stores them in the prefix cache.

    `draws_alone`: rows cannot be trimmed, so the last input of a prompt, which draws a token, is
    not read in one span with earlier inputs.
    """

    def __init__(self, memory: EngineMemory[Any, R], *, draws_alone: bool = False) -> None:
        self._memory = memory
        self._draws_alone = draws_alone

    def admit(self, seq: Sequence) -> None:
        """Gives the sequence a row, filled from the prefix cache; see Engine."""
        memory = self._memory
        restore_at = len(seq.lasting) if seq.discarded else seq.restore_at
        memory.rows[seq], seq.submitted = memory.prefix.begin(
            seq.tokens, restore_at, seq.media, seq.cacheable, seq.owner
        )
        if memory.disk is not None:
            memory.disk.leave(seq)
        if not seq.preempted:
            most = seq.prompt_inputs if seq.discarded else seq.length
            seq.cached = min(seq.submitted, most)

    def clip(self, seq: Sequence, tokens: int) -> int:
        """Returns the number of inputs of a prompt's next chunk; see Engine.

        The last input of a prompt has its own span if log-probabilities of the prompt are reported.
        """
        prefix = self._memory.prefix
        stop = prefix.next_restore_point(self._memory.rows[seq])
        end = seq.submitted + tokens
        if stop is not None and seq.submitted < stop < end:
            end = stop
        shared = len(seq.prompt) - 1  # other sequences with this prompt begin here
        if seq.shared and prefix.whole and seq.submitted < shared < end:
            end = shared
        if seq.media:
            end = readable_end(seq.media, seq.submitted, end, self._memory.encoded)
            if end == seq.submitted:
                return 0
        if (self._draws_alone or seq.reports) and end == seq.length:
            end -= 1
        return max(1, end - seq.submitted)

    def lost(self, seq: Sequence) -> bool:
        """Returns True if a failed pass has lost inputs of a running sequence; see Engine."""
        row = self._memory.rows.get(seq)
        return row is not None and row.offset < seq.submitted

    def at_restore_point(self, span: Span) -> bool:
        """Returns True if `span`, a chunk not submitted yet, ends at the next restore point."""
        seq, memory = span.sequence, self._memory
        if memory.prefix.next_restore_point(memory.rows[seq]) != span.end:
            return False
        return span.end <= len(seq.lasting)

    def submitted(self, spans: Many[Span], keep: Many[Span]) -> None:
        """Adds the inputs of a started pass to the sequences' counts.

        `keep`: the spans that end at restore points; their rows are stored in the prefix cache.
        A prompt that other sequences share is stored, too, when all but its last token are read.
        """
        shared = []  # sequences whose prompts other sequences share, now or later
        for span in spans:
            seq, start = span.sequence, span.start
            end = seq.submitted = start + span.count
            seq.awaited += span.draws
            if seq.shared and start < len(seq.prompt) - 1 <= end:
                shared.append(seq)
        for span in keep:
            self._keep(span.sequence)
        for seq in shared:
            if self._memory.blocks.find(1):  # for a copy, as the sequence still writes to its block
                self._keep(seq, restore_point=True)

    def _keep(self, seq: Sequence, *, restore_point: bool = False) -> None:
        """Stores the inputs of a sequence's row in the prefix cache; see PrefixCache.keep."""
        memory = self._memory
        memory.bound_prefix()
        memory.prefix.keep(memory.rows[seq], seq.tokens, restore_point=restore_point)

    def release(self, seq: Sequence) -> None:
        """Frees row and blocks of a sequence in any phase; see Engine."""
        memory = self._memory
        memory.blocks.free(seq)
        if memory.disk is not None:
            memory.disk.leave(seq)
        row = memory.rows.pop(seq, None)
        if row is not None:
            memory.bound_prefix()
            memory.prefix.close(row, seq.lasting)
