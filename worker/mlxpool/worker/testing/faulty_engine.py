"""Injects the counting model's faults into loading, prefill, decode and the end of a generation."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, cast

from mlxpool.common.config.schema import Counting, ModelConfig
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute import model_source
from mlxpool.worker.compute.generations import Generation
from mlxpool.worker.compute.loop import BeginGeneration
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.model_source import ModelSource, OnProgress
from mlxpool.worker.engine.counting_engine import LOAD_STEPS, CountingEngine
from mlxpool.worker.engine.engine import PrefillShare
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed
from mlxpool.worker.testing.faults import NO_FAULTS, Faults, Struck


class FaultyEngine:
    """Wraps a counting engine; calls without a fault go to it unchanged."""

    def __init__(self, engine: CountingEngine, faults: Faults) -> None:
        self._engine = engine
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, on_progress: OnProgress) -> None:
        """Injects a fault before the load step of its number."""

        def begin(step: int) -> None:
            self.faults.strike_at("load", step)
            self.faults.require_device()

        def progress(steps: int, size: int) -> None:
            on_progress(steps, size)
            if steps < LOAD_STEPS:
                begin(steps)

        begin(0)
        self._engine.load(progress)

    def admit(self, seq: Sequence) -> None:
        self.faults.require_device()
        self._engine.admit(seq)

    def prefill_batch(self, shares: Many[PrefillShare]) -> list[int]:
        if self.faults.site == "prefill":
            self._strike([seq for seq, _ in shares], [self._chunk(*share) for share in shares])
        self.faults.require_device()
        return self._engine.prefill_batch(shares)

    def decode(self, rows: Many[Sequence]) -> list[SampledToken]:
        if self.faults.site == "decode":
            self._strike(rows, [range(len(row.ids), len(row.ids) + 1) for row in rows])
        self.faults.require_device()
        return self._engine.decode(rows)

    def device_works(self) -> bool:
        return not self.faults.device_lost and self._engine.device_works()

    def _chunk(self, seq: Sequence, budget: int) -> range:
        count = max(0, min(budget, self._engine.chunk, seq.length - 1 - seq.prefilled))
        return range(seq.prefilled, seq.prefilled + count)

    def _strike(self, rows: Many[Sequence], spans: Many[range]) -> None:
        """Injects the fault into the first row that it concerns, at most once in a step."""
        number = self.faults.victim([row.prompt for row in rows], spans)
        if number is None:
            return
        try:
            self.faults.strike()
        except Struck as error:
            raise SequenceFailed(rows[number], str(error)) from None


def open_source(
    config: ModelConfig,
    faults: Faults,
    counting: Callable[[Counting, int], CountingEngine] = CountingEngine,
) -> ModelSource:
    """`model_source.open_source`; the counting engine is wrapped when a fault is armed."""

    def faulty(settings: Counting, context: int) -> CountingEngine:
        return cast("CountingEngine", FaultyEngine(counting(settings, context), faults))

    return model_source.open_source(config, faulty if faults.site else counting)


class FaultyGeneration(Generation):
    """Injects the fault of the site `end` when its last row is made."""

    faults = NO_FAULTS

    def commit(self, drawn: SampledToken, eos: frozenset[int], now: float) -> Delta:
        delta = super().commit(drawn, eos, now)
        ends = delta.end is not None and self.faults.site == "end"
        if ends and self.faults.victim([self.sequence.prompt], [range(0)]) is not None:
            self.faults.strike()
        return delta


def begin_with(faults: Faults) -> BeginGeneration:
    """`Generation.begin` for generations with these faults."""

    def begin(admit: Admit, piece: Callable[[int], bytes]) -> Generation:
        generation = FaultyGeneration.begin(admit, piece)
        generation.faults = faults
        return generation

    return begin
