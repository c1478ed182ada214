"""The memory of ended requests: tombstones of ids, and quarantined request digests."""

from __future__ import annotations

from msgspec.structs import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.state import State
from mlxpool.broker.requests.request import Request, Tombstone
from mlxpool.common.errors import Poisoned
from mlxpool.common.protocol.to_client import Fate

MAX_TOMBSTONES = 10_000
TOMBSTONE_LIFE = 600.0  # seconds
MAX_QUARANTINED = 1_000


class EndedRequests:
    """Keeps tombstones of ended requests, and quarantined digests, bounded by number and time.

    The oldest entries are dropped first.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def add_tombstone(self, request: Request, now: float) -> None:
        tombstones = self._state.tombstones
        tombstones[request.id] = Tombstone(
            request.owner,
            request.digest,
            request.attempt,
            request.state,
            request.reader.sent,
            now + TOMBSTONE_LIFE,
        )
        self._state.timers.set("tombstones", next(iter(tombstones.values())).until)
        if len(tombstones) > MAX_TOMBSTONES:
            tombstones.popitem(last=False)

    def make_final(self, id: bytes) -> None:
        """Marks an ended request as ended by a command: no later attempt starts it again."""
        tombstones = self._state.tombstones
        tombstones[id] = replace(tombstones[id], final=True)

    def expire_tombstones(self, now: float) -> None:
        tombstones = self._state.tombstones
        while tombstones and next(iter(tombstones.values())).until <= now:
            tombstones.popitem(last=False)
        if tombstones:
            self._state.timers.set("tombstones", next(iter(tombstones.values())).until)

    def fate(self, request_id: bytes, owner: str | None = None) -> Fate:
        """Returns the state of a request and the number of ids that were sent to the client.

        If another owner has the request, returns `unknown`. If `owner` is None, requests of all
        owners are known.
        """
        live, tomb = self._state.requests.get(request_id), self._state.tombstones.get(request_id)
        if live is not None and owner in (None, live.owner):
            return Fate(live.state.value, live.reader.sent)
        if tomb is not None and owner in (None, tomb.owner):
            return Fate(tomb.state.value, tomb.pos)
        return Fate("unknown", 0)

    # ---- quarantine --------------------------------------------------------------------------

    def quarantine(self, digest: bytes, now: float) -> None:
        """Refuses requests with this digest for `poison_life` seconds."""
        self._quarantine(digest, now + self._state.config.poison_life)

    def on_quarantine(self, event: ev.Quarantine, now: float) -> None:
        """Refuses requests with this digest for `seconds`; 0 ends the quarantine."""
        if event.seconds > 0:
            self._quarantine(event.digest, now + event.seconds)
        else:
            self._state.quarantine.pop(event.digest, None)

    def _quarantine(self, digest: bytes, until: float) -> None:
        held = self._state.quarantine
        held.pop(digest, None)
        held[digest] = until
        self._state.timers.set("quarantine", next(iter(held.values())))
        if len(held) > MAX_QUARANTINED:
            held.popitem(last=False)

    def check_quarantine(self, digest: bytes) -> None:
        """Raises Poisoned if the digest is in quarantine."""
        if digest in self._state.quarantine:
            raise Poisoned(
                "this request ended two workers; it is refused for"
                f" {self._state.config.poison_life / 60:g} minutes"
            )

    def expire_quarantine(self, now: float) -> None:
        held = self._state.quarantine
        while held and next(iter(held.values())) <= now:
            held.popitem(last=False)
        if held:
            self._state.timers.set("quarantine", next(iter(held.values())))
