"""The connections of clients: when they were heard from, and which streams they have."""

from __future__ import annotations

from mlxpool.broker.core.state import Link, State
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests.request import Request


class Links:
    def __init__(self, state: State) -> None:
        self._state = state

    def heard(self, link: int, now: float) -> None:
        """A frame came on this link."""
        known = self._state.links.get(link)
        if known is None:
            self._state.links[link] = Link(now)
            self.watch(link, now)
        else:
            known.heard_at = now

    def watch(self, link: int, now: float) -> None:
        """Have its silence noticed when `client_grace` is over."""
        self._state.timers.set(("link", link), now + self._state.config.client_grace)

    def attach(self, request: Request) -> None:
        """The link of its reader has this stream."""
        self._state.links[request.reader.link].ids.add(request.id)

    def detach(self, request: Request) -> None:
        self._state.links[request.reader.link].ids.discard(request.id)

    def on_heard(self, event: ev.Heard, now: float) -> None:
        self.heard(event.link, now)

    def on_link_lost(self, event: ev.LinkLost, now: float) -> None:
        link = self._state.links.get(event.link)
        if link is not None and not link.lost:
            link.lost = True
            self._state.counters.links_lost += 1
