"""Runs a batch of requests on an engine in this process, as a worker's compute thread does."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from mlxpool.common.options import Options
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.speculator import Speculator


class Batch:
    """Requests that run together, each in its own row of the batch."""

    def __init__(self, engine: ModelEngine, speculator: Speculator | None = None) -> None:
        self._engine = engine
        self._generations = Generations(engine)
        self._steps = Steps(engine, self._generations, Progress(lambda: None), speculator)
        self.rows: list[Sequence] = []

    def add(
        self, prompt: Many[int], options: Options, tokens: int, constraint: Any = None
    ) -> Sequence:
        """Adds a request as a row of the batch. Raises MemoryError if no row is free."""
        number, piece = len(self.rows), self._engine.piece
        row = Sequence(number.to_bytes(16, "big"), 1, tuple(prompt), options, number, tokens)
        admit = Admit(row, Facts(), Detokenizer(piece, ()), 0.0, constraint=constraint)
        self._generations.add(Generation.begin(admit, piece))
        if not self._engine.blocks.admit(row, alone=True):
            raise MemoryError(f"{number + 1} streams do not fit into the memory")
        self._steps.admit(row)
        self.rows.append(row)
        return row

    @property
    def running(self) -> int:
        """The number of rows whose requests have not ended."""
        return len(self._generations)

    def step(self) -> None:
        for row in self._engine.blocks.lacking(self._generations.sequences()):
            self._engine.blocks.grow(row, alone=True)
        self._steps.run()

    def read_prompts(self) -> None:
        """Runs steps until each request has its first token."""
        while any(not row.ids for row in self.rows):
            self.step()

    def end(self) -> None:
        """Ends the requests that still run."""
        self._generations.forget_all()
        while self._steps.in_flight:
            self._steps.collect()
