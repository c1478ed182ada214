"""The generations that the compute thread is working on, waiting ones included."""

from __future__ import annotations

import logging
from time import monotonic

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generation import Generation
from mlxpool.worker.compute.messages import RunKey
from mlxpool.worker.engine.interface import Engine
from mlxpool.worker.scheduling.sequence import Phase, Sequence

log = logging.getLogger("mlxpool.worker")


class Generations:
    """A table in order of arrival. What leaves it is released in the engine, too."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_key: dict[RunKey, Generation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, generation: Generation) -> None:
        self._by_key[generation.key] = generation

    def get(self, key: RunKey) -> Generation | None:
        return self._by_key.get(key)

    def of(self, sequence: Sequence) -> Generation:
        """The generation of a live sequence."""
        return self._by_key[sequence.id, sequence.attempt]

    def sequences(self) -> list[Sequence]:
        """All live sequences in order of arrival."""
        return [generation.sequence for generation in self._by_key.values()]

    def finish(self, generation: Generation, reason: str) -> Delta:
        """End it without a further token. Returns its last row."""
        row = generation.last_row(generation.end(reason, monotonic()))
        self.forget(generation)
        return row

    def fail(self, sequence: Sequence, error: PoolError) -> Delta:
        """End it with an error. Returns its last row."""
        generation = self.of(sequence)
        row = generation.last_row(error)
        self.forget(generation)
        return row

    def expire(self, now: float) -> list[Delta]:
        """End those whose deadline has passed. Returns their last rows."""
        late = [one for one in self._by_key.values() if now >= one.deadline]
        return [self.fail(one.sequence, one.deadline_error()) for one in late]

    def forget(self, generation: Generation) -> None:
        """Remove it without a row."""
        generation.sequence.phase = Phase.FINISHED
        del self._by_key[generation.key]
        self.release(generation.sequence)

    def forget_all(self) -> None:
        """Remove all without a row."""
        for generation in list(self._by_key.values()):
            self.forget(generation)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's memory in the engine, also of one that will be admitted again."""
        try:
            self._engine.release(sequence)
        except Exception:  # this may cost memory or cached prefixes, but it must end no stream
            log.exception("a sequence could not be released")
