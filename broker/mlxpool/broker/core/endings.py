"""Ends what was cancelled, or had its time: deadlines, slow readers, silent links."""

from __future__ import annotations

from functools import partial

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import ForgetLink
from mlxpool.broker.core.bulk_endings import BulkEndings
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import STALL_GRACE, Link, State
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.common.errors import DeadlineExceeded, Unauthorized
from mlxpool.common.protocol.to_client import Fate

STALL_INTERVAL = 1.0  # seconds between two looks at whether somebody waits for a silent client


class Endings:
    def __init__(
        self,
        state: State,
        outbox: Outbox,
        ended: EndedRequests,
        delivery: Delivery,
        calls: Calls,
        bulk: BulkEndings,
    ) -> None:
        self._state = state
        self._outbox = outbox
        self._ended = ended
        self._delivery = delivery
        self._calls = calls
        self._bulk = bulk

    # ---- asked for ---------------------------------------------------------------------------

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
        """Where a stream or a call stands, as far as this owner may know."""
        fate, call = self._ended.fate(id, owner), self._calls.known(id, owner)
        if call is None or fate.state != "unknown":
            return fate
        return Fate("assigned" if call.epoch else "queued", 0)

    def on_revoked(self, event: ev.Revoked, now: float) -> None:
        """End what the owner has: the first ones now, before the edge ends its connections."""
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
        """Cancel the streams of a lost link that its client never sends again."""
        link = self._state.links.get(event.link)
        if link is not None and not link.lost:
            link.lost = True
            self._state.counters.links_lost += 1

            def plain(request: Request) -> bool:
                return _is_on(event.link, request) and not request.message.durable

            self._bulk.begin(link.ids, (), plain, now, then=partial(self._look_again, event.link))

    def on_link_timer(self, number: int, now: float) -> None:
        """Cancel what a link has that was silent for `client_grace`, and forget the link.

        Places in workers for which others wait are given back earlier, after `STALL_GRACE`.
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
            # The timer comes sooner, when nothing is left.
            following = now + max(STALL_INTERVAL, self._state.config.client_grace)
            self._state.timers.set(("link", number), following)
        else:
            del self._state.links[number]

    def _look_again(self, number: int, now: float) -> None:
        """Make a link's timer due when its streams and calls have ended: it may be forgotten."""
        if number in self._state.links:
            self._state.timers.set(("link", number), now)

    def _detach(self, number: int, link: Link) -> None:
        """It gets no terminal, and a new number: a client that wakes up sees that and retries."""
        link.lost = True
        self._outbox.add(ForgetLink(number))

    def _end_stalled(self, number: int, link: Link, now: float) -> None:
        """Cancel the streams of a silent client that have a place for which another client waits.

        A durable one goes on when its client sends it again, as after `client_grace`.
        """
        running = [r for r in self._bulk.running(link.ids) if _is_on(number, r)]
        wanted = {
            name
            for name in {request.model for request in running}
            if any(one.reader.link != number for one in self._state.registry.models[name].queue)
        }
        if wanted:
            if not link.lost:
                self._detach(number, link)

            def stalled(request: Request) -> bool:
                return _is_on(number, request) and request.model in wanted

            ids = [request.id for request in running]
            self._bulk.begin(ids, (), stalled, now, then=partial(self._look_again, number))

    # ---- time --------------------------------------------------------------------------------

    def on_late(self, event: ev.Late, now: float) -> None:
        """The time in which the broker did not run counts neither as silence nor as slowness."""
        for link in self._state.links.values():
            link.heard_at = min(now, link.heard_at + event.seconds)
        for request in self._state.requests.values():
            reader = request.reader
            if reader.blocked_since:
                reader.blocked_since = min(now, reader.blocked_since + event.seconds)

    def on_request_timer(self, request_id: bytes, now: float) -> None:
        """Fail a request that is past a deadline or whose reader is too slow; else wait on."""
        request = self._state.requests.get(request_id)
        if request is None:  # an earlier timer of the same wake ended it
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
        """The error of a request that is past a deadline; it says how far its model is loaded."""
        loaded = self._state.model_of(request).load_progress
        if loaded is None or request.state is not RequestState.QUEUED:
            return DeadlineExceeded(why)
        name = request.message.model
        return DeadlineExceeded(
            f"{why}: {name!r} is still loading, {loaded:.0%} of its weights are loaded",
            details={"model": name, "load_progress": round(loaded, 3)},
        )


def _is_on(link: int, request: Request) -> bool:
    """Whether the reader of a request has this link."""
    return request.reader.link == link
