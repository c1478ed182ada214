"""The loop of the compute thread: takes messages, runs one step, delivers its results.

A step ends sequences whose deadline has passed, grows and admits rows, then computes one pass over
all rows. On a GPU the pass is submitted while the device computes the previous pass.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import NoReturn

from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.records import as_map
from mlxpool.worker.compute.admissions import Admissions
from mlxpool.worker.compute.decisions import Decisions
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import (
    Admit,
    Decide,
    DeltaQueue,
    DiskNews,
    Drop,
    DropAll,
    DropCall,
    Inbound,
    MakeRoom,
    Outbound,
    Reserve,
    SaveAll,
)
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.scheduler import running
from mlxpool.worker.speculation.speculator import Speculator
from mlxpool.worker.system.cpu_threads import CpuThreads

SAVE_DELAY = 0.5  # seconds without a request before prefixes are saved to disk
DISK_WAIT = 0.02  # seconds between two checks of sequences that wait for the disk

BeginGeneration = Callable[[Admit, Callable[[int], bytes]], Generation]


class ComputeLoop:
    """The loop, which owns the engine.

    `post` sends a message to the main thread. `begin` makes the generation of an admitted sequence.
    `speculator` None: no step checks drafts.
    """

    def __init__(
        self,
        engine: Engine,
        max_sequences: int,
        inbox: queue.SimpleQueue[Inbound],
        delta_queue: DeltaQueue,
        progress: Progress,
        cpu_threads: CpuThreads,
        post: Callable[[Outbound], None],
        begin: BeginGeneration = Generation.begin,
        speculator: Speculator | None = None,
    ) -> None:
        self._engine = engine
        self._max_sequences = max_sequences
        self._inbox = inbox
        self._delta_queue = delta_queue
        self._progress = progress
        self._cpu_threads = cpu_threads
        self._begin = begin
        self._generations = Generations(engine)
        self._admissions = Admissions(engine, self._generations, progress)
        self._steps = Steps(engine, self._generations, progress, speculator)
        self._speculator = speculator
        self._decisions = Decisions(engine, self._generations, post)
        self._saving = False  # whether no request came for SAVE_DELAY, or the worker will end
        self._report_memory(monotonic())

    def run(self) -> NoReturn:
        """Serve until an exception ends the thread: DeviceLost, or a fault of this program."""
        while True:
            deltas = self._take_messages()
            deltas += self._step()
            self._delta_queue.put(self._decisions.take(deltas))
            now = monotonic()
            if self._progress.memory.is_due(now):
                self._report_memory(now)

    def _take_messages(self) -> list[Delta]:
        """Handle the messages in the inbox; if there is no generation or call, wait for a message.

        Returns the last deltas of streams that the messages end.
        """
        deltas: list[Delta] = []
        while not self._generations and self._steps.in_flight:
            self._steps.collect()  # all sequences of these steps have ended
        if not self._generations and not self._decisions:
            self._report_memory(monotonic())
            self._steps.pause()
            self._progress.enter("idle")
            self._cpu_threads.end_steps()
            self._handle(self._next_message(), deltas)
        elif self._waits_for_disk():
            self._progress.enter("idle")
            with suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=DISK_WAIT), deltas)
        while not self._inbox.empty():
            self._handle(self._inbox.get(), deltas)
        return deltas

    def _next_message(self) -> Inbound:
        """Wait for a message and return it.

        If no message comes within SAVE_DELAY, save prefixes to disk until a message comes.
        """
        disk = self._engine.disk
        if disk is None:
            return self._inbox.get()
        disk.turn(monotonic(), busy=False)  # the disk threads need not pause while no step runs
        if not disk.may_save:
            return self._inbox.get()
        if not self._saving:
            try:
                return self._inbox.get(timeout=SAVE_DELAY)
            except queue.Empty:
                self._saving = True
        while self._inbox.empty() and disk.save_some():
            pass
        return self._inbox.get()

    def _waits_for_disk(self) -> bool:
        """Return whether all sequences wait for the disk tier and there is no other work."""
        disk = self._engine.disk
        if disk is None or not disk.reads or self._steps.in_flight or not self._inbox.empty():
            return False
        return all(sequence.restoring for sequence in self._generations.sequences())

    def _handle(self, message: Inbound, deltas: list[Delta]) -> None:
        """Handle one message; append the last deltas of streams that it ends to `deltas`."""
        if isinstance(message, Reserve | MakeRoom | DiskNews | SaveAll):
            self._handle_memory(message)
        elif isinstance(message, Admit):
            self._saving = False
            generation = self._begin(message, self._engine.piece)
            self._generations.add(generation)
            deltas += generation.begin_report()
            reason = generation.finish_reason()  # a resumed completion may already be complete
            if reason is not None:
                deltas.append(self._generations.finish(generation, reason))
        elif isinstance(message, Drop):
            dropped = self._generations.get(message.key)
            if dropped is not None:
                deltas.append(self._generations.finish(dropped, "cancelled"))
        elif isinstance(message, Decide):
            self._decisions.add(message)
        elif isinstance(message, DropCall):
            self._decisions.remove(message.key)
        elif isinstance(message, DropAll):
            self._decisions.clear()
            self._generations.forget_all()
            deltas.clear()
            self._delta_queue.fence = message.fence
        else:
            self._saving = True  # `HandBack`: this worker will end
            self._decisions.restart()
            self._generations.forget_all()
            self._delta_queue.put(deltas)
            deltas.clear()
            self._delta_queue.handed_back()

    def _handle_memory(self, message: Reserve | MakeRoom | DiskNews | SaveAll) -> None:
        """Handle a message about memory or the disk; DiskNews only wakes the loop."""
        if isinstance(message, Reserve):
            self._engine.reserve(message.bytes)
        elif isinstance(message, MakeRoom):
            self._engine.make_room(message.bytes)
        elif isinstance(message, SaveAll):
            self._save_all(message)

    def _save_all(self, message: SaveAll) -> None:
        """Write the prefixes of the cache and of the rows to disk, before the process ends."""
        try:
            self._generations.forget_all()
            if self._engine.disk is not None:
                self._engine.disk.save_all(message.until)
        finally:
            message.saved.set()

    def _step(self) -> list[Delta]:
        generations, progress = self._generations, self._progress
        disk = self._engine.disk
        if disk is not None:
            disk.turn(monotonic(), busy=any(not row.restoring for row in generations.sequences()))
        self._cpu_threads.begin_step(monotonic())
        deltas = generations.expire(monotonic())
        cache = self._engine.prefix
        apart = cache is not None and cache.exclusive
        self._decisions.begin(self._max_sequences - len(generations), apart=apart)
        deltas += self._admissions.grow()
        deltas += self._admissions.admit(self._max_sequences, self._steps.admit)
        deltas += self._steps.run()
        progress.running = len(running(generations.sequences()))
        progress.waiting = len(generations) - progress.running
        return deltas

    def _report_memory(self, now: float) -> None:
        """Copy the engine's memory figures into the progress, for the heartbeats."""
        self._progress.memory.read(self._engine.memory(), now)
        self._progress.capacity_tokens = self._engine.blocks.capacity * KV_BLOCK_TOKENS
        drafts = self._speculator
        if drafts is not None:
            self._progress.speculation = {
                "checks": drafts.checks,
                "drafted": drafts.drafted,
                "accepted": drafts.accepted,
            }
        counters = self._engine.prefix
        if counters is not None:
            self._progress.prefix = {
                "hits": counters.hits,
                "misses": counters.misses,
                "tokens": counters.tokens,
                "evictions": counters.evictions,
                "evicted_tokens": counters.evicted_tokens,
                "images": self._engine.encoded.encoded,
                **self._disk_figures(),
            }

    def _disk_figures(self) -> dict[str, int]:
        """Returns the counters of the disk tier; empty without a disk tier."""
        disk = self._engine.disk
        if disk is None:
            return {}
        return {f"disk_{name}": value for name, value in as_map(disk.counters).items()}
