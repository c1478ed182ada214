"""Notices (webhook posts) of ended jobs and batches: when they are posted, and their results.

The commit that ends a job or batch also stores its notice, which stays in the store until it is
delivered. So it is delivered at least once, even if the broker ends in between. If a job or batch
has several notices, they are posted one after the other, the earliest first. A notice that cannot
be delivered within the time of the settings is given up. It is kept with the cause until its job or
batch is deleted.

No origin (scheme, host and port) delays the notices of another: each has at most PER_ORIGIN notices
under way. An unreachable origin is retried with a single notice, after growing pauses.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox, Post
from mlxpool.broker.store.notice_bodies import notice_id
from mlxpool.broker.store.operations import (
    NoticeFailed,
    NoticeSent,
    Operation,
    OriginLoad,
    ReadNotices,
)
from mlxpool.broker.store.records import Notice, Notices, Refused, Result

MAX_UNDER_WAY = 64  # most notices under way
PER_ORIGIN = 8  # most notices under way to one origin
FIRST_DELAY, MAX_DELAY = 5.0, 3600.0  # seconds until the first retry; doubled by each try
JITTER = 0.25  # largest random part of a delay, as a share
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0  # seconds until the first retry of an unreachable origin
RETRY_INTERVAL = 1.0  # seconds until the next read after a refusal of the store


class Try(Struct, frozen=True):
    """An attempt to post a notice. `age`: seconds since the notice's first attempt."""

    notice: Notice
    age: float


class Pause(Struct, frozen=True):
    """A pause in the posts to an origin, until the time `until`.

    `failures`: the number of consecutive failed tries.
    """

    failures: int
    until: float


class NoticeQueue:
    """Reads due notices from the store, has them posted, and writes the results."""

    def __init__(self, outbox: Outbox, give_up_after: Callable[[], float]) -> None:
        """`give_up_after` returns the seconds for which attempts to post a notice are repeated."""
        self._outbox = outbox
        self._give_up_after = give_up_after
        self._under_way: dict[int, Try] = {}  # by end_seq
        self._paused: dict[str, Pause] = {}  # unreachable origins
        self._reading = False
        self._came = False  # a job or batch ended during the read
        self._due = math.inf  # time of the next read of the store

    def came(self, url: str, now: float) -> None:
        """Schedules a read of the notice of an ended job or batch.

        Does nothing if the job or batch has no notice: `url` is then "".
        """
        if url:
            self._came = self._reading
            self._due = min(self._due, now)

    def opened(self, now: float) -> None:
        """Starts to read notices from the store. Notices that were under way are posted again."""
        self._under_way.clear()
        self._reading, self._due = False, now

    def lost(self) -> None:
        """Stops reading notices, because the store accepts no operations."""
        self._reading, self._due = False, math.inf

    # ---- posting ---------------------------------------------------------------------------------

    def next_read(self) -> float:
        """Returns the time of the next read of notices.

        Returns infinity while a read is under way, or MAX_UNDER_WAY notices are being posted.
        """
        waits = self._reading or len(self._under_way) >= MAX_UNDER_WAY
        return math.inf if waits else self._due

    def read_due(self, now: float) -> None:
        """Reads due notices, if a read is due and fewer than MAX_UNDER_WAY are being posted."""
        if now < self.next_read():
            return
        self._reading, self._came, self._due = True, False, math.inf
        room, held = MAX_UNDER_WAY - len(self._under_way), frozenset(self._under_way)
        self._outbox.store(ReadNotices(room, held, PER_ORIGIN, self._loads(now)), self._read)

    def _loads(self, now: float) -> tuple[OriginLoad, ...]:
        """Returns for each origin the number of notices under way, and how many may be added.

        Only origins that are paused or have a notice under way are included.
        """
        busy = Counter(attempt.notice.origin for attempt in self._under_way.values())
        loads = []
        for origin in sorted(busy.keys() | self._paused.keys()):
            pause = self._paused.get(origin)
            most = PER_ORIGIN if pause is None else int(pause.until <= now)
            loads.append(OriginLoad(origin, busy[origin], max(0, most - busy[origin])))
        return tuple(loads)

    def _read(self, result: Result, now: float) -> None:
        self._reading = False
        if not isinstance(result, Notices):
            self._due = min(self._due, now + RETRY_INTERVAL)
            return
        subjects = {attempt.notice.subject for attempt in self._under_way.values()}
        for notice in sorted(result.notices, key=lambda notice: notice.end_seq):
            if notice.subject in subjects:
                continue  # the notice is read again when the try under way has ended
            subjects.add(notice.subject)
            self._under_way[notice.end_seq] = Try(notice, result.now - notice.since)
            id = notice_id(notice.kind, notice.subject, notice.end_seq)
            self._outbox.post(Post(notice.end_seq, id, notice.url, notice.body))
        if result.next is not None:
            self._due = min(self._due, now + max(0.0, result.next - result.now))
        for pause in self._paused.values():
            if pause.until > now:
                self._due = min(self._due, pause.until)
        if self._came:
            self._due = min(self._due, now)

    # ---- results ---------------------------------------------------------------------------------

    def on_posted(self, event: ev.Posted, now: float) -> None:
        """Handles the result of an attempt to post a notice."""
        attempt = self._under_way.get(event.end_seq)
        if attempt is None:
            return  # the store was opened again: the notice is read and posted again
        origin = attempt.notice.origin
        if event.unreachable:
            failures = self._paused.get(origin, Pause(0, now)).failures
            self._paused[origin] = Pause(failures + 1, now + origin_pause(failures))
        else:
            self._paused.pop(origin, None)
        operation: Operation
        if event.delivered:
            operation = NoticeSent(event.end_seq)
        else:
            operation = NoticeFailed(
                event.end_seq,
                self._delay(attempt, event),
                event.why,
                origin if event.unreachable else "",
                self._give_up_after(),
            )
        self._outbox.store(operation, partial(self._noted, event.end_seq))

    def _noted(self, end_seq: int, result: Result, now: float) -> None:
        self._under_way.pop(end_seq, None)
        refused = isinstance(result, Refused)  # if refused, the notice is posted a second time
        self._due = min(self._due, now + RETRY_INTERVAL if refused else now)

    def _delay(self, attempt: Try, event: ev.Posted) -> float | None:
        """Returns the seconds until the next try; None if the notice is given up."""
        notice = attempt.notice
        delay = max(retry_delay(notice.subject, notice.tries), event.retry_after)
        return None if event.final or attempt.age + delay > self._give_up_after() else delay


def retry_delay(subject: bytes, tries: int) -> float:
    """Returns the seconds until the next try after `tries` failures.

    The jitter depends on `subject`.
    """
    usual = min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(tries, 16))
    share = hashlib.blake2b(subject + b"%d" % tries, digest_size=2).digest()
    return usual * (1 + JITTER * int.from_bytes(share, "big") / 2**16)


def origin_pause(failures: int) -> float:
    """Returns the seconds of an origin's pause after `failures` earlier failures."""
    return min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 16))
