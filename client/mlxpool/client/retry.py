"""Decides when a stream is sent again, and when it is given up. Pure: time is an argument.

All times are those of `SilenceTimer.now`: seconds in which this process ran. Only deadlines are
real time; they are passed as `left`, the seconds until then.
"""

from __future__ import annotations

import math
from enum import Enum

from msgspec import Struct

from mlxpool.client.stream import Delta, Frame, StreamState
from mlxpool.common.errors import BrokerLost, Draining, DuplicateId, PoolError
from mlxpool.common.protocol.kept.job_messages import JobAccepted
from mlxpool.common.protocol.to_client import Accepted, Failed

BROKER_GRACE = 60.0  # seconds of silence after which the client ends its streams itself
CONNECT_GRACE = 5.0  # the same, as long as the broker was never heard
ENDED = frozenset({"done", "failed", "cancelled"})  # states of a `fate`
UNKNOWN_PEER = (0, 0)

# A broker process's boot number, and its number for this client's connection.
Peer = tuple[int, int]


class Pace(Struct, frozen=True):
    """The time that a client waits before it sends again or gives up, in seconds.

    The n-th value of a list is for the n-th time in a row, the last value for all further times.
    """

    ping: float = 1.0  # between two pings, while a stream or a call is open
    tick: float = 0.25  # between two checks of what is due
    gap: float = 0.5  # the bound of one turn of the loop in measured time
    silence: float = 3.0  # without any frame, until the connection is replaced
    answer: tuple[float, ...] = (2.0, 4.0, 8.0)  # wait for `accepted` or `fate`, then send again
    pause: tuple[float, ...] = (0.0, 0.0, 2.0, 4.0, 8.0)  # before sending again without a new id
    overdue: float = 1.0  # after a deadline, until the client ends the stream itself
    broker_grace: float = BROKER_GRACE  # of silence, until the client ends its streams
    connect_grace: float = CONNECT_GRACE  # the same if no broker ever answered
    handshake_grace: float = math.inf  # the same if there never was a connection


class Action(Enum):
    """What has to be done for a stream now."""

    NOTHING = "nothing"
    SEND = "send"  # `generate` again
    CANCEL = "cancel"  # `cancel` again
    GIVE_UP = "give up"  # the deadline passed, and no terminal came


NO_ANSWER = "the broker did not accept it"
REFUSED = "told to come back later"
NEW_BOOT = "the broker was restarted"
NEW_LINK = "the connection was lost"
SILENCE = "the broker fell silent"


def nth(seconds: tuple[float, ...], number: int) -> float:
    """The entry for the `number`-th time, counted from 0; the last one if there are not so many."""
    return seconds[min(number, len(seconds) - 1)]


class SilenceTimer:
    """The clock of a connection, which stops with its thread, and the time since the last frame."""

    def __init__(self, pace: Pace, wall: float) -> None:
        """`wall`: the monotonic time now."""
        self.pace = pace
        self.now = 0.0
        self.heard_at = -math.inf  # when any frame came last
        self.connected = False  # whether there ever was a connection
        self.reconnects = 0  # connections replaced since then
        self._wall = wall
        self._waiting_since = self._connected_at = 0.0

    def advance(self, wall: float) -> None:
        """Begin a turn of the loop. At most `gap` of it counts: else the process was stopped."""
        self.now += min(max(0.0, wall - self._wall), self.pace.gap)
        self._wall = wall

    def heard(self) -> None:
        """A frame came."""
        self.heard_at = self.now
        self.reset()

    def reset(self) -> None:
        """Forget the silence so far, for example because nothing is waited for."""
        self._waiting_since = self._connected_at = self.now
        self.reconnects = 0

    @property
    def silent(self) -> float:
        """Seconds for which a frame has been waited for."""
        return self.now - self._waiting_since

    @property
    def reconnect_due(self) -> bool:
        """Whether to replace the connection, which may be half-open without an error."""
        number = self.reconnects
        wait = nth(self.pace.answer, number) if number else self.pace.silence
        return self.now - self._connected_at >= wait

    def reconnected(self) -> None:
        """The connection was replaced."""
        self.reconnects += 1
        self._connected_at = self.now

    @property
    def lost(self) -> bool:
        """Whether the grace is over, so that streams have to end."""
        grace = self.pace.broker_grace
        if self.heard_at == -math.inf:
            grace = min(grace, self.pace.connect_grace)
            if not self.connected:
                grace = min(grace, self.pace.handshake_grace)
        return self.silent > grace


