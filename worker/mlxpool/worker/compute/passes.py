"""Runs the engine's passes of one step and decides which requests a failed pass ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from time import monotonic

from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.errors import DeviceLost, as_pool_error
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.interface import Engine, PrefillShare
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence, SequenceFailed

log = logging.getLogger("mlxpool.worker")

MAX_FAILED_JOINT_PASSES = 3  # then prompts are read one by one


class Passes:
    """Every method returns the rows that streams get from it.

    An error ends the requests that took part in the pass, and nothing else. A lost device ends
    none: DeviceLost is raised, and their streams continue in another process.
    """

    def __init__(self, engine: Engine, generations: Generations, progress: Progress) -> None:
        self._engine = engine
        self._generations = generations
        self._progress = progress
        self._failed_joint_passes = 0

    def admit(self, sequence: Sequence) -> list[Delta]:
        """Give the sequence a row of the engine."""
        return self._guarded([sequence], partial(self._admit, sequence))

    def prefill(self, shares: Many[PrefillShare]) -> list[Delta]:
        """Read a chunk of each prompt, as many prompts in one pass as the engine allows."""
        rows: list[Delta] = []
        while shares:
            count = self._joint_size(shares)
            group, shares = shares[:count], shares[count:]
            rows += self._prefill_one(group[0]) if count == 1 else self._prefill_joint(group)
        return rows

    def decode(self, sequences: list[Sequence]) -> list[Delta]:
        """Draw the next token of each sequence."""
        return self._guarded(sequences, partial(self._decode, sequences))

    def prompt_read(self, sequence: Sequence) -> None:
        """The sequence decodes from the next step on."""
        generation = self._generations.of(sequence)
        generation.prefill_at = generation.prefill_at or monotonic()
        generation.decode_at = generation.decode_at or monotonic()
        sequence.phase = Phase.DECODE

    def _admit(self, sequence: Sequence) -> list[Delta]:
        self._engine.admit(sequence)
        sequence.phase = Phase.PREFILL
        return []

    def _joint_size(self, shares: Many[PrefillShare]) -> int:
        """How many of the first shares are computed in one pass."""
        if self._failed_joint_passes >= MAX_FAILED_JOINT_PASSES:
            return 1
        try:
            return self._engine.prefill_batch_size(shares)
        except Exception:
            log.exception("prompts are read one by one")
            self._failed_joint_passes = MAX_FAILED_JOINT_PASSES
            return 1

    def _prefill_one(self, share: PrefillShare) -> list[Delta]:
        sequence = share[0]
        # An error of a step computed ahead may surface here; it is not this prompt's.
        to_blame = None if self._engine.step_in_flight() else sequence.id
        read = partial(self._prefill, [share], sequence.id)
        return self._guarded([sequence], read, to_blame)

    def _prefill_joint(self, shares: Many[PrefillShare]) -> list[Delta]:
        """One pass. If it fails, each prompt is read again alone: only the one to blame ends."""
        try:
            return self._prefill(shares, None)
        except Exception as error:
            log.warning("a pass over %d prompts failed", len(shares), exc_info=True)
            self._require_device(error, None)
        self._failed_joint_passes += 1
        for sequence, _ in shares:
            sequence.suspect = True
            self._generations.release(sequence)
            sequence.return_to_waiting()
        return []

    def _prefill(self, shares: Many[PrefillShare], request: bytes | None) -> list[Delta]:
        for sequence, _ in shares:
            generation = self._generations.of(sequence)
            generation.prefill_at = generation.prefill_at or monotonic()
        with self._progress.prefilling(request, sum(share for _, share in shares)):
            done = self._engine.prefill_batch(shares)
        for (sequence, _), tokens in zip(shares, done, strict=True):
            if tokens == 0 or sequence.prefilled >= sequence.length - 1:
                self.prompt_read(sequence)
        return []

    def _decode(self, sequences: list[Sequence]) -> list[Delta]:
        with self._progress.decoding(len(sequences)):
            drawn = self._engine.decode(sequences)
        now = monotonic()
        return [self._commit(one, now) for one in drawn]

    def _commit(self, drawn: SampledToken, now: float) -> Delta:
        """Append one drawn token; an error here ends this request alone."""
        sequence = drawn.sequence
        generation = self._generations.of(sequence)
        count = len(sequence.ids)
        try:
            delta = generation.commit(drawn, self._engine.eos, now)
        except Exception as error:
            log.exception("a token could not be taken")
            del sequence.ids[count:]  # the error's position is the number of ids sent
            return self._generations.fail(sequence, as_pool_error(error))
        if delta.end is not None:
            self._generations.forget(generation)
        return delta

    def _guarded(
        self,
        sequences: list[Sequence],
        work: Callable[[], list[Delta]],
        to_blame: bytes | None = None,
    ) -> list[Delta]:
        """The rows of `work`; those of the errors if it fails for `sequences`.

        `to_blame` is the request that is charged with a lost device.
        """
        try:
            return work()
        except SequenceFailed as failed:
            return [self._generations.fail(failed.sequence, Internal(str(failed)))]
        except Exception as error:
            log.exception("a step failed")
            self._require_device(error, to_blame)
            return [self._generations.fail(one, as_pool_error(error)) for one in sequences]

    def _require_device(self, error: Exception, to_blame: bytes | None) -> None:
        """Raises DeviceLost when the device no longer computes."""
        if isinstance(error, PoolError | SequenceFailed):
            return  # raised by this program, not by the device
        self._progress.enter(
            "decode"
        )  # the broker's limit for this phase finds a device that hangs
        self._progress.moved()
        if not self._engine.device_works():
            raise DeviceLost(error, to_blame) from error
