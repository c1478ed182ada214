"""Readers of jobs: clients that get a job's output before, during and after its run.

A job has at most MAX_READERS, and each may begin at any token id. A reader keeps no output. It is
sent chunks that have just become durable, and pages of the store, one at a time. A reader that
acknowledges too slowly is ended; the other readers are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.answers import name_of, restarted, store_error, terminal_of, unknown
from mlxpool.broker.jobs.job_states import phase_of
from mlxpool.broker.store.operations import FetchPage
from mlxpool.broker.store.records import (
    ENDED,
    Chunk,
    JobRestarted,
    JobView,
    KeyGone,
    Page,
    Refused,
    Result,
    Scope,
)
from mlxpool.common.errors import BadRequest, DuplicateId, Gone, OverQuota, PoolError, SlowConsumer
from mlxpool.common.protocol.deltas import Usage
from mlxpool.common.protocol.frames import unpack
from mlxpool.common.protocol.kept.job_messages import Fetch, JobAccepted
from mlxpool.common.protocol.to_client import Done, Failed, Fate, StreamDelta

MAX_READERS = 64  # most readers of one job
PAGE_BYTES = 64 * 1024
RETRIED = ((0, 0),)  # a step border (see Chunk) that marks a failure and a retry of the job
LATER = frozenset({"store_busy", "store_closed"})  # refusals after which a page is read again

ReaderKey = tuple[int, bytes]  # link, id of the reading


class Reader(Struct, eq=False):
    """A client's reading of a job. `sent` and `acked` count token ids from the start of the job."""

    link: int
    id: bytes
    attempt: int
    owner: str
    fetch: Fetch
    job: bytes = b""  # b"" until the job is found
    gen: int = 0
    sent: int = 0
    acked: int = 0
    told: bool = False  # `accepted` was sent
    began: bool = False  # ids were sent: the client has `sent` ids
    reading: bool = False  # a read of a page is under way
    behind: bool = True  # the store may have output that was not sent yet
    blocked_since: float = math.inf  # time at which its window became full
    known: JobView | None = None  # the job at its last read

    @property
    def open(self) -> bool:
        """Returns whether the reader's flow-control window has room for more ids."""
        return self.sent - self.acked < self.fetch.window


