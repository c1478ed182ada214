"""The link's questions that wait for an answer. Asking twice does no harm, so nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxpool.client.retry import Pace, nth
from mlxpool.common.errors import DuplicateId, PoolError, from_body
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.frames import Message

ANSWERED_AT_ONCE = frozenset({kinds.MODELS, kinds.CANCEL})  # the others may wait for a model

OnReply = Callable[[Message | PoolError], None]
Send = Callable[[Sequence[bytes]], None]


@dataclass(eq=False, slots=True)
class Call:
    """`home` is the boot and link that it was sent to; zeros: not known yet."""

    kind: str
    parts: Sequence[bytes]
    replies: list[OnReply] = field(default_factory=list)
    home: tuple[int, int] = (0, 0)
    sendings: int = 0
    due: float = math.inf


class Calls:
    """Owned by the link's thread; times are those of `Watch.now`."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._home = (0, 0)
        self._open: dict[bytes, Call] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, ident: bytes | None) -> bool:
        return ident in self._open

    def ask(
        self,
        ident: bytes,
        kind: str,
        parts: Sequence[bytes],
        on_reply: OnReply,
        send: Send,
        now: float,
    ) -> None:
        """Send it; who asks the same again waits along."""
        call = self._open.setdefault(ident, Call(kind, parts))
        call.replies.append(on_reply)
        self._send(call, send, now)

    def forget(self, ident: bytes) -> None:
        """Nobody waits for it any more."""
        self._open.pop(ident, None)

    def answer(self, message: Message, now: float) -> None:
        """Hand the answer to those who wait for it."""
        ident = message.header.id or b""
        call = self._open[ident]
        answer = from_body(message.body) if message.kind == kinds.ERROR else message
        if isinstance(answer, DuplicateId) and call.sendings > 1:
            # An earlier sending is under way, but its answer goes to a connection that is no more.
            call.due = now + nth(self._pace.answer, call.sendings)
            return
        del self._open[ident]
        for reply in call.replies:
            reply(answer)

    def at_home(self, home: tuple[int, int], send: Send, now: float) -> None:
        """Boot and link were told; what was sent to others is lost."""
        self._home = home
        for call in self._open.values():
            if call.home not in ((0, 0), home):
                self._send(call, send, now)
            call.home = home

    def moved(self, send: Send, now: float) -> None:
        """The connection is a new one."""
        self._home = (0, 0)
        for call in self._open.values():
            self._send(call, send, now)

    def tick(self, send: Send, now: float) -> None:
        """Ask again what should have been answered."""
        for call in self._open.values():
            if now >= call.due:
                self._send(call, send, now)

    def fail(self, error: PoolError) -> None:
        """Nobody will answer."""
        calls, self._open = self._open, {}
        for call in calls.values():
            for reply in call.replies:
                reply(error)

    def _send(self, call: Call, send: Send, now: float) -> None:
        send(call.parts)
        call.home, call.due = self._home, math.inf
        if call.kind in ANSWERED_AT_ONCE:
            call.due = now + nth(self._pace.answer, call.sendings)
        call.sendings += 1
