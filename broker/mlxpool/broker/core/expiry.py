"""Ends what has had its time: deadlines of requests, readers without acks, silent links."""

from __future__ import annotations

from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import State
from mlxpool.broker.interface import events as ev
from mlxpool.broker.interface.actions import ForgetLink
from mlxpool.common.errors import DeadlineExceeded


class Expiry:
    def __init__(self, state: State, outbox: Outbox, delivery: Delivery) -> None:
        self._state = state
        self._outbox = outbox
        self._delivery = delivery

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
        self._delivery.fail(request, DeadlineExceeded(why), now)

    def on_link_timer(self, number: int, now: float) -> None:
        """Cancel the streams of a link that was silent for `client_grace`, and forget it."""
        link = self._state.links.get(number)
        if link is None:
            return
        silent_until = link.heard_at + self._state.config.client_grace
        if now < silent_until:
            self._state.timers.set(("link", number), silent_until)
            return
        if link.ids:
            # It gets no terminal, and a new number: a client that wakes up sees that and retries.
            link.lost = True
            self._outbox.add(ForgetLink(number))
        for request_id in sorted(link.ids):
            self._delivery.cancel(self._state.requests[request_id], now)
        del self._state.links[number]
