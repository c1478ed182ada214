"""The loop of the compute thread: takes messages, runs one step, delivers its results.

A step ends late sequences, grows and admits rows, then computes one pass over all of them. On a GPU
it is submitted while the one before it is computed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.admissions import Admissions
from mlxpool.worker.compute.decisions import Decisions
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import (
    Admit,
    Decide,
    DeltaQueue,
    Drop,
    DropAll,
    DropCall,
    Inbound,
    MakeRoom,
    Outbound,
    Reserve,
)
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.scheduler import running
from mlxpool.worker.speculation.speculator import Speculator
from mlxpool.worker.system.cpu_threads import CpuThreads

REPORT_INTERVAL = 0.1  # seconds between two readings of the memory, which take time

BeginGeneration = Callable[[Admit, Callable[[int], bytes]], Generation]


class ComputeLoop:
    """Owns the engine. `post` sends a message to the main thread.

    `begin` makes the generation of an admitted sequence. `speculator` None: no drafts are checked.
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
        self._reported = 0.0  # when the memory was read last
        self._report_memory(monotonic())

    def run(self) -> NoReturn:
        """Serve until an exception ends the thread: DeviceLost, or what this program did wrong."""
        while True:
            deltas = self._take_messages()
            deltas += self._step()
            self._delta_queue.put(self._decisions.take(deltas))
            now = monotonic()
            if now - self._reported >= REPORT_INTERVAL:
                self._report_memory(now)

    def _take_messages(self) -> list[Delta]:
        """Handle the messages in the inbox; without a generation and a call, wait for one."""
        deltas: list[Delta] = []
        while not self._generations and self._steps.in_flight:
            self._steps.collect()  # of sequences that have left
        if not self._generations and not self._decisions:
            self._report_memory(monotonic())
            self._steps.pause()
            self._progress.enter("idle")
            self._cpu_threads.end_steps()
            self._handle(self._inbox.get(), deltas)
        while not self._inbox.empty():
            self._handle(self._inbox.get(), deltas)
        return deltas

    def _handle(self, message: Inbound, deltas: list[Delta]) -> None:
        """Handle one message; the last deltas of streams that it ends are appended to `deltas`."""
        if isinstance(message, Admit):
            generation = self._begin(message, self._engine.piece)
            self._generations.add(generation)
            deltas += generation.begin_report()
            reason = generation.finish_reason()  # a resumed completion may be complete already
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
            self._decisions.clear(message.fence)
            self._generations.forget_all()
            deltas.clear()
            self._delta_queue.fence = message.fence
        elif isinstance(message, Reserve):
            self._engine.reserve(message.bytes)
        elif isinstance(message, MakeRoom):
            self._engine.make_room(message.bytes)
        else:
            self._decisions.restart()
            self._generations.forget_all()
            self._delta_queue.put(deltas)
            deltas.clear()
            self._delta_queue.handed_back()

    def _step(self) -> list[Delta]:
        generations, progress = self._generations, self._progress
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
        """Copy the engine's figures into the progress, for the heartbeats."""
        self._reported = now
        self._progress.memory.read(self._engine.memory())
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
            }