class StreamRetry(Struct, eq=False):
    """The sendings of one stream. At `due` it is sent again, for the reason `why`."""

    state: StreamState
    pace: Pace
    durable: bool = True
    sent_at: float = 0.0
    due: float = math.inf
    why: str = ""
    unanswered: int = 0  # sendings in a row without an answer
    barren: int = 0  # sendings in a row that brought no id, beyond the first
    refused_at: float = math.inf  # the first in a row of errors that put the stream off
    cancelled: bool = False
    ended_at_broker: bool = False  # a `fate` said so; its terminal may be lost
    peer: Peer = UNKNOWN_PEER  # the newest that the broker reported
    overdue_at: float = math.inf

    # ---- what is sent --------------------------------------------------------------------------

    def sent(self, now: float) -> None:
        """The first sending went out."""
        self._expect_answer(now)
        if not self.durable:  # there is no second sending: leave a slow broker the longest time
            self.due = now + self.pace.answer[-1]

    def sent_again(self, now: float) -> None:
        """The next sending goes out, as `tick` asked."""
        self.state.begin_attempt()
        self.barren += 1
        self._expect_answer(now)

    def cancel_sent(self, now: float) -> None:
        """A `cancel` goes out; from now on only that is sent again."""
        if not self.cancelled:
            self.cancelled, self.unanswered = True, 0
        self._expect_answer(now)

    def _expect_answer(self, now: float) -> None:
        self.sent_at = now
        self.due, self.why = now + nth(self.pace.answer, self.unanswered), NO_ANSWER
        self.unanswered += 1

    # ---- what happens --------------------------------------------------------------------------

    def receive(self, frame: Frame, now: float, left: float | None = None) -> Delta | None:
        """Take a frame of this stream; returns the delta to give to the reader."""
        state, content = self.state, frame.content
        if not state.counts(frame.attempt):
            return None
        if isinstance(content, Failed) and self._put_off(content.error(), now, left):
            return None
        received, boot = len(state.ids), state.boot
        delta = state.receive(frame)
        if isinstance(content, Accepted | JobAccepted):
            self._accepted(boot)
        if len(state.ids) > received:
            self.barren, self.refused_at = 0, math.inf
        if state.gap:
            self._lost(now, state.gap)
        return delta

    def _accepted(self, boot_before: int) -> None:
        if self.state.boot != boot_before:
            self.refused_at = math.inf
        if not self.cancelled:
            self.unanswered, self.due, self.why = 0, math.inf, ""

    def _put_off(self, error: PoolError, now: float, left: float | None) -> bool:
        """Whether an error only delays the stream: it was running, and can run again later."""
        known = self.state.attempt > 1 or (error.code == Draining.code and self.state.boot)
        if error.retry_after_ms is None or not known or not self.durable or self.cancelled:
            return False
        wait = max(0, error.retry_after_ms) / 1000
        self.refused_at = min(self.refused_at, now)
        if wait > (self.refused_at + self.pace.broker_grace - now if left is None else left):
            return False
        self.state.accepted, self.unanswered = False, 0
        self.due, self.why = now + wait, REFUSED
        return True

    def identified(self, peer: Peer, now: float) -> None:
        """The broker sent its boot and link. What was sent to another peer is lost."""
        before, self.peer = self.peer, peer
        state = self.state
        if self.cancelled:
            if before not in (UNKNOWN_PEER, peer):
                self.due = now
        elif state.accepted and (state.boot, state.link) != peer:
            self._lost(now, NEW_LINK if state.boot == peer[0] else NEW_BOOT)

    def reconnected(self, now: float) -> None:
        """The client has replaced its connection."""
        if self.why != REFUSED:
            self._lost(now, SILENCE)
            self.due = now

    def _lost(self, now: float, why: str) -> None:
        """The newest sending brings nothing more: plan the next, or end a stream that has none."""
        if self.cancelled:
            return
        if not self.durable:
            self.state.error = BrokerLost(f"{why}; send the request again")
            return
        pause = nth(self.pace.pause, self.barren)
        self.due, self.why = min(self.due, max(now, self.sent_at + pause)), why

    def fate(self, state: str, now: float) -> None:
        """The answer to `cancel`: a terminal is under way, was lost, or never was."""
        if not self.cancelled or self.state.over:
            return
        self.ended_at_broker = state in ENDED
        if state == "unknown":
            self.state.cancel_here()
        elif self.ended_at_broker:
            self.due = now + nth(self.pace.answer, 0)

    def error_of_sending(self, error: PoolError, attempt: int) -> PoolError | None:
        """The stream's end by an error about one of its messages; None if it goes on."""
        state = self.state
        if error.code == DuplicateId.code:
            return error if attempt == state.attempt else None
        return error if not state.boot and state.counts(attempt) else None

    # ---- what is due ---------------------------------------------------------------------------

    def tick(self, now: float, heard_at: float, left: float | None = None) -> Action:
        """What to do now; may end the stream. `heard_at`: when any frame came last."""
        if self.state.over:
            return Action.NOTHING
        if left is not None and left <= 0:
            self.overdue_at = min(self.overdue_at, now)
            late = now - self.overdue_at >= self.pace.overdue
            return Action.GIVE_UP if late else Action.NOTHING
        if now < self.due:
            return Action.NOTHING
        return self._cancel_again() if self.cancelled else self._send_again(now, heard_at)

    def _cancel_again(self) -> Action:
        if not self.ended_at_broker:
            return Action.CANCEL
        self.state.cancel_here()
        return Action.NOTHING

    def _send_again(self, now: float, heard_at: float) -> Action:
        if self.why == NO_ANSWER and heard_at < self.sent_at:
            return Action.NOTHING  # no broker is there: the silence decides, not this sending
        if not self.durable:
            self._lost(now, NO_ANSWER)
            return Action.NOTHING
        return Action.SEND
