"""A submitted pass, and its results on the host after the end of the pass."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.engine.engine import HiddenStates, StepResult
from mlxpool.worker.sampling.batch import (
    SampledNumbers,
    SamplerOutput,
    accepted_tokens,
    sampled_tokens,
)
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import Load, StepCost
from mlxpool.worker.transfers.downloads import Download


class Flight(Struct, frozen=True):
    """A pass that was submitted at `began` (monotonic seconds).

    `rows`: the index of each drawing sequence's first row of logits. `fresh`: this pass compiles
    kernels, or another pass did so while this pass was in flight. `done`: the arrays whose
    evaluation ends the pass. `download`: the copy of the sampled arrays and hidden states in the
    host's memory, readable after the pass has ended; None: results are read from MLX's arrays.
    `reads`: the pass reads prompts. `checks`: the spans with drafts. `embedded`: the spans that
    give hidden states, each with the index of its first state in `hidden` or `states`. `hidden`
    [H, d]: the hidden states. `states` [H, d]: the hidden states that stay on the device, for the
    log-probabilities of prompts. `undrawn`: the spans that have drawn no tokens yet, and their
    logits. `load`: the load of the pass for the cost model; None: computed from `spans`.
    """

    spans: tuple[Span, ...]
    rows: dict[Sequence, int]
    sampled: SamplerOutput | None
    done: tuple[mx.array, ...]
    began: float
    fresh: bool
    download: Download | None = None
    reads: bool = False
    checks: tuple[Span, ...] = ()
    embedded: tuple[tuple[Span, int], ...] = ()
    hidden: mx.array | None = None
    undrawn: tuple[Many[Span], mx.array] | None = None
    states: mx.array | None = None
    load: Load | None = None

    def without(self, seq: Sequence) -> Flight:
        """Returns the flight without the results of a sequence that lost its row."""
        rows = {other: row for other, row in self.rows.items() if other is not seq}
        checks = tuple(span for span in self.checks if span.sequence is not seq)
        embedded = tuple(pair for pair in self.embedded if pair[0].sequence is not seq)
        return replace(self, rows=rows, checks=checks, embedded=embedded)

    def wait(self) -> None:
        """Waits for the end of the pass."""
        mx.eval(*self.done)

    def result(self) -> StepResult:
        """Returns the results of the pass after its end; called once."""
        arrays = self.arrays() if self.download is None else self.download.read()
        hidden = () if self.hidden is None else self._hidden_states(arrays.pop())
        if self.sampled is None:
            return StepResult([], [], hidden)
        lists: list[Any] = [array.tolist() for array in arrays]
        numbers = SampledNumbers(*lists)
        if not self.checks:
            return StepResult(*sampled_tokens(numbers, self.rows), hidden)
        checks = {span.sequence: span.drafts for span in self.checks}
        single = {seq: row for seq, row in self.rows.items() if seq not in checks}
        drawn, failed = sampled_tokens(numbers, single)
        for seq, drafts in checks.items():
            try:
                drawn += accepted_tokens(numbers, seq, self.rows[seq], drafts)
            except SequenceFailed as failure:
                failed.append(failure)
        return StepResult(drawn, failed, hidden)

    def drawn(self) -> list[SampledToken] | None:
        """Returns the tokens that the pass drew, if the host has them without waiting.

        Returns None as well for passes that check drafts or give log-probabilities.
        """
        sampled = self.sampled
        if sampled is None or self.download is None or self.checks or sampled.logprobs is not None:
            return None
        tokens = self.download.arrived()
        if tokens is None:
            return None
        drawn, _ = sampled_tokens(SampledNumbers(tokens.tolist()), self.rows)
        return drawn

    def arrays(self) -> list[Any]:
        """Returns the arrays for the host: the sampled arrays, then any hidden states."""
        sampled = [] if self.sampled is None else self.sampled.arrays()
        return sampled if self.hidden is None else [*sampled, self.hidden]

    def _hidden_states(self, numbers: Any) -> tuple[HiddenStates, ...]:
        """Divides states [H, d] between the spans whose sequences still have a row."""
        states = np.array(numbers)
        return tuple(
            HiddenStates(span, states[row : row + span.count]) for span, row in self.embedded
        )


class PassTimes:
    """Measures the times of passes, which end one after the other, for the cost model."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self.last_end = 0.0  # monotonic time at which the device could begin the next pass

    def ended(self, flight: Flight, finished: float) -> None:
        """Measures a pass that has ended at `finished`, monotonic seconds."""
        began = max(flight.began, self.last_end)
        self.last_end = finished
        if not flight.fresh and not flight.checks:  # see speculation/step_times.py
            self.cost.observe(flight.load or Load.of(flight.spans), finished - began)
