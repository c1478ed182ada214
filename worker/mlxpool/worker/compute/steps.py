"""Runs steps on the engine: gives sequences rows, submits and collects passes.

A failure ends the requests that it affects, or the process if the device is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import Internal, OutOfMemory, PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.constrained_rows import NO_RUN, ConstrainedRows
from mlxpool.worker.compute.drafting_rows import DraftingRows, one_each
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.image_jobs import ImageJob, NoRoom, next_job, perform
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.scheduler import NO_DRAFTS, schedule
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence, SequenceFailed
from mlxpool.worker.scheduling.spans import Step
from mlxpool.worker.speculation.drafter import Drafts
from mlxpool.worker.speculation.speculator import Speculator

log = logging.getLogger("mlxpool.worker")

NO_CACHE = "the model has no prefix cache"
MAX_TURNS = 256  # the most owners with turns; beyond, owners without sequences are forgotten
MAX_FAILED_JOINT_STEPS = 3  # failures of joint steps before prompts are read one by one
_MEMORY_WORDS = ("memory", "alloc", "metal::malloc", "resource limit")


class DeviceLost(Exception):
    """The device fails every call from now on, so the process has to end.

    `request` is the id of the request whose prompt was being read; None: no or several prompts.
    """

    def __init__(self, error: Exception, request: bytes | None) -> None:
        super().__init__(f"the device is lost: {type(error).__name__}: {error}")
        self.request = request


class StepInFlight(Struct, frozen=True):
    """A submitted step.

    `request` is the id of the request whose prompt the step reads; None: no or several prompts.
    `tokens` counts the inputs of a step that reads prompts; 0: a decode step of `rows` rows.
    `drafts` are the drafts that the step checks. `fresh`: the step's time does not count, because
    this step, or a step that was built meanwhile, compiles something.
    """

    step: Step
    request: bytes | None
    tokens: int
    rows: int
    drafts: Drafts
    fresh: bool = False

    @classmethod
    def of(cls, step: Step, drafts: Drafts) -> Self:
        chunks = step.chunks
        request = chunks[0].sequence.id if len(chunks) == 1 else None
        tokens = sum(span.count for span in step.spans) if chunks else 0
        return cls(step, request, tokens, len(step.spans), drafts)


class Steps:
    """Runs steps on the engine. Methods return the deltas for streams.

    An error ends only the requests that it affects. A lost device ends no request: DeviceLost is
    raised, and the streams continue in another process.
    """

    def __init__(
        self,
        engine: Engine,
        generations: Generations,
        progress: Progress,
        speculator: Speculator | None = None,
    ) -> None:
        """`speculator` None: no step checks drafts."""
        self._engine = engine
        self._generations = generations
        self._progress = progress
        engine.report_compiles(progress.compiles)
        if engine.draft is not None:
            engine.draft.report(progress.compiles, progress.moved)
        self._flights: deque[StepInFlight] = deque()
        self.constrained = ConstrainedRows(engine, generations)
        self.drafting = DraftingRows(
            engine,
            generations,
            self.constrained,
            speculator,
            lambda error: self._require_device(error, None),
        )
        self._failed_joint_steps = 0
        self._alone = False  # whether the newest step read a prompt alone
        self._passes = 0  # number of passes that read prompts
        self._turns: dict[str, int] = {}  # owner -> its newest pass that read a prompt

    @property
    def in_flight(self) -> int:
        """The number of steps that were submitted and not collected."""
        return len(self._flights)

    def pause(self) -> None:
        """Exclude the time until the next step from measurements: no step runs now."""
        self.drafting.pause()

    def admit(self, sequence: Sequence) -> list[Delta]:
        """Give the sequence a row of the engine."""
        try:
            self._engine.admit(sequence)
        except Exception as error:
            log.exception("a sequence could not be admitted")
            self._require_device(error, None)
            return [self._generations.fail(sequence, as_pool_error(error))]
        sequence.phase = Phase.RUNNING
        self.drafting.pause()  # the admission may have copied a prefix, which takes time
        if log.isEnabledFor(logging.DEBUG):
            self._log_prefix(sequence)
        if self._failed_joint_steps >= MAX_FAILED_JOINT_STEPS:
            sequence.read_alone = True
        return []

    def _log_prefix(self, sequence: Sequence) -> None:
        """Logs the cached tokens of an admitted sequence, and the KV cache use of all rows."""
        cache = self._engine.prefix
        cached = sequence.submitted
        kv_tokens, kv_bytes = self._engine.kv_use()
        fields = {
            "id": sequence.id.hex(),
            "reason": NO_CACHE if cache is None else cache.reason,
            "again": sequence.preempted or None,
            "cached": cached,
            "left": sequence.length - cached,
            "kv_tokens": kv_tokens,
            "kv_bytes": kv_bytes,
        }
        log.debug("prefix hit" if cached else "prefix miss", extra=fields)

    def run(self) -> list[Delta]:
        """Submit the next step; collect the oldest step if no more steps may be in flight."""
        live = self._generations.sequences()
        job = next_job(live, self._engine)
        if job is None:
            return self._run(live)
        if isinstance(job, NoRoom):
            return [self._generations.fail(job.sequence, job.error)]
        deltas = self._encode(job)
        live = self._generations.sequences()
        rows = [sequence for sequence in live if not sequence.reads_prompt]
        # If streams decode, this step reads no prompts: encoding the image already took time.
        return deltas + self._run(rows if any(map(self._is_live, rows)) else live)

    def _encode(self, job: ImageJob) -> list[Delta]:
        """Encode an image. Returns the last deltas of requests that end because of a failure."""
        generation = self._generations.of(job.sequence)
        generation.prefill_at = generation.prefill_at or monotonic()
        try:
            perform(job, self._engine, self._progress)
        except Exception as error:
            log.warning("an image could not be encoded", exc_info=error)
            self._require_device(error, job.sequence.id)
            deltas = [self._generations.fail(job.sequence, as_pool_error(error))]
        else:
            deltas = []
        self.drafting.pause()
        if self._flights:
            self._await_first(measured=False)
        return deltas

    def _run(self, live: list[Sequence]) -> list[Delta]:
        self.constrained.release()
        limits = self._engine.limits
        deltas: list[Delta] = []
        depths = self.drafting.depths(live, limits)
        if depths and self._flights:
            while self._flights:  # drafts need the newest token
                deltas += self.collect()
            if self._engine.blocks.lacking(live):
                return deltas  # forced tokens were appended: the next step gives their rows blocks
            depths = self.drafting.depths_after_wait(live, limits)
        drafts = NO_DRAFTS
        if depths:
            self._progress.drafts()
            drafts = self.drafting.drafts(depths)
        step = schedule(
            live,
            limits,
            self._engine.cost.seconds,
            self._engine.clip,
            alone=not self._alone,
            drafts=drafts,
            turns=self._turns,
        )
        if drafts:
            drafts = {span.sequence: span.drafts for span in step.spans if span.drafts}
        if step.alone and self._flights:
            return deltas + self.collect()
        if step.spans:
            deltas += self._submit(step, drafts)
            if self._flights and (step.alone or drafts or len(self._flights) > limits.ahead):
                deltas += self.collect()
            return one_each(deltas, drafts) if drafts else deltas
        if self._flights:
            return deltas + self.collect()
        self.drafting.pause()
        self.constrained.wait()
        return deltas

    def _submit(self, step: Step, drafts: Drafts) -> list[Delta]:
        self._alone = step.alone
        now = monotonic()
        if step.chunks:
            self._note_turns(step)
        for span in step.chunks:
            generation = self._generations.of(span.sequence)
            generation.prefill_at = generation.prefill_at or now
        constrained = self._generations.constrained(step.spans)
        self._flights.append(StepInFlight.of(step, drafts))
        if len(self._flights) == 1:
            self._await_first()
        try:
            if constrained:
                fresh = self._engine.forward(step.spans, self._take_ahead)
            else:
                fresh = self._engine.submit(step.spans)
        except Exception as error:
            self._discard_passes()
            return self._failed(error)
        if fresh:  # the time of this build is also in the time of the awaited step
            for place in {0, len(self._flights) - 1}:
                self._flights[place] = replace(self._flights[place], fresh=True)
        return self._draw(constrained, drafts) if constrained else []

    def _note_turns(self, step: Step) -> None:
        """Records which pass was the last to read a prompt of each owner: owners take turns.

        If the record has more than MAX_TURNS owners, removes the owners without sequences.
        """
        self._passes += 1
        self._turns.update((span.sequence.owner, self._passes) for span in step.chunks)
        if len(self._turns) > MAX_TURNS:
            live = {sequence.owner for sequence in self._generations.sequences()}
            self._turns = {owner: at for owner, at in self._turns.items() if owner in live}

    def _await_first(self, *, measured: bool = True) -> None:
        """Report a wait for the oldest step in flight; `measured`: see Progress.awaits."""
        flight = self._flights[0]
        self._progress.awaits(flight.request, flight.tokens, flight.rows, measured=measured)
        if flight.fresh:
            self._progress.compiles()

    def _take_ahead(self) -> None:
        """Begins to advance constraints by the tokens of the previous pass, if these are drawn.

        Another thread advances the constraints, while this thread submits the newest pass. After
        the submission this thread commits the tokens.
        """
        if len(self._flights) == 2 and not self._flights[0].drafts:
            drawn = self._engine.drawn()
            if drawn:
                self.constrained.take_ahead(drawn)

    def _draw(self, constrained: list[Generation], drafts: Drafts) -> list[Delta]:
        """Make the newest step draw its tokens, with masks that are made while the device computes.

        A mask depends on the previous token, so the previous step is collected first.
        """
        deltas: list[Delta] = []
        while len(self._flights) > 1:
            deltas += self.collect()
        if not self._flights:
            return deltas  # the previous step failed, and this step with it
        masks, failed = self.constrained.masks(constrained, drafts)
        for row, error in failed:
            log.warning("the mask of an answer could not be made", exc_info=error)
            deltas.append(self._generations.fail(row.sequence, as_pool_error(error)))
        try:
            self._engine.draw(masks)
        except Exception as error:
            return deltas + self._failed(error)
        return deltas

    def collect(self) -> list[Delta]:
        """Wait for the oldest step in flight, and commit its tokens. Returns their deltas."""
        flight = self._flights[0]
        try:
            results = self._engine.collect()
        except Exception as error:
            return self._failed(error)
        self._flights.popleft()
        self._progress.ended(fresh=flight.fresh)
        if self._flights:
            self._await_first()
        deltas: list[Delta] = []
        for prompt in results.prompts:
            if self._is_live(prompt.sequence):
                deltas += self._generations.of(prompt.sequence).add_to_report(prompt)
        self.drafting.collected(flight.step, flight.drafts, results.drawn, fresh=flight.fresh)
        deltas += self._commit(results.drawn, flight.drafts)
        for failed in results.failed:
            if self._is_live(failed.sequence):
                deltas.append(self._generations.fail(failed.sequence, Internal(str(failed))))
        return deltas

    def _is_live(self, sequence: Sequence) -> bool:
        return sequence.phase is Phase.RUNNING

    def _failed(self, error: Exception) -> list[Delta]:
        """End the requests that a failed step affects. Returns their last deltas.

        If the steps in flight read prompts and had several requests, no request ends. Instead each
        prompt is read again in a step of its own, and a request ends only if that step fails.
        Otherwise the requests of the steps end. Sequences that lost their rows wait for new rows.
        Raises DeviceLost.
        """
        log.warning("a step failed", exc_info=error)
        flights = [*self._flights]
        self._flights.clear()
        self.constrained.give_back()
        self._progress.failed()
        reading = {span.sequence for flight in flights for span in flight.step.chunks}
        inside = {span.sequence for flight in flights for span in flight.step.spans}
        suspects = {sequence for sequence in reading if self._is_live(sequence)}
        self._require_device(error, flights[0].request if len(suspects) == 1 else None)
        live = [sequence for sequence in self._generations.sequences() if self._is_live(sequence)]
        hit = [sequence for sequence in live if sequence in inside or self._engine.lost(sequence)]
        deltas: list[Delta] = []
        if reading and len(inside) > 1:
            self._failed_joint_steps += 1
            for sequence in suspects:
                sequence.read_alone = True
        else:
            if any(flight.step.alone for flight in flights):  # this explains a failed joint step
                self._failed_joint_steps = max(0, self._failed_joint_steps - 1)
            ending = [sequence for sequence in hit if sequence in inside]
            deltas = [self._generations.fail(sequence, as_pool_error(error)) for sequence in ending]
        for sequence in hit:
            if self._is_live(sequence):
                self._generations.release(sequence)
                sequence.return_to_waiting()
        return deltas

    def _discard_passes(self) -> None:
        """Makes the engine end its passes in flight, after it has refused a new pass.

        The steps of these passes end together with the refused step. Their tokens are dropped, so
        that the next step does not get them.
        """
        try:
            while self._engine.in_flight:
                self._engine.collect()
        except Exception as error:  # the engine drops the other passes, too
            log.warning("a pass in flight failed", exc_info=error)

    def _commit(self, drawn: list[SampledToken], drafts: Drafts) -> list[Delta]:
        """Append the drawn tokens of live sequences. Returns their deltas.

        An error ends only the request of its token.
        """
        deltas: list[Delta] = []
        of, eos, running = self._generations.of, self._engine.eos, Phase.RUNNING
        now, least = monotonic(), self.constrained.min_run()
        self.constrained.take(drawn, least, drafts)
        newest = {sample.sequence: sample for sample in drawn} if drafts else {}
        committed: list[Generation] = []  # generations that may have got forced tokens
        for sample in drawn:  # runs in every step, so it makes few calls
            sequence, token, _ = sample
            if sequence.phase is not running:
                continue
            generation, count, delta = of(sequence), len(sequence.ids), None
            try:
                if generation.plain:
                    delta = generation.append(token, eos, least)
                if delta is None:
                    last = newest.get(sequence, sample) is sample
                    committed.append(generation)
                    delta = self._commit_one(generation, sample, now, least if last else NO_RUN)
            except Exception as error:
                log.exception("a token could not be taken")
                del sequence.ids[count:]  # the error's position is the number of ids sent
                delta = self._generations.fail(sequence, as_pool_error(error))
            deltas.append(delta)
        self.constrained.begin_behind_runs(committed)
        return deltas

    def _commit_one(
        self, generation: Generation, drawn: SampledToken, now: float, least: int
    ) -> Delta:
        """Append one token of a completion; the token may end it. Returns the token's delta.

        Also appends the forced tokens that follow, if they are `least` or more.
        """
        find = self.constrained.finds_forced(generation)
        delta = generation.commit(drawn, self._engine.eos, now, find=find, least=least)
        sequence = generation.sequence
        if delta.end is not None:
            self._generations.forget(generation)
            return delta
        if generation.bound is not None:
            self._generations.apply_bound(generation)
        if sequence.shift is not None and sequence.shift_due:
            self._generations.release(sequence)
            sequence.shift_context()
        return delta

    def _require_device(self, error: Exception, to_blame: bytes | None) -> None:
        """Raises DeviceLost, with `to_blame` as its `request`, if the device no longer computes."""
        if isinstance(error, PoolError | SequenceFailed):
            return  # raised by this program, not by the device
        # In this phase the broker's time limit applies, which detects a device that hangs.
        self._progress.enter("decode")
        self._progress.moved()
        if not self._engine.device_works():
            raise DeviceLost(error, to_blame) from error


def as_pool_error(error: Exception) -> PoolError:
    """Returns the error that ends a request after a step raised `error`."""
    if isinstance(error, PoolError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(w in text.lower() for w in _MEMORY_WORDS):
        return OutOfMemory(f"the step did not fit into memory: {text}")
    return Internal(f"the step failed: {text}")
