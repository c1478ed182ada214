"""Calls: requests with one answer. A repeated call does no harm, so lost calls are retried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from mlxpool.client.retry import UNKNOWN_PEER, Pace, Peer, nth
from mlxpool.common.errors import DuplicateId, PoolError, from_body
from mlxpool.common.protocol import from_client, to_client
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.kept import kept_questions
from mlxpool.common.protocol.kept.batch_messages import WaitForProgress

# Kinds of calls that need no model.
ANSWERED_AT_ONCE = frozenset(
    {
        from_client.ListModels.kind,
        from_client.Keep.kind,
        from_client.Cancel.kind,
        *kept_questions.KINDS,
    }
) - {WaitForProgress.kind}
CANCELLABLE = from_client.CALLS

OnReply = Callable[[Message | PoolError], None]
Send = Callable[[Sequence[bytes]], None]


class Call(Struct, eq=False):
    """One call. `peer` is the broker connection that got it; `due` is the time of its next retry.

    `owner` is the owner on whose behalf the call is sent; "" means the client itself.
    """

    kind: str
    parts: Sequence[bytes]
    owner: str = ""
    replies: list[OnReply] = field(default_factory=list)
    peer: Peer = UNKNOWN_PEER
    sendings: int = 0
    due: float = math.inf


class Calls:
    """The open calls of a connection. Only the connection's thread uses them.

    Times are those of the clock `SilenceTimer.now`.
    """

    def __init__(self, pace: Pace, send: Send) -> None:
        self._pace = pace
        self._transmit = send
        self._peer = UNKNOWN_PEER
        self._open: dict[bytes, Call] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ident: bytes | None) -> bool:
        return ident in self._open

    @property
    def peer_known(self) -> bool:
        """True if the broker has sent its boot number and its number of this connection."""
        return self._peer != UNKNOWN_PEER

    def ask(self, ident: bytes, call: Call, on_reply: OnReply, now: float) -> None:
        """Sends a call. A second call with the same id gets the same answer."""
        call = self._open.setdefault(ident, call)
        call.replies.append(on_reply)
        self._send(call, now)

    def forget(self, ident: bytes) -> Call | None:
        """Forgets a call whose caller no longer waits.

        Returns the call if the broker has to be asked to cancel it, else None.
        """
        call = self._open.pop(ident, None)
        return call if call is not None and call.kind in CANCELLABLE else None

    def cancellable(self) -> list[tuple[bytes, Call]]:
        """Returns the open calls that a worker may be computing, with their ids."""
        return [(ident, call) for ident, call in self._open.items() if call.kind in CANCELLABLE]

    def answer(self, message: Message, now: float) -> None:
        """Gives an answer to the callers that wait for it."""
        ident = message.header.id or b""
        call = self._open[ident]
        answer = from_body(message.body) if message.kind == to_client.Failed.kind else message
        if isinstance(answer, DuplicateId) and call.sendings > 1:
            # The broker still has an earlier attempt, and will answer it on a lost connection. So
            # the call is sent again later.
            call.due = now + nth(self._pace.answer, call.sendings)
            return
        del self._open[ident]
        for reply in call.replies:
            reply(answer)

    def identified(self, peer: Peer, now: float) -> None:
        """Handles the broker's boot number and its number (link) of this connection.

        Calls that were sent to another broker process, or over another connection, are sent again.
        """
        self._peer = peer
        for call in self._open.values():
            if call.peer not in (UNKNOWN_PEER, peer):
                self._send(call, now)
            call.peer = peer

    def reconnected(self, now: float) -> None:
        """Notes that the client has replaced its connection."""
        self._peer = UNKNOWN_PEER
        for call in self._open.values():
            self._send(call, now)

    def tick(self, now: float) -> None:
        """Sends overdue calls again."""
        for call in self._open.values():
            if now >= call.due:
                self._send(call, now)

    def fail(self, error: PoolError) -> None:
        """Ends every call with an error."""
        calls, self._open = self._open, {}
        for call in calls.values():
            for reply in call.replies:
                reply(error)

    def _send(self, call: Call, now: float) -> None:
        self._transmit(call.parts)
        call.peer, call.due = self._peer, math.inf
        if call.kind in ANSWERED_AT_ONCE:
            call.due = now + nth(self._pace.answer, call.sendings)
        call.sendings += 1
