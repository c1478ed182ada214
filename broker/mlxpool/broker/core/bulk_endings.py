"""Ends many streams and calls, a few in each event, so that the broker serves others in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.state import State
from mlxpool.broker.requests.request import Request
from mlxpool.common.errors import PoolError

MAX_ENDED = 64  # streams and calls that one event ends, of all bulks together
MAX_LOOKED_AT = 4096  # ids that one event looks at: most of a bulk may be none that ends
TIMER = "endings"  # key of the timer that is due while some are left


@dataclass(eq=False, slots=True)
class Bulk:
    """Streams and calls that end with one error; None: they are cancelled.

    `ends` says when the turn of a stream comes whether it ends: it may be another client's by then.
    `link`: the one on which all of them are or were; None: there is no such link.
    """

    streams: deque[bytes]
    calls: deque[bytes]
    ends: Callable[[Request], bool]
    link: int | None
    error: PoolError | None


class BulkEndings:
    """Bulks take turns, so that a small one does not wait for a large one.

    What is not ended yet goes on as before: a worker may end it, another event may fail it, and a
    client may send it again on a new link.
    """

    def __init__(self, state: State, delivery: Delivery, calls: Calls) -> None:
        self._state = state
        self._delivery = delivery
        self._calls = calls
        self._bulks: deque[Bulk] = deque()

    def begin(
        self,
        streams: Collection[bytes],
        calls: Iterable[bytes],
        ends: Callable[[Request], bool],
        now: float,
        *,
        link: int | None = None,
        error: PoolError | None = None,
    ) -> None:
        """End these from the next `Wake` on, by their ids: of the streams only those that `ends`.

        Those that have a place in a worker are the first. When all of a `link` have had their turn,
        the link's own timer is due: it may be forgotten.
        """
        running = (request.id for request in self.running(streams) if ends(request))
        work = deque(chain(running, streams))
        self._bulks.append(Bulk(work, deque(calls), ends, link, error))
        self._state.timers.set(TIMER, now)

    def running(self, streams: Collection[bytes]) -> list[Request]:
        """The requests that workers have, in the order of their arrival.

        All of those with the ids `streams` are among them, others may be: the fewer of the two are
        looked at, so that thousands of links with a stream each cost as little as one with all.
        """
        requests, workers = self._state.requests, self._state.workers.values()
        ids: Iterable[bytes] = streams
        if len(streams) > sum(len(worker.leases) for worker in workers):
            ids = (id for worker in workers for id, _ in worker.leases)
        known = map(requests.get, ids)
        return sorted({r for r in known if r is not None and r.run.epoch}, key=lambda r: r.arrival)

    def end_some(self, now: float) -> None:
        """End the next MAX_ENDED."""
        ended = 0
        for _ in range(MAX_LOOKED_AT):
            if not self._bulks or ended == MAX_ENDED:
                break
            bulk = self._bulks.popleft()
            ended += self._end_next(bulk, now)
            if bulk.streams or bulk.calls:
                self._bulks.append(bulk)
            elif bulk.link in self._state.links:
                self._state.timers.set(("link", bulk.link), now)
        if self._bulks:
            self._state.timers.set(TIMER, now)

    def _end_next(self, bulk: Bulk, now: float) -> bool:
        """End the next stream or call of a bulk, if it is still there; returns whether it was."""
        if bulk.streams:
            request = self._state.requests.get(bulk.streams.popleft())
            if request is None or not bulk.ends(request):
                return False
            if bulk.error is None:
                self._delivery.cancel(request, now)
            else:
                self._delivery.fail(request, bulk.error, now)
            return True
        if bulk.calls:
            call = self._state.calls.get(bulk.calls.popleft())
            if call is None or bulk.link not in (None, call.link):
                return False
            self._calls.cancel(call, now, bulk.error)
            return True
        return False
