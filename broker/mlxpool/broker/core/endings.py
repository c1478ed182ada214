"""Ends streams and calls after cancels, deadlines, slow readers and silent links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import ForgetLink, Outbox
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.state import STALL_GRACE, Link, State
from mlxpool.broker.requests.call import Call
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.common.errors import DeadlineExceeded, PoolError, Unauthorized
from mlxpool.common.protocol.to_client import Fate

MAX_ENDED = 64  # most streams and calls that one event ends, of all bulks together
MAX_LOOKED_AT = 4096  # most ids that one event checks; many checked ids may not end
BULK_TIMER = "endings"  # key of the timer that is set while ids are unchecked


class Bulk(Struct, eq=False):
    """A set of streams and calls that end for one reason, a few in each event.

    `newest`: the number of the newest request when the set was made. A later request with an id of
    the set does not end. Just before a stream or call would end, `ends` or `ends_call` returns
    whether it must still end, because its id may belong to another client by then. `error` returns
    the error for a stream or call; if `error` is None, all are cancelled. `then` is called after
    the last stream or call.
    """

    streams: deque[bytes]
    calls: deque[bytes]
    newest: int
    ends: Callable[[Request], bool]
    ends_call: Callable[[Call], bool]
    error: Callable[[Request | Call], PoolError] | None
    then: Callable[[float], None]


class BulkEndings:
    """Ends many streams and calls, a few in each event; other events are handled between.

    Bulks take turns, so that a small bulk does not wait for a large one.

    Until a stream or call is ended, it continues to run: a worker may complete it, another event
    may fail it, and its client may send it again on a new link.
    """

    def __init__(self, state: State, delivery: Delivery, calls: Calls) -> None:
        self._state = state
        self._delivery = delivery
        self._calls = calls
        self._bulks: deque[Bulk] = deque()
        self._may_end = MAX_ENDED  # streams and calls that the current event may still end

    def __len__(self) -> int:
        """Returns the number of bulks with streams or calls that were not yet examined."""
        return len(self._bulks)

    def open(self) -> None:
        """Begins an event, which may end at most MAX_ENDED streams and calls."""
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
        """Plans the end of streams and calls, given by their ids.

        They end from the next `Wake` on: first the streams that workers run, last the calls. The
        functions are fields of Bulk, which describes them.
        """
        running = (request.id for request in self.running(streams) if ends(request))
        work, newest = deque(chain(running, streams)), self._state.last_arrival
        self._bulks.append(Bulk(work, deque(calls), newest, ends, ends_call, error, then))
        self._state.timers.set(BULK_TIMER, now)

    def running(self, streams: Collection[bytes]) -> list[Request]:
        """Returns requests that workers run, in the order of arrival.

        The result has all running requests with ids in `streams`, and may have others. The search
        goes over `streams` or over the runs of workers, whichever are fewer. Therefore thousands of
        links with one stream each cost no more than one link with all streams.
        """
        requests, workers = self._state.requests, self._state.workers.values()
        ids: Iterable[bytes] = streams
        if len(streams) > sum(len(worker.leases) for worker in workers):
            ids = (id for worker in workers for id, _ in worker.leases)
        known = map(requests.get, ids)
        return sorted({r for r in known if r is not None and r.run.epoch}, key=lambda r: r.arrival)

    def end_some(self, now: float) -> None:
        """Ends the next streams and calls, until this event has ended MAX_ENDED of them."""
        # Set before any stream ends, so that after an exception later events end the other streams.
        self._state.timers.set(BULK_TIMER, now)
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
            self._state.timers.clear(BULK_TIMER)

    def _end_next(self, bulk: Bulk, now: float) -> bool:
        """Takes the next stream or call of a bulk, and ends it if it still has to end.

        Returns whether a stream or call was ended.
        """
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


STALL_INTERVAL = 1.0  # seconds between two checks for clients that wait for a silent client


class Endings(Struct, eq=False):
    _state: State
    _outbox: Outbox
    _ended: EndedRequests
    _delivery: Delivery
    _calls: Calls
    _bulk: BulkEndings

    # ---- cancels -----------------------------------------------------------------------------

    def on_cancel(self, event: ev.CancelRequest, now: float) -> None:
        state, bound = self._state, self._state.config.quota_cancels
        if event.link is not None:
            state.heard(event.link, now)
            fate = self._fate(event.id, event.owner)
            self._outbox.send(event.link, fate, event.id, pos=fate.pos)
        if event.owner is not None and bound:
            state.cancel_rates.spend(event.owner, 1, bound, now)
        request = state.requests.get(event.id)
        if request is not None and event.owner in (None, request.owner):
            self._delivery.cancel(request, now)
            self._ended.make_final(event.id)
        elif (call := self._calls.known(event.id, event.owner)) is not None:
            self._calls.cancel(call, now)

    def _fate(self, id: bytes, owner: str | None) -> Fate:
        """Returns the state of a stream or a call; `unknown` if another owner has it."""
        fate, call = self._ended.fate(id, owner), self._calls.known(id, owner)
        if call is None or fate.state != "unknown":
            return fate
        return Fate("assigned" if call.epoch else "queued", 0)

    def on_revoked(self, event: ev.Revoked, now: float) -> None:
        """Ends the streams and calls of an owner whose key was revoked.

        The first of them end now, before the owner's connections are closed.
        """
        state, owner = self._state, event.owner
        error = Unauthorized(f"{owner} was revoked: nothing of it is served any more")
        calls = [call.id for call in state.calls.values() if call.message.owner == owner]
        self._bulk.begin(
            state.requests,
            calls,
            lambda request: request.owner == owner,
            now,
            ends_call=lambda call: call.message.owner == owner,
            error=lambda _: error,
        )
        self._bulk.end_some(now)

    # ---- links -------------------------------------------------------------------------------

    def on_heard(self, event: ev.ClientHeard, now: float) -> None:
        self._state.heard(event.link, now)

    def on_link_lost(self, event: ev.LinkLost, now: float) -> None:
        """Cancels a lost link's streams without `durable`, because no client will retry them."""
        link = self._state.links.get(event.link)
        if link is not None and not link.lost:
            link.lost = True
            self._state.counters.links_lost += 1

            def plain(request: Request) -> bool:
                return _is_on(event.link, request) and not request.message.durable

            self._bulk.begin(link.ids, (), plain, now, then=partial(self._look_again, event.link))

    def on_link_timer(self, number: int, now: float) -> None:
        """Cancels the streams and calls of a link silent for `client_grace`, and forgets the link.

        If other clients wait, the link's running streams are cancelled after `STALL_GRACE`.
        """
        link = self._state.links.get(number)
        if link is None:
            return
        gone_at = link.heard_at + self._state.config.client_grace
        stalled_at = min(gone_at, link.heard_at + STALL_GRACE)
        if now < gone_at:
            if now >= stalled_at:
                self._end_stalled(number, link, now)
            following = stalled_at if now < stalled_at else min(gone_at, now + STALL_INTERVAL)
            self._state.timers.set(("link", number), following)
            return
        if link.ids or link.calls:
            self._detach(number, link)
            self._bulk.begin(
                link.ids,
                link.calls,
                partial(_is_on, number),
                now,
                ends_call=lambda call: call.link == number,
                then=partial(self._look_again, number),
            )
            # Once all streams and calls have ended, `_look_again` sets an earlier timer.
            following = now + max(STALL_INTERVAL, self._state.config.client_grace)
            self._state.timers.set(("link", number), following)
        else:
            del self._state.links[number]

    def _look_again(self, number: int, now: float) -> None:
        """Makes a link's timer due now, because the link's streams and calls have ended."""
        if number in self._state.links:
            self._state.timers.set(("link", number), now)

    def _detach(self, number: int, link: Link) -> None:
        """Marks a link as lost.

        If the client returns, it gets a new link. No terminal messages are sent on the new link, so
        the client retries its streams.
        """
        link.lost = True
        self._outbox.add(ForgetLink(number))

    def _end_stalled(self, number: int, link: Link, now: float) -> None:
        """Cancels the running streams of a silent client, if other clients wait for their models.

        A durable stream continues when its client retries it, as it does after `client_grace`.
        """
        running = [r for r in self._bulk.running(link.ids) if _is_on(number, r)]
        wanted_models = {
            name
            for name in {request.model for request in running}
            if any(other.reader.link != number for other in self._state.registry.models[name].queue)
        }
        if wanted_models:
            if not link.lost:
                self._detach(number, link)

            def stalled(request: Request) -> bool:
                return _is_on(number, request) and request.model in wanted_models

            ids = [request.id for request in running]
            self._bulk.begin(ids, (), stalled, now, then=partial(self._look_again, number))

    # ---- time --------------------------------------------------------------------------------

    def on_late(self, event: ev.Late, now: float) -> None:
        """Excludes a pause of the broker from the times for which clients were silent or slow."""
        for link in self._state.links.values():
            link.heard_at = min(now, link.heard_at + event.seconds)
        for request in self._state.requests.values():
            reader = request.reader
            if reader.blocked_since:
                reader.blocked_since = min(now, reader.blocked_since + event.seconds)

    def on_request_timer(self, request_id: bytes, now: float) -> None:
        """Fails a request if a deadline has passed or its reader is too slow.

        Otherwise sets the request's timer to its next deadline.
        """
        request = self._state.requests.get(request_id)
        if request is None:  # an earlier timer of this wake ended the request
            return
        waited, since = now - request.accepted_at, request.reader.blocked_since
        if now >= request.deadline:
            limit = request.deadline - request.accepted_at
            why = f"not finished after {limit:.3f} s (deadline_ms), {request.run.taken} tokens done"
        elif now >= request.queue_deadline:
            why = f"no worker was free after {waited:.3f} s (queue_ms)"
        elif now >= request.first_token_deadline:
            why = f"no token came after {waited:.3f} s (first_token_ms)"
        else:
            if since and now >= since + self._state.config.ack_grace:
                self._delivery.fail_slow(request, f"no ack for {now - since:.0f} s", now)
            else:
                self._delivery.set_timer(request)
            return
        self._delivery.fail(request, self._late(request, why), now)

    def _late(self, request: Request, why: str) -> DeadlineExceeded:
        """Returns the error of a request past a deadline, with the load progress of the model."""
        loaded = self._state.model_of(request).load_progress
        if loaded is None or request.state is not RequestState.QUEUED:
            return DeadlineExceeded(why)
        name = request.message.model
        return DeadlineExceeded(
            f"{why}: {name!r} is still loading, {loaded:.0%} of its weights are loaded",
            details={"model": name, "load_progress": round(loaded, 3)},
        )


def _is_on(link: int, request: Request) -> bool:
    """Returns whether the client that reads the stream of a request uses this link."""
    return request.reader.link == link