class Readers:
    """Sends the output of jobs to the clients that read it, and owns every Reader."""

    def __init__(
        self,
        outbox: Outbox,
        running: Container[bytes],
        on_begun: Callable[[bytes, float], None],
    ) -> None:
        """`running`: the ids of jobs that run. `on_begun` gets each job whose reading begins."""
        self.all: dict[ReaderKey, Reader] = {}
        self._outbox = outbox
        self._running = running
        self._on_begun = on_begun
        self._of_job: dict[bytes, dict[ReaderKey, Reader]] = {}

    # ---- what clients do -----------------------------------------------------------------------

    def fetch(
        self, link: int, owner: str, id: bytes, attempt: int, fetch: Fetch, now: float
    ) -> None:
        """Begins to send a job's output to a client.

        A repeated request replaces the earlier one: the client has a new connection, or continues
        from another token id.
        """
        for reader in [reader for reader in self.all.values() if reader.id == id]:
            if reader.owner != owner:
                error = DuplicateId(f"the id {id.hex()} is that of another reading")
                self._outbox.send(link, Failed.about(error, id), None, attempt)
                return
            if attempt < reader.attempt:
                return
            self._remove(reader)
        reader = Reader(link, id, attempt, owner, fetch, sent=fetch.start, acked=fetch.start)
        self.all[(link, id)] = reader
        self._read(reader, now)

    def acknowledged(self, link: int, id: bytes, count: int, now: float) -> bool:
        """Records that a client has read `count` ids. Returns whether the reading exists."""
        reader = self.all.get((link, id))
        if reader is None:
            return False
        if reader.acked < count <= reader.sent:
            reader.acked, reader.blocked_since = count, math.inf
            self._go_on(reader, now)
        return True

    def leave(self, link: int, owner: str, id: bytes) -> None:
        """Ends a reading at the request of its owner."""
        for reader in [
            reader for reader in self.all.values() if (reader.id, reader.owner) == (id, owner)
        ]:
            self._outbox.send(link, Fate("streaming", reader.sent), id, pos=reader.sent)
            usage = Usage(completion_tokens=reader.sent)
            self._end(reader, Done("cancelled", "", usage.body()))

    def has(self, id: bytes, owner: str) -> bool:
        """Returns whether this owner has a request with this id that reads a job."""
        return any((reader.id, reader.owner) == (id, owner) for reader in self.all.values())

    def reads(self, job: bytes) -> bool:
        """Returns whether anybody reads this job."""
        return job in self._of_job

    def drop_silent(self, known: Callable[[int], bool]) -> None:
        """Forgets the readings of connections that were silent for too long.

        A suspended client gets a new link later, and sends its request again.
        """
        silent = [reader for reader in self.all.values() if not known(reader.link)]
        for reader in silent:
            self._remove(reader)
        for link in dict.fromkeys(reader.link for reader in silent):
            self._outbox.forget(link)

    def read_again(self, now: float) -> None:
        """Asks the store again for the pages of output that it could not return."""
        for reader in list(self.all.values()):
            self._go_on(reader, now)

    def read_all(self, now: float) -> None:
        """Sends all readers the output or ends that they lack, because the store was opened.

        The store may have been lost before it reported the commits of this output.
        """
        for reader in list(self.all.values()):
            reader.behind = True
            self._go_on(reader, now)

    def end_all(self, error: PoolError) -> None:
        """Ends all readings with `error`."""
        for reader in list(self.all.values()):
            self._fail(reader, error)

    def end_slow(self, grace: float, now: float) -> None:
        """Ends readers whose flow-control window was full for `grace` seconds without an ack."""
        for reader in list(self.all.values()):
            if now - reader.blocked_since >= grace:
                why = f"no ack for {now - reader.blocked_since:.0f} s with a full window of"
                error = SlowConsumer(f"{why} {reader.fetch.window} ids; the job goes on")
                self._fail(reader, error)

    # ---- what jobs do --------------------------------------------------------------------------

    def chunk_durable(
        self, job: bytes, gen: int, chunk: Chunk, facts: bytes | None, now: float
    ) -> None:
        """Sends a new durable chunk to readers that have all output before it.

        `facts`: the first worker's data about its model, if known. Readers that began before this
        worker reported the data get them here.
        """
        for reader in list(self._of_job.get(job, {}).values()):
            if reader.gen == gen and chunk.end <= reader.sent:
                continue
            ready = reader.gen == gen and not reader.reading and not reader.behind
            if facts is not None and reader.known is not None and reader.known.facts is None:
                reader.known = replace(reader.known, facts=facts)
            if ready and reader.open and reader.sent == chunk.pos:
                self._send(reader, chunk, now)
            else:
                reader.behind = True
                self._go_on(reader, now)

    def job_changed(self, job: JobView, now: float) -> None:
        """Handles a job that ended, waits again, or began a new generation."""
        for reader in list(self._of_job.get(job.id, {}).values()):
            reader.known, reader.behind = job, True
            self._go_on(reader, now)

    # ---- pages ---------------------------------------------------------------------------------

    def _go_on(self, reader: Reader, now: float) -> None:
        if not reader.open:
            if math.isinf(reader.blocked_since):
                reader.blocked_since = now
        elif reader.behind and not reader.reading:
            self._read(reader, now)

    def _read(self, reader: Reader, now: float) -> None:
        reader.reading, reader.behind = True, False
        name = reader.job or name_of(reader.owner, reader.fetch.name)
        exact = reader.fetch.start > 0 or reader.fetch.steps
        knows_gen = reader.began or (reader.told and exact)
        gen = reader.gen if knows_gen else reader.fetch.gen
        page = FetchPage(name, reader.sent, gen, PAGE_BYTES)
        self._outbox.store(page, partial(self._page, reader))

    def _page(self, reader: Reader, result: Result, now: float) -> None:
        if self.all.get((reader.link, reader.id)) is not reader:
            return  # the reader left
        reader.reading = False
        if isinstance(result, Refused) and result.code in LATER:
            reader.behind = True
            return
        if not isinstance(result, Page) or not _may_read(reader, result.job.scope):
            self._fail(reader, _page_error(reader, result))
            return
        job = reader.known = result.job
        reader.gen = job.gen
        if not reader.told and not self._begin(reader, job, now):
            return
        if job.state in ENDED and reader.sent > job.pos:
            what = f"from is {reader.fetch.start}, the job has ended with {job.pos} ids"
            self._fail(reader, BadRequest(f"{what}; fetch from id {job.pos} or lower"))
            return
        for chunk in result.chunks:
            if chunk.end > reader.sent:
                self._send(reader, chunk, now)
        if reader.sent < job.pos:
            reader.behind = True
        elif job.state in ENDED:
            self._tell_retries(reader, job)
            self._end(reader, terminal_of(job.end, result.answer))
            return
        self._go_on(reader, now)

    def _begin(self, reader: Reader, job: JobView, now: float) -> bool:
        """Begins to send a job to a reader, with the answer that the request is accepted.

        Returns False, after an error to the reader, if the job has too many readers.
        """
        of_job = self._of_job.setdefault(job.id, {})
        if len(of_job) >= MAX_READERS:
            why = f"the job has {MAX_READERS} readers, which is the most"
            self._fail(reader, OverQuota(why, retry_after_ms=5000))
            return False
        reader.job, reader.told = job.id, True
        of_job[(reader.link, reader.id)] = reader
        phase = phase_of(job.state, runs=job.id in self._running)
        accepted = JobAccepted(
            self._outbox.boot, reader.link, job.id, job.scope.key, job.gen, job.seed, phase.value
        )
        self._outbox.send(reader.link, accepted, reader.id, reader.attempt, reader.sent)
        self._on_begun(job.id, now)
        return True

    def _send(self, reader: Reader, chunk: Chunk, now: float) -> None:
        logprobs = unpack(chunk.logprobs) if chunk.logprobs else []
        delta = StreamDelta(chunk.pos, [chunk.text], bytearray(chunk.ids), logprobs)
        if reader.fetch.steps:
            # A reader with all ids up to a retry has received the end that the retry undid, so the
            # retry's mark begins the next chunk. `known` includes the retry, because `known` was
            # read before the ids after the retry.
            retries = 0 if reader.known is None else reader.known.retries_at(chunk.pos)
            delta.steps = retries * RETRIED + chunk.borders
        facts = None if reader.known is None else reader.known.facts
        if facts is not None and not reader.began:
            delta.facts = unpack(facts)
        if not reader.began:
            reader.acked = chunk.pos
        reader.began, reader.sent = True, chunk.end
        self._outbox.send(reader.link, delta, reader.id, reader.attempt, chunk.pos)

    def _tell_retries(self, reader: Reader, job: JobView) -> None:
        """Sends the number of the job's retries after its last id, if the reader requested steps.

        The retries are sent in a delta without ids, before the job's end.
        """
        retries = job.retries_at(reader.sent)
        if reader.fetch.steps and retries:
            delta = StreamDelta(reader.sent, steps=retries * RETRIED)
            self._outbox.send(reader.link, delta, reader.id, reader.attempt, reader.sent)

    # ---- ends ----------------------------------------------------------------------------------

    def _end(self, reader: Reader, terminal: Done | Failed) -> None:
        self._outbox.send(reader.link, terminal, reader.id, reader.attempt, reader.sent)
        self._remove(reader)

    def _fail(self, reader: Reader, error: PoolError) -> None:
        self._outbox.fail(reader.link, error, reader.id, reader.attempt, reader.sent)
        self._remove(reader)

    def _remove(self, reader: Reader) -> None:
        del self.all[(reader.link, reader.id)]
        of_job = self._of_job.get(reader.job)
        if of_job is not None:
            of_job.pop((reader.link, reader.id), None)
            if not of_job:
                del self._of_job[reader.job]


def _may_read(reader: Reader, scope: Scope | None) -> bool:
    """Returns whether the job belongs to the reader's owner and tenant.

    The check is needed because a job id finds jobs of all owners.
    """
    mine = (reader.owner, reader.fetch.name.tenant)
    return scope is not None and (scope.owner, scope.tenant) == mine


def _page_error(reader: Reader, result: Result) -> PoolError:
    """Returns the error of a reading whose page the store could not return."""
    if isinstance(result, JobRestarted) and _may_read(reader, result.job.scope):
        if (reader.fetch.gen or 0) > result.job.gen:
            what = f"gen is {reader.fetch.gen}, the newest generation of the job is"
            return BadRequest(f"{what} {result.job.gen}; fetch that generation, or omit gen")
        return restarted(result.job)
    if isinstance(result, KeyGone) and _may_read(reader, result.scope):
        return Gone(f"the result of the job {reader.fetch.name} was deleted")
    if isinstance(result, Refused):
        return store_error(result)
    return unknown(reader.fetch.name)
