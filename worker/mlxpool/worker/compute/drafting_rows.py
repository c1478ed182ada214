"""Chooses the rows of a step that check drafts, and measures the times of such steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from time import monotonic

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.constrained_rows import ConstrainedRows
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.messages import RunKey
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.scheduler import NO_DRAFTS, StepLimits
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Step
from mlxpool.worker.speculation.best_drafter import BestDrafter
from mlxpool.worker.speculation.drafter import AUTO, DRAFT, MTP, OFF, Drafter, Drafts
from mlxpool.worker.speculation.model_drafter import ModelDrafter
from mlxpool.worker.speculation.mtp import MtpDrafter
from mlxpool.worker.speculation.ngram import NgramDrafter
from mlxpool.worker.speculation.ngram_search import MAX_TOKENS
from mlxpool.worker.speculation.speculator import Speculator, candidates_of, max_drafts_of_step

log = logging.getLogger("mlxpool.worker")

MAX_FAILURES = 3  # consecutive failures to make drafts, after which drafts are turned off


def make_speculator(setting: str, engine: Engine, model: str) -> Speculator | None:
    """Returns the speculator for the setting `speculation`; None: no drafts.

    Tells the engine, before its warm-up, the most drafts that a step may check.

    Raises ModelLoadFailed if the engine checks no drafts although the settings demand drafts or
    name a draft model. Also raises it if the demanded head or draft model is missing.
    """
    draft = engine.draft
    if setting == OFF:
        return None
    if setting == AUTO and engine.no_drafts and draft is None:
        log.info("no drafts are made", extra={"why": engine.no_drafts})
        return None
    if engine.no_drafts:
        named = "" if draft is None else " and draft"
        raise ModelLoadFailed(
            f"speculation is {setting!r}, but {engine.no_drafts}; leave speculation{named} out of"
            f" [models.{model}]{f', or set it to {AUTO!r}' if draft is None else ''}"
        )
    if setting == MTP and engine.predictor is None:
        raise ModelLoadFailed(
            f"speculation is {MTP!r}, but models.{model} has no head that predicts further tokens"
            f" and drafts on this device; set it to {AUTO!r}"
        )
    if setting == DRAFT and draft is None:
        raise ModelLoadFailed(
            f"speculation is {DRAFT!r}, but models.{model} has no draft model; set draft, or set"
            f" speculation to {AUTO!r}"
        )
    ahead = engine.limits.ahead > 0
    drafter = make_drafter(setting, engine, monotonic)
    most = max_drafts_of_step(engine.vocab_size)
    engine.expect_drafts(most)
    return Speculator(drafter, engine.cost.seconds, monotonic, ahead=ahead, most_drafts=most)


def make_drafter(setting: str, engine: Engine, clock: Callable[[], float]) -> Drafter:
    """Returns the drafter that the setting names; the engine must have this drafter.

    The drafter of "auto" chooses the best of the engine's drafters for each row: n-grams, the
    model's own head, or the draft model. N-grams come first, because they take no time. They are
    left out if the vocabulary is too large.
    """
    drafters_by_name: dict[str, Drafter] = {}
    if setting not in (MTP, DRAFT) and engine.vocab_size <= MAX_TOKENS:
        drafters_by_name["n-grams"] = NgramDrafter()
    if setting in (MTP, AUTO) and engine.predictor is not None:
        drafters_by_name["the model's own head"] = MtpDrafter(engine.predictor)
    if setting in (DRAFT, AUTO) and engine.draft is not None:
        drafters_by_name["the draft model"] = ModelDrafter(engine.draft, engine.vocab_size, clock)
    log.info("drafts are made", extra={"of": ", ".join(drafters_by_name)})
    drafters = list(drafters_by_name.values())
    return drafters[0] if len(drafters) == 1 else BestDrafter(drafters)


def one_each(deltas: list[Delta], drafts: Drafts) -> list[Delta]:
    """Returns a step's deltas, with one joined delta for each stream that checked drafts.

    Such a stream has several deltas in `deltas`, one after the other. Each has one token, or the
    end of the stream.
    """
    joined: list[Delta] = []
    places: dict[RunKey, int | None] = {
        (sequence.id, sequence.run_number): None for sequence in drafts
    }
    for delta in deltas:
        key = delta.id, delta.attempt
        place = places.get(key)
        if place is not None:
            joined[place] = _together(joined[place], delta)
            continue
        if key in places:
            places[key] = len(joined)
        joined.append(delta)
    return joined


def _together(first: Delta, second: Delta) -> Delta:
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return first._replace(
        text=first.text + second.text,
        ids=first.ids + second.ids,
        logprobs=logprobs or None,
        facts=first.facts or second.facts,
        end=second.end,
    )


class DraftingRows:
    """Makes drafts before a step and counts results after it; without a speculator, does nothing.

    Used by the compute thread. A step with drafts runs while no other step is in flight.
    """

    def __init__(
        self,
        engine: Engine,
        generations: Generations,
        constrained: ConstrainedRows,
        speculator: Speculator | None,
        require_device: Callable[[Exception], None],
    ) -> None:
        """`require_device` raises DeviceLost if the device no longer computes."""
        self._engine = engine
        self._generations = generations
        self._constrained = constrained
        self.speculator = speculator
        self._require_device = require_device
        self._ended = 0.0  # monotonic time when the newest step was collected; 0: paused since then
        self._waited = False  # whether the next step waited for passes in flight
        self._failures = 0  # consecutive failures of `drafts`

    def depths(self, live: Many[Sequence], limits: StepLimits) -> dict[Sequence, int]:
        """Returns the number of drafts for each sequence, from the tokens that are known now."""
        speculator = self.speculator
        if speculator is None or speculator.skips_next:
            return {}
        began = speculator.clock()
        rows, candidates = candidates_of(live, limits, self._engine.blocks.given, self._may_check)
        return speculator.depths(rows, limits.lines, candidates, began)

    def depths_after_wait(self, live: Many[Sequence], limits: StepLimits) -> dict[Sequence, int]:
        """Returns `depths` once more, after the step has waited for the passes in flight.

        The step waited because an earlier call of `depths` had returned drafts. If this call
        returns none, the wait was useless, and the next steps have no drafts (Speculator.pause).
        """
        self._waited = True
        depths = self.depths(live, limits)
        if not depths and self.speculator is not None:
            self.speculator.pause()
        return depths

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts of the next step; none if they cannot be made. Raises DeviceLost.

        Call it only while no pass is in flight.
        """
        assert self.speculator is not None
        try:
            drafts = self.speculator.drafts(depths)
        except Exception as error:  # requests continue without drafts
            self._require_device(error)
            self._failures += 1
            log.warning("drafts could not be made", extra={"times": self._failures}, exc_info=error)
            self.speculator.drafter.reset()
            if self._failures == MAX_FAILURES:
                log.error("no more drafts are made")
                self.speculator = None
            return NO_DRAFTS
        self._failures = 0
        return drafts

    def _may_check(self, sequence: Sequence) -> bool:
        """Returns whether a sequence may check drafts: its constraint, if any, must be quick.

        Otherwise the masks after the drafts cannot be made in time for a step.
        """
        generation = self._generations.of(sequence)
        return generation.constraint is None or self._constrained.finds_forced(generation)

    def collected(
        self, step: Step, drafts: Drafts, drawn: Many[SampledToken], *, fresh: bool
    ) -> None:
        """Counts the accepted drafts and the time of a step, before the step's tokens are appended.

        `fresh`: the step compiled something, so its time is not typical.
        """
        if self.speculator is None:
            return
        now = self.speculator.clock()
        if self.speculator.skip_step():
            self._ended, self._waited = now, False
            return
        if drafts:
            self.speculator.count_checked(drafts, drawn)
        if self._ended:
            alone = step.rows == len(step.spans) and not fresh
            measured = alone and (bool(drafts) or not self._waited)
            self.speculator.step_ended(step.rows, drafts, now - self._ended, measured=measured)
        self._ended, self._waited = now, False
        if step.rows < len(step.spans):
            reading = (span.sequence for span in step.chunks)
            self.speculator.read([row for row in reading if row.reads_prompt and not row.has_slots])

    def pause(self) -> None:
        """Excludes the time until the next step from the measurements."""
        self._ended = 0.0
