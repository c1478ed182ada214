"""Notices of ended jobs: which are posted now, and what follows from each try.

A notice is in the store from the commit that ends its job until it was delivered, so it is
delivered at least once, whatever ends in between. Of one job at most one is under way, the earliest
first. One that could not be delivered for as long as the settings say is given up, and is kept with
its reason until its job is forgotten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox, Post
from mlxpool.broker.store.operations import NoticeFailed, NoticeSent, Operation, ReadNotices
from mlxpool.broker.store.records import JobView, Notice, Notices, Refused, Result

MAX_UNDER_WAY = 64
FIRST_DELAY, MAX_DELAY = 5.0, 3600.0  # seconds until the next try; it doubles
JITTER = 0.25  # of a delay
RETRY_INTERVAL = 1.0  # seconds until a store that refused is asked again
MAX_CAUSE = 1000  # characters of a job's cause in its notice


class NoticeQueue:
    """Reads due notices from the store, has them posted, and writes what came of them."""

    def __init__(self, outbox: Outbox, give_up_after: Callable[[], float]) -> None:
        """`give_up_after`: seconds after a job's end until its notice is tried no more."""
        self._outbox = outbox
        self._give_up_after = give_up_after
        self._under_way: dict[int, Notice] = {}  # by end_seq
        self._reading = False
        self._came = False  # a job ended while the store was read
        self.due = math.inf  # when the store is to be read

    def came(self, job: JobView, now: float) -> None:
        """A job has ended."""
        if job.notify:
            self._came = self._reading
            self.due = min(self.due, now)

    def opened(self, now: float) -> None:
        """The store takes operations; what was under way before is posted again."""
        self._under_way.clear()
        self._reading, self.due = False, now

    def lost(self) -> None:
        """The store takes no operations."""
        self._reading, self.due = False, math.inf

    def read_due(self, now: float) -> None:
        """Read what is due, if it is time and there is room."""
        room = MAX_UNDER_WAY - len(self._under_way)
        if self._reading or now < self.due or room <= 0:
            return
        self._reading, self._came, self.due = True, False, math.inf
        read = ReadNotices(room, frozenset(self._under_way))
        self._outbox.store(read, self._read)

    def _read(self, result: Result, now: float) -> None:
        self._reading = False
        if not isinstance(result, Notices):
            self.due = min(self.due, now + RETRY_INTERVAL)
            return
        jobs = {notice.job.id for notice in self._under_way.values()}
        for notice in sorted(result.notices, key=lambda notice: notice.end_seq):
            if notice.job.id in jobs:
                continue  # it is read again when the one under way is done
            jobs.add(notice.job.id)
            self._under_way[notice.end_seq] = notice
            body = json.dumps(body_of(notice)).encode()
            self._outbox.post(Post(notice.end_seq, id_of(notice), notice.job.notify, body))
        if result.next is not None:
            self.due = min(self.due, now + max(0.0, result.next - result.now))
        if self._came:
            self.due = min(self.due, now)

    def on_posted(self, event: ev.Posted, now: float) -> None:
        """A try is over."""
        notice = self._under_way.pop(event.end_seq, None)
        if notice is None:
            return  # it was read again from a store that was opened anew
        operation: Operation
        if event.delivered:
            operation = NoticeSent(event.end_seq)
        else:
            operation = NoticeFailed(event.end_seq, self._delay(notice, event), event.why)
        self._under_way[event.end_seq] = notice  # until that is in the store
        self._outbox.store(operation, partial(self._noted, event.end_seq))

    def _noted(self, end_seq: int, result: Result, now: float) -> None:
        self._under_way.pop(end_seq, None)
        refused = isinstance(result, Refused)  # then it is posted once more
        self.due = min(self.due, now + RETRY_INTERVAL if refused else now)

    def _delay(self, notice: Notice, event: ev.Posted) -> float | None:
        """Seconds until the next try; None: there is none."""
        delay = max(retry_delay(notice.job.id, notice.tries), event.retry_after)
        age = notice.due - (notice.job.ended or notice.due)
        return None if event.final or age + delay > self._give_up_after() else delay


def retry_delay(job: bytes, tries: int) -> float:
    """Seconds until the next try after so many in vain, spread by the job's id."""
    usual = min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(tries, 16))
    share = hashlib.blake2b(job + b"%d" % tries, digest_size=2).digest()
    return usual * (1 + JITTER * int.from_bytes(share, "big") / 2**16)


def id_of(notice: Notice) -> str:
    """The same for every try of a notice, and of no other notice."""
    return f"job_{notice.job.id.hex()}_{notice.end_seq}"


def body_of(notice: Notice) -> dict[str, Any]:
    """What is posted: which job ended, and how. Its output is to be fetched."""
    job = notice.job
    ended = datetime.fromtimestamp(job.ended or 0.0, UTC)
    return {
        "type": "job.ended",
        "timestamp": ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": {
            "job": job.id.hex(),
            "key": job.scope.key,
            "tenant": job.scope.tenant,
            "model": job.model,
            "state": job.state.value,
            "gen": job.gen,
            "ids": job.pos,
            "end_seq": notice.end_seq,
            "cause": job.cause[:MAX_CAUSE],
        },
    }
