"""A job that runs, with the output of its run that is not on the disk yet."""

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

WRITE_DELAY = 0.05  # seconds for which steps are gathered before a write
UNREAD_DELAY = 1.0  # the same for a job without a reader; after a crash it computes these again
UNREAD_BYTES = 8 * 1024  # bytes of unread steps from which on WRITE_DELAY applies


class Step(NamedTuple):
    """Output that is never divided: `text` is exactly the text of `ids`."""

    text: str
    ids: bytes
    logprobs: list[Any] | None
    size: int


class ActiveJob(Struct, eq=False):
    """A job between the commit that gave it to the core and the commit that ends or defers it.

    `durable` ids are on the disk, `taken` ids have come from its run. `steps` has the output
    between the two, in order. A job has at most one operation under way: `writing`.
    """

    job: JobView
    attempt: int  # the number of its run in the core
    model: str  # the name under which its model runs
    deadline: float = math.inf  # on the core's clock
    taken: int = 0
    durable: int = 0
    steps: deque[Step] = field(default_factory=deque)
    size: int = 0  # bytes of `steps`
    text_before: str = ""  # text that came without ids; the next step's text begins with it
    facts: bytes | None = None  # the facts of its first worker, until they are on the disk
    writing: Operation | None = None
    outcome: Operation | None = None  # the operation that ends or defers it, after its last ids
    phase: JobPhase = JobPhase.RUNNING  # its phase once `outcome` is on the disk
    ran: bool = True  # the core has its run
    leaving: bool = False  # its run is over and `outcome` is not on the disk
    write_at: float = math.inf  # time of the next write; infinity: no steps, or being written
    answer_bound: int = 0  # most bytes of its answer, reserved in AnswerRoom
    yield_at: int = 0  # number of ids at which it yields its place; 0: it need not

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
        """Returns whether it may have ended the broker; `starts` counts this start too."""
        return self.job.starts > ALONE_STARTS

    @property
    def proven(self) -> bool:
        """Returns whether this start put ids on the disk: its starts then count from 0 again."""
        return self.durable > self.job.pos

    def move(self, event: str) -> None:
        """Change phase. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.phase].get(event)
        if following is None:
            raise ValueError(f"job {self.id.hex()} is {self.phase.value}: no {event!r} there")
        self.phase = following

    def fits(self, row: Delta) -> bool:
        """Returns whether output begins after the last taken id: no id is lost or doubled."""
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
        """Set the time of the next write of the job's output. `read`: a reader waits for it.

        Without a reader the write may wait: most short jobs are then written once, with their end.
        If the job was started before and this start has no ids on the disk yet, it is written soon:
        ids on the disk set the job's count of starts back to 0.
        """
        unproven = self.job.starts > 1 and not self.proven
        soon = read or unproven or self.size >= UNREAD_BYTES
        self.write_at = min(self.write_at, now + (WRITE_DELAY if soon else UNREAD_DELAY))

    def chunk(self) -> Chunk | None:
        """Returns the first steps that are not on the disk, up to MAX_CHUNK bytes."""
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
        """Returns the next operation to write. A Finish includes the last ids."""
        outcome, gen = self.outcome, self.job.gen
        if isinstance(outcome, NewGeneration):
            return outcome
        if isinstance(outcome, Finish) and (chunk is None or len(chunk.borders) == len(self.steps)):
            return replace(outcome, chunk=chunk, facts=self.facts, patient=patient)
        if chunk is not None:
            return Progress(self.id, gen, chunk, self.facts)
        return outcome

    def drop_steps(self) -> None:
        """Forget the steps that are not on the disk: the store cannot hold them."""
        self.steps.clear()
        self.size = 0

    def written(self, chunk: Chunk) -> None:
        """Forget the steps of a chunk that is on the disk now."""
        for _ in chunk.borders:
            self.size -= self.steps.popleft().size
        self.durable = chunk.end
        self.facts = None
