"""What a step does with the engine: gives sequences KV blocks, then runs the engine's passes.

A failure ends the requests that it concerns, or the process when the device is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from time import monotonic

from mlxpool.common.errors import Internal, OutOfMemory, PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.engine import Engine, PrefillShare
from mlxpool.worker.scheduling.kv_blocks import (
    KV_BLOCK_TOKENS,
    blocks_for,
    blocks_for_step,
    blocks_to_admit,
    promise_blocks,
)
from mlxpool.worker.scheduling.scheduler import (
    needing_blocks,
    next_admissions,
    preemption_victim,
    running,
)
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence, SequenceFailed

log = logging.getLogger("mlxpool.worker")

MAX_FAILED_JOINT_PASSES = 3  # then prompts are read one by one
_MEMORY_WORDS = ("memory", "alloc", "metal::malloc", "resource limit")


class DeviceLost(Exception):
    """The device fails every call from now on, so the process has to end.

    `request` is the id of the request whose prompt was being read, None if no single one was.
    """

    def __init__(self, error: Exception, request: bytes | None) -> None:
        super().__init__(f"the device is lost: {type(error).__name__}: {error}")
        self.request = request


class BlockAllocator:
    """Gives sequences KV blocks of the engine's capacity; cached prefixes are evicted first."""

    def __init__(self, engine: Engine, generations: Generations, progress: Progress) -> None:
        self._engine = engine
        self._generations = generations
        self._progress = progress

    def grow(self) -> list[Delta]:
        """Allocate the blocks that the next step's rows need, preempting the newest rows if needed.

        Returns the last deltas of the sequences that cannot grow.
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

    def admit(self, max_sequences: int, admit: Callable[[Sequence], list[Delta]]) -> list[Delta]:
        """Call `admit` for waiting sequences that fit into memory, until `max_sequences` run.

        Returns the deltas that `admit` returned.
        """
        deltas: list[Delta] = []
        for sequence in next_admissions(self._generations.sequences(), max_sequences):
            capacity = self._engine.blocks
            need = blocks_to_admit(sequence, capacity)
            if need > max(capacity, sequence.promised):
                deltas.append(self._refuse(sequence))
            elif self._find(need) or not running(self._generations.sequences()):
                sequence.blocks = need
                promise_blocks(sequence, capacity)
                deltas += admit(sequence)
            else:
                break  # later arrivals must not take the blocks that this one waits for
        return deltas

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


class Passes:
    """The passes of one step. Every method returns the deltas that streams get from it.

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
        deltas: list[Delta] = []
        while shares:
            count = self._joint_size(shares)
            group, shares = shares[:count], shares[count:]
            deltas += self._prefill_one(group[0]) if count == 1 else self._prefill_joint(group)
        return deltas

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
            sequence.prefill_alone = True
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
        """The deltas of `work`; those of the errors if it fails for `sequences`.

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
        # In this phase the broker's time limit finds a device that hangs.
        self._progress.enter("decode")
        self._progress.moved()
        if not self._engine.device_works():
            raise DeviceLost(error, to_blame) from error


def as_pool_error(error: Exception) -> PoolError:
    """The error that ends a request after a step raised `error`."""
    if isinstance(error, PoolError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(w in text.lower() for w in _MEMORY_WORDS):
        return OutOfMemory(f"the step did not fit into memory: {text}")
    return Internal(f"the step failed: {text}")


def too_many_blocks(sequence: Sequence, capacity: int) -> OutOfMemory:
    """The error of a sequence that needs more than `capacity` blocks."""
    need = blocks_for(sequence.length) + 1
    return OutOfMemory(
        f"{sequence.length} tokens, {len(sequence.prompt)} of them the prompt's, need {need} blocks"
        f" of {KV_BLOCK_TOKENS} tokens; this worker's memory has {capacity}",
        details={
            "prompt_tokens": len(sequence.prompt),
            "need_tokens": need * KV_BLOCK_TOKENS,
            "capacity_tokens": capacity * KV_BLOCK_TOKENS,
        },
    )
