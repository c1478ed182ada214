"""Decides when a stream's request is sent again, and when the stream is given up. Pure.

Time is an argument, by the clock `SilenceTimer.now`: seconds in which this process ran. Only
deadlines are in real time; they are passed as `left`, the seconds until the deadline.
"""

from __future__ import annotations

import math
from enum import Enum

from msgspec import Struct

from mlxpool.client.stream import Delta, Frame, StreamState
from mlxpool.common.errors import BrokerLost, Draining, DuplicateId, PoolError
from mlxpool.common.protocol.kept.job_messages import JobAccepted
from mlxpool.common.protocol.to_client import Accepted, Failed

BROKER_GRACE = 60.0  # seconds of silence after which the client ends its streams
CONNECT_GRACE = 5.0  # as BROKER_GRACE, if no frame of a broker ever arrived
ENDED = frozenset({"done", "failed", "cancelled"})  # states in an answer to `cancel`
UNKNOWN_PEER = (0, 0)

# (boot, link): the boot number of a broker process, and the number that this process gave to the
# client's connection.
Peer = tuple[int, int]


class Pace(Struct, frozen=True):
    """The times that a client waits before it retries or gives up, in seconds.

    The n-th value of a list is for the n-th consecutive retry, the last value for all later
    retries.
    """

    ping: float = 1.0  # time between two pings while a stream or a call is open
    tick: float = 0.25  # time between two checks for due work
    gap: float = 0.5  # most seconds by which the client's clock advances at one reading
    silence: float = 3.0  # time without frames before the connection is replaced
    answer: tuple[float, ...] = (2.0, 4.0, 8.0)  # the wait for `accepted` or `fate`, before a retry
    pause: tuple[float, ...] = (0.0, 0.0, 2.0, 4.0, 8.0)  # wait before a retry after no new id
    overdue: float = 1.0  # the wait after a deadline before the client ends the stream
    broker_grace: float = BROKER_GRACE  # time without frames before the client ends its streams
    connect_grace: float = CONNECT_GRACE  # as `broker_grace`, if no broker ever answered
    handshake_grace: float = math.inf  # as `broker_grace`, if there never was a connection


class Action(Enum):
    """The action that is due for a stream."""

    NOTHING = "nothing"
    SEND = "send"  # `generate` again
    CANCEL = "cancel"  # `cancel` again
    GIVE_UP = "give up"  # the deadline has passed, and the broker has not ended the stream


NO_ANSWER = "the broker did not accept it"
REFUSED = "told to come back later"
NEW_BOOT = "the broker was restarted"
NEW_LINK = "the connection was lost"
SILENCE = "the broker fell silent"


def nth(seconds: tuple[float, ...], number: int) -> float:
    """Returns the entry with the index `number`; the last entry if there are fewer entries."""
    return seconds[min(number, len(seconds) - 1)]


class SilenceTimer:
    """The clock of a connection (`now`, in seconds), and the time of the last frame.

    The clock stands still while the connection's thread is stopped.
    """

    def __init__(self, pace: Pace, wall: float) -> None:
        """`wall`: the time of the monotonic clock, which continues while this thread is stopped."""
        self.pace = pace
        self.now = 0.0
        self.heard_at = -math.inf  # time of the last frame
        self.connected = False  # True if there ever was a connection
        self.reconnects = 0  # number of connections replaced since the last frame
        self._wall = wall
        self._waiting_since = self._connected_at = 0.0

    def advance(self, wall: float) -> None:
        """Advances this clock to `wall`, a time of the monotonic clock, by at most `gap` seconds.

        If more time has passed, the process was stopped: the rest of the time is not counted.
        """
        self.now += min(max(0.0, wall - self._wall), self.pace.gap)
        self._wall = wall

    def heard(self) -> None:
        """Notes that a frame arrived."""
        self.heard_at = self.now
        self.reset()

    def reset(self) -> None:
        """Starts the waiting time anew, for example because no stream or call waits."""
        self._waiting_since = self._connected_at = self.now
        self.reconnects = 0

    @property
    def silent(self) -> float:
        """The seconds since the last frame or `reset`, measured by the clock `now`."""
        return self.now - self._waiting_since

    @property
    def reconnect_due(self) -> bool:
        """True if the connection should be replaced: it may be half-open, which gives no error."""
        number = self.reconnects
        wait = nth(self.pace.answer, number) if number else self.pace.silence
        return self.now - self._connected_at >= wait

    def reconnected(self) -> None:
        """Notes that the connection was replaced."""
        self.reconnects += 1
        self._connected_at = self.now

    @property
    def lost(self) -> bool:
        """True if no frame has come for so long that streams have to end."""
        grace = self.pace.broker_grace
        if self.heard_at == -math.inf:
            grace = min(grace, self.pace.connect_grace)
            if not self.connected:
                grace = min(grace, self.pace.handshake_grace)
        return self.silent > grace


