"""A job store in memory, for tests of the manager: the same operations without a disk.

Operations wait in an inbox until `commit`. `crash` loses waiting operations, and results that the
manager has not read. Committed operations stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec.structs import replace

from mlxpool.broker.store import operations as op
from mlxpool.broker.store import records as rec
from mlxpool.broker.store.batch_operations import BatchList, ListBatches
from mlxpool.broker.store.notice_bodies import job_notice, origin_of
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import Chunk, JobState, JobView, Result, Scope

KEY_LIFE = 100.0


@dataclass
class Row:
    """One stored job."""

    job: JobView
    request: bytes
    blobs: tuple[bytes, ...]
    chunks: list[Chunk] = field(default_factory=list)
    priority: int = 0
    failures: list[rec.Failure] = field(default_factory=list)
    answer: tuple[bytes, ...] = ()


class StoreModel:
    """The store, with jobs by id.

    `clock` returns wall time; the store's time never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rows: dict[bytes, Row] = {}
        self.poisons: dict[bytes, float] = {}
        self.outbox: dict[int, rec.Notice] = {}
        self.inbox: list[Operation] = []
        self.results: list[tuple[Operation, Result]] = []
        self.ended_twice: list[bytes] = []
        self.damaged: str = ""  # the damage of every request that is read
        self.refusing: str = ""  # an error code with which every operation is refused
        self._clock = clock
        self._seen = 0.0
        self._seq = itertools.count(1)
        self._end_seq = itertools.count(1)

    def follow(self, clock: Callable[[], float]) -> None:
        """Uses the clock of another simulation from now on."""
        self._clock = clock

    @property
    def now(self) -> float:
        self._seen = max(self._seen, self._clock())
        return self._seen

    # ---- as the writer ---------------------------------------------------------------------------

    def offer(self, operation: Operation) -> None:
        self.inbox.append(operation)

    def commit(self, count: int | None = None) -> None:
        """Performs the next `count` operations of the inbox, by default all."""
        group = self.inbox[:count]
        del self.inbox[: len(group)]
        for operation in group:
            refused = rec.Refused(self.refusing, "refused by the test") if self.refusing else None
            self.results.append((operation, refused or self.perform(operation)))

    def take(self) -> list[tuple[Operation, Result]]:
        results, self.results = self.results, []
        return results

    def crash(self) -> None:
        self.inbox, self.results = [], []

    # ---- operations ------------------------------------------------------------------------------

    def perform(self, operation: Operation) -> Result:
        return self.HANDLERS[type(operation)](self, operation)

    def by_name(self, name: rec.Name) -> Row | None:
        if isinstance(name, bytes):
            return self.rows.get(name)
        return next((row for row in self.rows.values() if row.job.scope == name), None)

    def _submit(self, o: op.Submit) -> Result:
        known = self.by_name(o.scope)
        if known is not None:
            if known.job.state is JobState.GONE:
                return rec.KeyGone(known.job.id, self.now + KEY_LIFE)
            if known.job.digest != o.digest:
                return rec.DuplicateKey(known.job.id)
            return rec.Submitted(known.job, new=False)
        now = self.now
        job = JobView(
            next(self._seq), o.id, o.scope, o.digest, 0, o.kind, o.model, o.priority, o.seed, None,
            JobState.WAITING, 0, 0, 0, 0.0, now, max(now + o.delay, o.not_before),
            None if o.deadline is None else now + o.deadline, o.keep, None, None, 0, None, "",
            o.size, o.batch, o.line, o.label, o.notify,
        )  # fmt: skip
        self.rows[o.id] = Row(job, o.request, o.blobs)
        return rec.Submitted(job, new=True)

    def _feed(self, o: op.FeedNext) -> Result:
        now = self.now
        waiting = [
            row
            for row in self.rows.values()
            if row.job.state is JobState.WAITING
            and (row.job.model, row.job.priority) == (o.model, o.priority)
            and row.job.id not in o.held
            and row.job.scope.owner not in o.but_owners
        ]
        due = [row for row in waiting if row.job.due <= now]
        due = [row for row in due if o.min_starts <= row.job.starts < o.below_starts]
        due.sort(key=lambda row: (row.job.due, row.job.seq))
        owners = sorted({row.job.scope.owner for row in due})
        behind = [owner_ for owner_ in owners if owner_ > o.after_owner]
        turn = itertools.cycle(behind + [owner_ for owner_ in owners if owner_ <= o.after_owner])
        fed: list[rec.FedJob] = []
        last = o.after_owner
        while due and len(fed) < o.count:
            owner = next(turn)
            row = next((row for row in due if row.job.scope.owner == owner), None)
            if row is None:
                continue
            due.remove(row)
            last = owner
            row.job = replace(row.job, starts=row.job.starts + 1)
            left = None if row.job.deadline is None else row.job.deadline - now
            ids = b"".join(chunk.ids for chunk in row.chunks)
            fed.append(rec.FedJob(row.job, row.request, row.blobs, ids, left, self.damaged))
        later = [
            row.job.due for row in waiting if row.job.due > now and row.job.starts >= o.min_starts
        ]
        return rec.Fed(tuple(fed), last, min(later, default=None), now, more=bool(due))

    def _unfit(self, id: bytes, gen: int, chunk: Chunk | None) -> Result | None:
        row = self.rows.get(id)
        if row is None:
            return rec.UnknownName()
        if row.job.state is not JobState.WAITING or row.job.gen != gen:
            return rec.Fate(row.job)
        return rec.Fate(row.job) if chunk is not None and chunk.pos != row.job.pos else None

    def _append(self, row: Row, chunk: Chunk, facts: bytes | None) -> None:
        assert chunk.count and chunk.borders[-1] == (chunk.count, len(chunk.text))
        row.chunks.append(chunk)
        facts = row.job.facts if facts is None else facts
        row.job = replace(row.job, pos=chunk.end, starts=0, facts=facts)

    def _progress(self, o: op.Progress) -> Result:
        unfit = self._unfit(o.id, o.gen, o.chunk)
        if unfit is not None:
            return unfit
        row = self.rows[o.id]
        self._append(row, o.chunk, o.facts)
        return rec.Durable(o.id, o.gen, row.job.pos)

    def _end(self, row: Row, state: JobState, end: bytes, cause: str) -> Result:
        now = self.now
        if row.job.end_seq:
            self.ended_twice.append(row.job.id)
        row.job = replace(
            row.job,
            state=state,
            end=end,
            cause=cause,
            ended=now,
            end_seq=next(self._end_seq),
            forget=None if row.job.keep is None else now + row.job.keep,
        )
        if row.job.notify:
            job, number = row.job, row.job.end_seq
            self.outbox[number] = rec.Notice(
                number, "job", job.id, job.scope, job.notify, origin_of(job.notify), now, 0, now,
                "", None, job_notice(job),
            )  # fmt: skip
        return rec.Changed(row.job)

    def _finish(self, o: op.Finish) -> Result:
        unfit = self._unfit(o.id, o.gen, o.chunk)
        if unfit is not None:
            return unfit
        row = self.rows[o.id]
        if o.chunk is not None:
            self._append(row, o.chunk, o.facts)
        self._note(row, o.cause, o.stacks)
        if o.attempts is not None:
            row.job = replace(row.job, attempts=o.attempts)
        row.answer = o.answer
        return self._end(row, o.state, o.end, o.cause)

    def _note(self, row: Row, cause: str, stacks: str) -> None:
        if cause:
            number = len(row.failures) + 1
            row.failures.append(rec.Failure(number, self.now, cause, stacks))

    def _set_back(self, o: op.SetBack) -> Result:
        unfit = self._unfit(o.id, o.gen, None)
        if unfit is not None:
            return unfit
        row = self.rows[o.id]
        row.job = replace(row.job, charge=o.charge)
        self._note(row, o.cause, o.stacks)
        return rec.Done()

    def _defer(self, o: op.Defer) -> Result:
        unfit = self._unfit(o.id, o.gen, None)
        if unfit is not None:
            return unfit
        row = self.rows[o.id]
        starts = row.job.starts if o.starts is None else o.starts
        row.job = replace(
            row.job,
            due=self.now + o.delay,
            attempts=o.attempts,
            charge=o.charge,
            starts=starts,
            cause=o.cause,
        )
        self._note(row, o.cause, o.stacks)
        return rec.Changed(row.job)

    def _new_generation(self, o: op.NewGeneration) -> Result:
        unfit = self._unfit(o.id, o.gen, None)
        if unfit is not None:
            return unfit
        row = self.rows[o.id]
        row.chunks.clear()
        row.job = replace(row.job, gen=o.gen + 1, pos=0, facts=None, retried=())
        return rec.Changed(row.job)

    def _named(self, name: rec.Name, states: set[JobState]) -> Row | Result:
        row = self.by_name(name)
        if row is None:
            return rec.UnknownName()
        return row if row.job.state in states else rec.Fate(row.job)

    def _cancel(self, o: op.Cancel) -> Result:
        row = self._named(o.name, {JobState.WAITING})
        return self._end(row, JobState.CANCELLED, o.end, o.cause) if isinstance(row, Row) else row

    def _retry(self, o: op.Retry) -> Result:
        row = self._named(o.name, set(rec.RETRYABLE))
        if not isinstance(row, Row):
            return row
        self.poisons.pop(row.job.digest, None)
        self.outbox.pop(row.job.end_seq, None)
        job = row.job
        retried = {**dict(job.retried), job.pos: job.retries_at(job.pos) + 1}
        row.job = replace(
            job, state=JobState.WAITING, due=self.now, attempts=0, starts=0, charge=0.0,
            end=None, end_seq=0, ended=None, cause="", forget=None, deadline=None,
            retried=tuple(retried.items()),
        )  # fmt: skip
        return rec.Changed(row.job)

    def _release(self, o: op.Release) -> Result:
        row = self._named(o.name, set(rec.ENDED))
        if not isinstance(row, Row):
            return row
        row.chunks.clear()
        row.job = replace(row.job, state=JobState.GONE)
        return rec.Changed(row.job)

    def _sweep(self, o: op.Sweep) -> Result:
        now, expired, forgotten = self.now, list[JobView](), 0
        for row in self.rows.values():
            job = row.job
            if job.state is JobState.WAITING and job.id not in o.held:
                if job.deadline is not None and job.deadline <= now:
                    self._end(row, JobState.EXPIRED, o.expired_end, "deadline")
                    expired.append(row.job)
            elif job.forget is not None and job.forget <= now and job.state in rec.ENDED:
                row.chunks.clear()
                row.job = replace(job, state=JobState.GONE)
                forgotten += 1
        return rec.Swept(tuple(expired), forgotten, more=False, next=None)

    def _read(self, o: op.ReadJob) -> Result:
        row = self.by_name(o.name)
        return rec.UnknownName() if row is None else rec.Found(row.job)

    def _history(self, o: op.ReadHistory) -> Result:
        row = self.by_name(o.name)
        return rec.UnknownName() if row is None else rec.History(row.job, tuple(row.failures))

    def _page(self, o: op.FetchPage) -> Result:
        row = self.by_name(o.name)
        if row is None:
            return rec.UnknownName()
        if row.job.state is JobState.GONE:
            return rec.KeyGone(row.job.id, self.now + KEY_LIFE, row.job.scope)
        if o.gen is not None and o.gen != row.job.gen:
            return rec.JobRestarted(row.job)
        chunks, size = [], 0
        for chunk in row.chunks:
            if chunk.end > o.pos and size < o.max_bytes:
                cut = _from_border(chunk, o.pos) if chunk.pos < o.pos else chunk
                chunks.append(cut)
                size += cut.size
        whole = row.job.state in rec.ENDED and (chunks[-1].end if chunks else o.pos) >= row.job.pos
        return rec.Page(row.job, tuple(chunks), row.answer if whole else ())

    def _list(self, o: op.ListJobs) -> Result:
        rows = [row.job for row in self.rows.values() if self._of(row.job, o.owner, o.tenant)]
        states = o.states or tuple(set(JobState) - {JobState.GONE})
        jobs = [job for job in rows if job.state in states]
        jobs.sort(key=lambda job: -job.seq if o.reverse else job.seq)
        return rec.JobList(tuple(jobs[: o.count]), 0)

    def _list_ended(self, o: op.ListEnded) -> Result:
        rows = [row.job for row in self.rows.values() if self._of(row.job, o.owner, o.tenant)]
        jobs = [job for job in rows if job.end_seq > o.after]
        jobs.sort(key=lambda job: job.end_seq)
        return rec.JobList(tuple(jobs[: o.count]), 0)

    def _of(self, job: JobView, owner: str | None, tenant: str | None) -> bool:
        return owner in (None, job.scope.owner) and tenant in (None, job.scope.tenant)

    def _backlog(self, o: op.ReadBacklog) -> Result:
        groups: dict[tuple[str, int], list[tuple[float, int]]] = {}
        for row in self.rows.values():
            if row.job.state is JobState.WAITING:
                groups.setdefault((row.job.model, row.job.priority), []).append(
                    (row.job.due, row.job.starts)
                )
        waiting = tuple(
            (model, priority, len(jobs), min(due for due, _ in jobs), max(n for _, n in jobs))
            for (model, priority), jobs in groups.items()
        )
        return rec.Backlog(waiting, self.now)

    def _figures(self, o: op.ReadFigures) -> Result:
        counts: dict[JobState, int] = {}
        for row in self.rows.values():
            counts[row.job.state] = counts.get(row.job.state, 0) + 1
        return rec.StoreFigures(tuple(counts.items()), 0, 0, 0, 0, 0)

    def _set_poison(self, o: op.SetPoison) -> Result:
        self.poisons[o.digest] = self.now + o.life
        return rec.Done()

    def _poisons(self, o: op.ReadPoisons) -> Result:
        now = self.now
        return rec.Poisons(tuple((digest, until - now) for digest, until in self.poisons.items()))

    # ---- notices ---------------------------------------------------------------------------------

    def _read_notices(self, o: op.ReadNotices) -> Result:
        now, loads = self.now, {load.origin: load for load in o.loads}
        open_ones = [notice for notice in self.outbox.values() if notice.given_up is None]
        due = [notice for notice in open_ones if notice.due <= now and notice.end_seq not in o.held]
        later = min((notice.due for notice in open_ones if notice.due > now), default=None)
        due.sort(key=lambda notice: (notice.due, notice.end_seq))
        queues: dict[str, list[rec.Notice]] = {}
        for notice in due:
            queue = queues.setdefault(notice.origin, [])
            load = loads.get(notice.origin)
            if len(queue) < (o.per_origin if load is None else load.room):
                queue.append(notice)
        order = sorted(
            queues,
            key=lambda origin: loads[origin].under_way if origin in loads else 0,
        )
        turns = itertools.zip_longest(*(queues[origin] for origin in order))
        notices = [notice for turn in turns for notice in turn if notice is not None]
        return rec.Notices(tuple(notices[: o.count]), later, now)

    def _notice_sent(self, o: op.NoticeSent) -> Result:
        self.outbox.pop(o.end_seq, None)
        return rec.Done()

    def _notice_failed(self, o: op.NoticeFailed) -> Result:
        notice, now = self.outbox.get(o.end_seq), self.now
        if notice is not None:
            given_up = now if o.delay is None else None
            due = now + (o.delay or 0.0)
            self.outbox[o.end_seq] = replace(
                notice, tries=notice.tries + 1, due=due, cause=o.cause, given_up=given_up
            )
        for number, notice in list(self.outbox.items()):
            late = now - notice.since > o.give_up_after and notice.given_up is None
            if notice.origin == o.unreachable and late:
                self.outbox[number] = replace(notice, cause=o.cause, given_up=now)
        return rec.Done()

    # ---- the state ---------------------------------------------------------------------------

    def job(self, key: str, owner: str = "uid:1", tenant: str = "") -> JobView:
        row = self.by_name(Scope(owner, tenant, key))
        assert row is not None, f"no job {key}"
        return row.job

    def output(self, id: bytes) -> tuple[bytes, str]:
        """Returns the stored ids and text of a job."""
        chunks = self.rows[id].chunks
        return b"".join(chunk.ids for chunk in chunks), "".join(chunk.text for chunk in chunks)

    HANDLERS: ClassVar[dict[type, Callable[[StoreModel, Any], Result]]] = {
        op.Submit: _submit,
        op.FeedNext: _feed,
        op.Progress: _progress,
        op.Finish: _finish,
        op.Defer: _defer,
        op.SetBack: _set_back,
        op.ReadHistory: _history,
        op.ReadNotices: _read_notices,
        op.NoticeSent: _notice_sent,
        op.NoticeFailed: _notice_failed,
        op.NewGeneration: _new_generation,
        op.Cancel: _cancel,
        op.Retry: _retry,
        op.Release: _release,
        op.Sweep: _sweep,
        op.ReadJob: _read,
        op.FetchPage: _page,
        op.ListJobs: _list,
        op.ListEnded: _list_ended,
        op.ReadBacklog: _backlog,
        op.ReadFigures: _figures,
        ListBatches: lambda store, asked: BatchList(()),  # tests of batches use a real store
        op.SetPoison: _set_poison,
        op.ReadPoisons: _poisons,
    }


def _from_border(chunk: Chunk, pos: int) -> Chunk:
    """Returns the part of a chunk that begins at its last step boundary at or before `pos`."""
    cut = max((b for b in chunk.borders if chunk.pos + b[0] <= pos), default=(0, 0))
    borders = tuple((n - cut[0], c - cut[1]) for n, c in chunk.borders if n > cut[0])
    return Chunk(chunk.pos + cut[0], chunk.ids[4 * cut[0] :], chunk.text[cut[1] :], borders)
