"""The loop of the compute thread: takes messages, runs one step, delivers its results.

A step ends late sequences, grows and admits rows, reads prompt chunks, then decodes all rows.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.block_allocator import BlockAllocator
from mlxpool.worker.compute.generation import Generation
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.memory_report import MemoryReport
from mlxpool.worker.compute.messages import Admit, Drop, DropAll, Inbound
from mlxpool.worker.compute.outbox import Outbox
from mlxpool.worker.compute.passes import Passes
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.interface import Engine
from mlxpool.worker.scheduling.scheduler import pair_budget, plan_step, prefill_budget, running
from mlxpool.worker.scheduling.sequence import Phase
from mlxpool.worker.system.cpu_threads import CpuThreads

BeginGeneration = Callable[[Admit, Callable[[int], bytes]], Generation]


class ComputeLoop:
    """Owns the engine. `begin` makes the generation of an admitted sequence."""

    def __init__(
        self,
        engine: Engine,
        max_rows: int,
        inbox: queue.SimpleQueue[Inbound],
        outbox: Outbox,
        progress: Progress,
        cpu_threads: CpuThreads,
        begin: BeginGeneration = Generation.begin,
    ) -> None:
        self._engine = engine
        self._max_rows = max_rows
        self._inbox = inbox
        self._outbox = outbox
        self._progress = progress
        self._cpu_threads = cpu_threads
        self._begin = begin
        self._generations = Generations(engine)
        self._blocks = BlockAllocator(engine, self._generations, progress)
        self._passes = Passes(engine, self._generations, progress)
        self._memory_report = MemoryReport(engine, progress)

    def run(self) -> NoReturn:
        """Serve until an exception ends the thread: DeviceLost, or what this program did wrong."""
        while True:
            rows = self._take_messages()
            rows += self._step()
            self._outbox.deliver(rows)
            self._memory_report.refresh(monotonic())

    def _take_messages(self) -> list[Delta]:
        """Handle the messages in the inbox; without a generation, wait for one."""
        rows: list[Delta] = []
        if not self._generations:
            self._memory_report.refresh_now()
            self._progress.enter("idle")
            self._cpu_threads.end_steps()
            self._handle(self._inbox.get(), rows)
        while not self._inbox.empty():
            self._handle(self._inbox.get(), rows)
        return rows

    def _handle(self, message: Inbound, rows: list[Delta]) -> None:
        """Handle one message; the rows of streams that it ends are appended to `rows`."""
        if isinstance(message, Admit):
            generation = self._begin(message, self._engine.piece)
            self._generations.add(generation)
            reason = generation.finish_reason()  # a resumed completion may be complete already
            if reason is not None:
                rows.append(self._generations.finish(generation, reason))
        elif isinstance(message, Drop):
            dropped = self._generations.get(message.key)
            if dropped is not None:
                rows.append(self._generations.finish(dropped, "cancelled"))
        elif isinstance(message, DropAll):
            self._generations.forget_all()
            rows.clear()
            self._outbox.fence = message.fence
        else:
            self._generations.forget_all()
            self._outbox.deliver(rows)
            rows.clear()
            self._outbox.handed_back()

    def _step(self) -> list[Delta]:
        generations, progress = self._generations, self._progress
        self._cpu_threads.begin_step(monotonic())
        rows = generations.expire(monotonic())
        rows += self._blocks.grow()
        rows += self._blocks.admit(self._max_rows, self._passes.admit)
        live = generations.sequences()
        decoding = any(sequence.phase is Phase.DECODE for sequence in live)
        budget = prefill_budget(self._engine.chunk, decoding, progress.usual_token)
        step = plan_step(live, budget, pair_budget(self._engine.chunk))
        for sequence, share in step.prefill:
            if not share:
                self._passes.prompt_read(sequence)
        rows += self._passes.prefill([one for one in step.prefill if one[1]])
        if step.decode:
            rows += self._passes.decode(list(step.decode))
        progress.running = len(running(generations.sequences()))
        progress.waiting = len(generations) - progress.running
        return rows