class StreamRetry(Struct, eq=False):
    """The attempts to send one stream's request. `due` is the time of the next attempt.

    `why` is the reason for the next attempt.
    """

    state: StreamState
    pace: Pace
    durable: bool = True
    sent_at: float = 0.0
    due: float = math.inf
    why: str = ""
    unanswered: int = 0  # consecutive attempts without an answer
    barren: int = 0  # consecutive attempts without a new id; the first attempt is not counted
    refused_at: float = math.inf  # time of the first consecutive error that delayed the stream
    cancelled: bool = False
    ended_at_broker: bool = False  # by the answer to `cancel`; the stream's terminal may be lost
    peer: Peer = UNKNOWN_PEER  # the newest peer that the broker reported
    overdue_at: float = math.inf

    # ---- sendings ------------------------------------------------------------------------------

    def sent(self, now: float) -> None:
        """Notes that the first attempt was sent."""
        self._expect_answer(now)
        if not self.durable:  # without a second attempt, a slow broker gets the longest wait
            self.due = now + self.pace.answer[-1]

    def sent_again(self, now: float) -> None:
        """Notes that the next attempt was sent, as `tick` asked."""
        self.state.begin_attempt()
        self.barren += 1
        self._expect_answer(now)

    def cancel_sent(self, now: float) -> None:
        """Notes that a `cancel` was sent; from now on only the `cancel` is sent again."""
        if not self.cancelled:
            self.cancelled, self.unanswered = True, 0
        self._expect_answer(now)

    def _expect_answer(self, now: float) -> None:
        self.sent_at = now
        self.due, self.why = now + nth(self.pace.answer, self.unanswered), NO_ANSWER
        self.unanswered += 1

    # ---- events --------------------------------------------------------------------------------

    def receive(self, frame: Frame, now: float, left: float | None = None) -> Delta | None:
        """Handles a frame of this stream. Returns the delta for the reader."""
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
        """Schedules another attempt if an error only delays a stream that had started.

        Returns False if the error ends the stream.
        """
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
        """Handles the broker's boot number and its number (link) of this connection.

        If they have changed since the newest attempt was accepted, the attempt is lost.
        """
        before, self.peer = self.peer, peer
        state = self.state
        if self.cancelled:
            if before not in (UNKNOWN_PEER, peer):
                self.due = now
        elif state.accepted and (state.boot, state.link) != peer:
            self._lost(now, NEW_LINK if state.boot == peer[0] else NEW_BOOT)

    def reconnected(self, now: float) -> None:
        """Notes that the client has replaced its connection."""
        if self.why != REFUSED:
            self._lost(now, SILENCE)
            self.due = now

    def _lost(self, now: float, why: str) -> None:
        """Schedules a retry after a lost attempt; ends a stream that is not durable."""
        if self.cancelled:
            return
        if not self.durable:
            self.state.error = BrokerLost(f"{why}; send the request again")
            return
        pause = nth(self.pace.pause, self.barren)
        self.due, self.why = min(self.due, max(now, self.sent_at + pause)), why

    def fate(self, state: str, now: float) -> None:
        """Handles the answer to `cancel`: the state of the stream at the broker.

        An unknown stream ends now. If the stream has ended at the broker, the message of its end
        may still arrive; if it does not, `tick` ends the stream.
        """
        if not self.cancelled or self.state.over:
            return
        self.ended_at_broker = state in ENDED
        if state == "unknown":
            self.state.cancel_here()
        elif self.ended_at_broker:
            self.due = now + nth(self.pace.answer, 0)

    def error_of_sending(self, error: PoolError, attempt: int) -> PoolError | None:
        """Returns `error` if it ends the stream, else None.

        The error is the broker's answer to a message of this stream; `attempt` is the attempt of
        that message.
        """
        state = self.state
        if error.code == DuplicateId.code:
            return error if attempt == state.attempt else None
        return error if not state.boot and state.counts(attempt) else None

    # ---- due work ------------------------------------------------------------------------------

    def tick(self, now: float, heard_at: float, left: float | None = None) -> Action:
        """Returns the due action; may end the stream. `heard_at` is the time of the last frame."""
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
            return Action.NOTHING  # a silent broker is handled by SilenceTimer
        if not self.durable:
            self._lost(now, NO_ANSWER)
            return Action.NOTHING
        return Action.SEND
