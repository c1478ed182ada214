"""The tokens that one decode step samples, while they are still on the device."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.sampling.sampler import SamplerOutput
from mlxpool.worker.scheduling.sequence import Sequence

Rows = dict[Sequence, int]  # the row of each sequence in a SamplerOutput


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens, one row for each sequence.

    `lengths[row]` is the length that a sequence has when its token is its next one.
    """

    rows: Mapping[Sequence, int]
    lengths: tuple[int, ...]
    sampled: SamplerOutput

    def without(self, seq: Sequence) -> StepOutput:
        """Returns the output without a sequence that lost its row: its token in flight is void."""
        rows = {one: row for one, row in self.rows.items() if one is not seq}
        return StepOutput(rows, self.lengths, self.sampled)

    def next_tokens(self, sequences: Many[Sequence]) -> Rows:
        """Returns the rows of those sequences whose next token is in this output."""
        rows, lengths = self.rows, self.lengths
        return {
            seq: row
            for seq in sequences
            if (row := rows.get(seq)) is not None and lengths[row] == seq.length
        }

    def all_rows(self) -> tuple[StepOutput, Rows]:
        """Returns the output with the rows of all its sequences."""
        return self, dict(self.rows)


def select_rows(tokens: mx.array, rows: list[int]) -> mx.array:
    """Returns tokens [R] of these rows; the array itself when these are all rows in order."""
    return tokens if rows == list(range(tokens.shape[0])) else tokens[mx.array(rows)]
