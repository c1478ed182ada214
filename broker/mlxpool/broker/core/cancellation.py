"""Ends streams because somebody asked for it: their client, the admin, a revoked key."""

from __future__ import annotations

from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.links import Links
from mlxpool.broker.core.outbox import Outbox
from mlxpool.broker.core.state import State
from mlxpool.broker.interface import events as ev
from mlxpool.common.errors import Unauthorized


class Cancellation:
    def __init__(
        self,
        state: State,
        outbox: Outbox,
        links: Links,
        ended: EndedRequests,
        delivery: Delivery,
    ) -> None:
        self._state = state
        self._outbox = outbox
        self._links = links
        self._ended = ended
        self._delivery = delivery

    def on_cancel(self, event: ev.Cancel, now: float) -> None:
        state, bound = self._state, self._state.config.quota_cancels
        if event.link is not None:
            self._links.heard(event.link, now)
            fate = self._ended.fate(event.id, event.owner)
            self._outbox.send(event.link, fate, event.id, pos=fate.pos)
        if event.owner is not None and bound:
            state.cancel_rates.spend(event.owner, 1, bound, now)
        request = state.requests.get(event.id)
        if request is not None and event.owner in (None, request.owner):
            self._delivery.cancel(request, now)
            self._ended.make_final(event.id)

    def on_revoked(self, event: ev.Revoked, now: float) -> None:
        error = Unauthorized(f"{event.owner} was revoked: nothing of it is served any more")
        for request in list(self._state.requests.values()):
            if request.owner == event.owner:
                self._delivery.fail(request, error, now)
