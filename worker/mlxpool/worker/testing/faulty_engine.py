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
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.testing.faults import NO_FAULTS, Faults, Struck


class FaultyEngine:
    """A wrapper of a counting engine; calls without a fault are forwarded unchanged."""

    def __init__(self, engine: CountingEngine, faults: Faults) -> None:
        self._engine = engine
        self.faults = faults
        self._sites: list[tuple[Span, ...]] = []  # spans of the passes in flight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, on_progress: OnProgress) -> None:
        """Loads the counting engine; injects the fault before load step `fault_at`."""

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

    def submit(self, spans: Many[Span]) -> bool:
        self._sites.append(tuple(spans))
        return self._engine.submit(spans)

    def collect(self) -> StepResult:
        spans = self._sites.pop(0)
        failed = self._struck([span for span in spans if not span.decodes], "prefill")
        failed += self._struck([span for span in spans if span.draws], "decode")
        self.faults.require_device()
        result = self._engine.collect()
        hit = {failure.sequence for failure in failed}
        drawn = [token for token in result.drawn if token.sequence not in hit]
        return StepResult(drawn, [*result.failed, *failed])

    def device_works(self) -> bool:
        return not self.faults.device_lost and self._engine.device_works()

    def _struck(self, spans: Many[Span], site: str) -> list[SequenceFailed]:
        """Injects the fault at `site`, `prefill` or `decode`, into at most one of the spans.

        Does nothing if the settings request a fault at another site. The fault hits the first span
        that the settings `fault_prompt` and `fault_at` select. Returns that span's sequence if the
        fault makes it fail, else [].
        """
        if self.faults.site != site or not spans:
            return []
        places = [_place(span, site) for span in spans]
        number = self.faults.victim([span.sequence.prompt for span in spans], places)
        if number is None:
            return []
        try:
            self.faults.strike()
        except Struck as error:
            return [SequenceFailed(spans[number].sequence, str(error))]
        return []


def _place(span: Span, site: str) -> range:
    """Returns the numbers with which the setting `fault_at` selects this span at a site.

    At the site `prefill` these are the indices of a chunk's tokens; at all other sites, the index
    of the drawn token.
    """
    if site == "prefill":
        return range(span.start, span.end)
    drawn = span.end + span.sequence.discarded - len(span.sequence.prompt)
    return range(drawn, drawn + 1)


def open_source(
    config: ModelConfig,
    faults: Faults,
    counting: Callable[[Counting, int], CountingEngine] = CountingEngine,
) -> ModelSource:
    """Opens the model as `model_source.open_generator` does.

    If a fault is armed, the engine is a FaultyEngine.
    """

    def faulty(settings: Counting, context: int) -> CountingEngine:
        return cast("CountingEngine", FaultyEngine(counting(settings, context), faults))

    return model_source.open_generator(config, faulty if faults.site else counting)


class FaultyGeneration(Generation, eq=False):
    """A Generation that injects the fault of the site `end` when it makes its last delta."""

    faults: Faults = NO_FAULTS

    def commit(self, drawn: SampledToken, eos: frozenset[int], now: float, **forced: Any) -> Delta:
        delta = super().commit(drawn, eos, now, **forced)
        ends = delta.end is not None and self.faults.site == "end"
        if ends and self.faults.victim([self.sequence.prompt], [range(0)]) is not None:
            self.faults.strike()
        return delta


def begin_with(faults: Faults) -> BeginGeneration:
    """Returns the function that begins generations with these faults."""

    def begin(admit: Admit, piece: Callable[[int], bytes]) -> Generation:
        generation = FaultyGeneration.begin(admit, piece)
        generation.faults = faults
        return generation

    return begin
