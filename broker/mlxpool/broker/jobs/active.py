"""A job that runs: what came from its run and is not on the disk yet."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.broker.jobs.feeding import Group
from mlxpool.broker.jobs.job_states import TRANSITIONS, JobPhase
from mlxpool.broker.jobs.retries import ALONE_STARTS
from mlxpool.broker.store.operations import Finish, NewGeneration, Operation, Progress
from mlxpool.broker.store.records import MAX_CHUNK, Chunk, FedJob, JobView
from mlxpool.common.protocol.deltas import Delta, size_of
from mlxpool.common.protocol.frames import pack
from mlxpool.common.protocol.token_ids import count_of

WRITE_DELAY = 0.05  # seconds for which steps are gathered until they are written
UNREAD_DELAY = 1.0  # the same, while nobody reads the job: a crash makes it compute these again
UNREAD_BYTES = 8 * 1024  # of steps that nobody reads, from which on they wait for WRITE_DELAY only


class Step(NamedTuple):
    """Output that is never divided: the text is exactly that of the ids."""

    text: str
    ids: bytes
    logprobs: list[Any] | None
    size: int


class ActiveJob(Struct, eq=False):
    """A job between the commit that gave it to the core and the one that ends or defers it.

    `durable` ids are on the disk and `taken` have come from its run; the steps between them are in
    `steps`, in order. At most one operation of a job is under way: `writing`.
    """

    job: JobView
    attempt: int  # of its run, as the core knows it
    model: str  # under which its model runs
    deadline: float = math.inf  # on the core's clock
    taken: int = 0
    durable: int = 0
    steps: deque[Step] = field(default_factory=deque)
    size: int = 0  # bytes of `steps`
    text_before: str = ""  # came without ids: it belongs in front of the next step's
    facts: bytes | None = None  # of its first worker, until they are on the disk
    writing: Operation | None = None
    outcome: Operation | None = None  # how it leaves, once all its ids are on the disk
    phase: JobPhase = JobPhase.RUNNING  # what it is once its outcome is on the disk
    ran: bool = True  # the core has its run
    leaving: bool = False  # its run is over and its outcome is not on the disk
    write_at: float = math.inf  # when its steps are written; infinity: it has none, or they are
    answer_bound: int = 0  # bytes that its answer may have, while its run or its end has them
    yield_at: int = 0  # ids at which it gives its place back; 0: nobody waits to whom it gives way

    @classmethod
    def of(cls, fed: FedJob, attempt: int, model: str, now: float) -> ActiveJob:
        left = fed.deadline_left
        deadline = math.inf if left is None else now + left
        return cls(fed.job, attempt, model, deadline, taken=fed.job.pos, durable=fed.job.pos)

    @property
    def id(self) -> bytes:
        return self.job.id

    @property
    def group(self) -> Group:
        return self.job.model, self.job.priority

    @property
    def suspect(self) -> bool:
        """Whether it was read as one that may have ended the broker; this start is counted."""
        return self.job.starts > ALONE_STARTS

    @property
    def proven(self) -> bool:
        """Whether ids are on the disk since it was started: its starts count from 0 again."""
        return self.durable > self.job.pos

    def move(self, event: str) -> None:
        """Change phase. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.phase].get(event)
        if following is None:
            raise ValueError(f"job {self.id.hex()} is {self.phase.value}: no {event!r} there")
        self.phase = following

    def fits(self, row: Delta) -> bool:
        """Whether output begins where what was taken ends, so that no id is lost or doubled."""
        return not row.ids or row.pos == self.taken

    def take(self, row: Delta) -> None:
        """Take output of its run."""
        if row.facts and self.job.facts is None and self.facts is None:
            self.facts = pack(row.facts)
        if not row.ids:
            self.text_before += row.text
            return
        size, text = size_of(row) + 4 * len(self.text_before), self.text_before + row.text
        self.text_before = ""
        self.steps.append(Step(text, row.ids, row.logprobs, size))
        self.size += size
        self.taken += count_of(row.ids)

    def plan_write(self, now: float, *, read: bool) -> None:
        """Have its steps written in time. `read`: somebody waits for them.

        What nobody reads is promised to nobody, so it may wait: most short jobs are then written
        once, with their end. A job that was started before without a durable id gets its first
        ones soon, so that starts are counted against it only if it computes nothing.
        """
        unproven = self.job.starts > 1 and not self.proven
        soon = read or unproven or self.size >= UNREAD_BYTES
        self.write_at = min(self.write_at, now + (WRITE_DELAY if soon else UNREAD_DELAY))

    def chunk(self) -> Chunk | None:
        """The first steps that are not on the disk, as far as a chunk may hold them."""
        if not self.steps:
            return None
        ids, texts, borders = bytearray(), list[str](), list[tuple[int, int]]()
        logprobs: list[Any] = []
        size = characters = 0
        for step in self.steps:
            size += step.size
            if borders and size > MAX_CHUNK:
                break
            ids += step.ids
            texts.append(step.text)
            characters += len(step.text)
            logprobs += step.logprobs or []
            borders.append((count_of(ids), characters))
        packed = pack(logprobs) if logprobs else b""
        return Chunk(self.durable, bytes(ids), "".join(texts), tuple(borders), packed)

    def next_operation(self, chunk: Chunk | None, *, patient: bool) -> Operation | None:
        """What has to be written next; the last ids go together with a Finish."""
        outcome, gen = self.outcome, self.job.gen
        if isinstance(outcome, NewGeneration):
            return outcome
        if isinstance(outcome, Finish) and (chunk is None or len(chunk.borders) == len(self.steps)):
            return replace(outcome, chunk=chunk, facts=self.facts, patient=patient)
        if chunk is not None:
            return Progress(self.id, gen, chunk, self.facts)
        return outcome

    def drop_steps(self) -> None:
        """Forget what is not on the disk: the store cannot hold it."""
        self.steps.clear()
        self.size = 0

    def written(self, chunk: Chunk) -> None:
        """A chunk is on the disk."""
        for _ in chunk.borders:
            self.size -= self.steps.popleft().size
        self.durable = chunk.end
        self.facts = None
