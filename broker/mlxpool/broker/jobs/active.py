"""The state of a running job, with the output that is not on the disk yet."""

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

WRITE_DELAY = 0.05  # seconds of output that one write gathers
UNREAD_DELAY = 1.0  # WRITE_DELAY of a job without a reader; a crash loses output, not the job
UNREAD_BYTES = 8 * 1024  # bytes of unread steps above which WRITE_DELAY applies


class Step(NamedTuple):
    """A piece of output that is stored whole: `text` is exactly the text of `ids`.

    `size`: a bound on the bytes that the piece takes in the store.
    """

    text: str
    ids: bytes
    logprobs: list[Any] | None
    size: int


class ActiveJob(Struct, eq=False):
    """A job between the commit that gave it to the core and the commit that ends or defers it.

    `durable` is the number of its token ids on the disk, `taken` the number of all its token ids so
    far. `steps` has the output from `durable` to `taken`. At most one store operation is under way:
    `writing`.
    """

    job: JobView
    attempt: int  # the number of its run in the core
    model: str  # the name under which the pool runs its model
    deadline: float = math.inf  # time on the core's clock
    taken: int = 0
    durable: int = 0
    steps: deque[Step] = field(default_factory=deque)
    size: int = 0  # bytes of `steps`
    text_before: str = ""  # text that came without ids; the next step's text begins with it
    facts: bytes | None = None  # the first worker's data about its model, until stored
    writing: Operation | None = None
    outcome: Operation | None = None  # ends or defers the job after its last ids
    phase: JobPhase = JobPhase.RUNNING  # the job's phase once `outcome` is on the disk
    ran: bool = True  # the core has a run of this job
    leaving: bool = False  # the run is over, `outcome` is not on the disk
    write_at: float = math.inf  # time of the next write; infinity: no steps, or being written
    answer_bound: int = 0  # bytes reserved in AnswerRoom: bound of the job's answer
    yield_at: int = 0  # ids at which the job gives its slot to others; 0: never

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
        """Returns whether this job may have ended the broker: it was started too often.

        It was started too often if its `starts`, the present start included, exceed ALONE_STARTS.
        """
        return self.job.starts > ALONE_STARTS

    @property
    def proven(self) -> bool:
        """Returns whether the present run of the job has put token ids on the disk.

        The store sets the job's count of starts to 0 with these ids.
        """
        return self.durable > self.job.pos

    def move(self, event: str) -> None:
        """Changes phase. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.phase].get(event)
        if following is None:
            raise ValueError(f"job {self.id.hex()} is {self.phase.value}: no {event!r} there")
        self.phase = following

    def fits(self, row: Delta) -> bool:
        """Returns whether the output follows the last taken id: no id is missing or repeated."""
        return not row.ids or row.pos == self.taken

    def take(self, row: Delta) -> None:
        """Adds output of the run to the steps."""
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
        """Sets the time of the next write of the job's output. `read`: a reader waits for it.

        Without a reader the write may wait: most short jobs are then written once, with their end.
        If the job was started before, its first ids are written soon, because ids on the disk set
        the job's count of starts back to 0.
        """
        unproven = self.job.starts > 1 and not self.proven
        soon = read or unproven or self.size >= UNREAD_BYTES
        self.write_at = min(self.write_at, now + (WRITE_DELAY if soon else UNREAD_DELAY))

    def chunk(self) -> Chunk | None:
        """Returns the first steps that are not on the disk, at most MAX_CHUNK bytes."""
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
        """Returns the next operation to write: some output, or the outcome of the job.

        The operation that ends a job (Finish) includes the last ids. `patient`: that operation is
        not urgent.
        """
        outcome, gen = self.outcome, self.job.gen
        if isinstance(outcome, NewGeneration):
            return outcome
        if isinstance(outcome, Finish) and (chunk is None or len(chunk.borders) == len(self.steps)):
            return replace(outcome, chunk=chunk, facts=self.facts, patient=patient)
        if chunk is not None:
            return Progress(self.id, gen, chunk, self.facts)
        return outcome

    def drop_steps(self) -> None:
        """Drops the steps that are not on the disk, because the store cannot hold them."""
        self.steps.clear()
        self.size = 0

    def written(self, chunk: Chunk) -> None:
        """Removes the steps of a chunk that is now on the disk."""
        for _ in chunk.borders:
            self.size -= self.steps.popleft().size
        self.durable = chunk.end
        self.facts = None
