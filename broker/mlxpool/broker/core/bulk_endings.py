"""Ends many streams and calls, a few in each event, so that the broker serves others in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import chain

from msgspec import Struct

from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.state import State
from mlxpool.broker.requests.call import Call
from mlxpool.broker.requests.request import Request
from mlxpool.common.errors import PoolError

MAX_ENDED = 64  # streams and calls of bulks that one event ends, of all bulks together
MAX_LOOKED_AT = 4096  # ids that one event looks at: most of a bulk may be none that ends
TIMER = "endings"  # key of the timer that is due while some are left


class Bulk(Struct, eq=False):
    """Streams and calls that end together, some in each event.

    `newest` is the number of the newest request that may be one of them: a later one may have the
    id of one that has ended. `ends` and `ends_call` say when the turn of a stream or of a call
    comes whether it ends: it may be another client's by then. `error` makes the error of one; None:
    they are cancelled. `then` is called when all have had their turn.
    """

    streams: deque[bytes]
    calls: deque[bytes]
    newest: int
    ends: Callable[[Request], bool]
    ends_call: Callable[[Call], bool]
    error: Callable[[Request | Call], PoolError] | None
    then: Callable[[float], None]


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
        self._may_end = MAX_ENDED  # in the current event

    def __len__(self) -> int:
        """How many bulks have streams or calls whose turn has not come."""
        return len(self._bulks)

    def open(self) -> None:
        """Begin an event: it may end MAX_ENDED."""
        self._may_end = MAX_ENDED

    def begin(
        self,
        streams: Collection[bytes],
        calls: Iterable[bytes],
        ends: Callable[[Request], bool],
        now: float,
        *,
        ends_call: Callable[[Call], bool] = lambda call: True,
        error: Callable[[Request | Call], PoolError] | None = None,
        then: Callable[[float], None] = lambda now: None,
    ) -> None:
        """End these from the next `Wake` on, by their ids; see Bulk.

        Streams that have a place in a worker are the first, calls the last.
        """
        running = (request.id for request in self.running(streams) if ends(request))
        work, newest = deque(chain(running, streams)), self._state.last_arrival
        self._bulks.append(Bulk(work, deque(calls), newest, ends, ends_call, error, then))
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
        """End the next ones, as many as the event may still end."""
        # Before any ends: an exception costs one stream, and the others end in later events.
        self._state.timers.set(TIMER, now)
        for _ in range(MAX_LOOKED_AT):
            if not self._bulks or not self._may_end:
                break
            bulk = self._bulks[0]
            self._may_end -= self._end_next(bulk, now)
            self._bulks.popleft()
            if bulk.streams or bulk.calls:
                self._bulks.append(bulk)
            else:
                bulk.then(now)
        if not self._bulks:
            self._state.timers.clear(TIMER)

    def _end_next(self, bulk: Bulk, now: float) -> bool:
        """End the next stream or call of a bulk, if it is still there; returns whether it was."""
        if bulk.streams:
            request = self._state.requests.get(bulk.streams.popleft())
            if request is None or request.arrival > bulk.newest or not bulk.ends(request):
                return False
            if bulk.error is None:
                self._delivery.cancel(request, now)
            else:
                self._delivery.fail(request, bulk.error(request), now)
            return True
        if bulk.calls:
            call = self._state.calls.get(bulk.calls.popleft())
            if call is None or not bulk.ends_call(call):
                return False
            error = None if bulk.error is None else bulk.error(call)
            self._calls.cancel(call, now, error)
            return True
        return False
