"""When a stream is sent again, and when it is given up. Pure: time is an argument.

All times are those of `Watch.now`: seconds in which this process ran. Only deadlines are real time;
they come in as `left`, the seconds until then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from mlxpool.client.stream import Delta, StreamState
from mlxpool.common.errors import BrokerLost, Draining, DuplicateId, PoolError, from_body
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.frames import Message

BROKER_GRACE = 60.0  # seconds of silence after which the client ends its streams itself
CONNECT_GRACE = 5.0  # the same, as long as nothing was ever heard
ENDED = frozenset({"done", "failed", "cancelled"})  # states of a `fate`


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a client waits before it sends again or gives up. All values are seconds.

    The n-th value of a list is for the n-th time in a row, the last one for every further time.
    """

    ping: float = 1.0  # between two pings, while a stream or a call is open
    tick: float = 0.25  # between two checks of what is due
    gap: float = 0.5  # the most that one turn of the loop counts as time waited
    silence: float = 3.0  # without any frame, until the connection is replaced
    answer: tuple[float, ...] = (2.0, 4.0, 8.0)  # wait for `accepted` or `fate`, then send again
    pause: tuple[float, ...] = (0.0, 0.0, 2.0, 4.0, 8.0)  # before sending again without a new id
    overdue: float = 1.0  # after a deadline, until the client ends the stream itself
    broker_grace: float = BROKER_GRACE  # of silence, until the client ends its streams
    connect_grace: float = CONNECT_GRACE  # the same when no broker ever answered


class Step(Enum):
    """What the link has to do for a stream."""

    NOTHING = "nothing"
    SEND = "send"  # `generate` again
    CANCEL = "cancel"  # `cancel` again
    GIVE_UP = "give up"  # the deadline passed, and the broker's word of it does not come


NO_ANSWER = "the broker did not accept it"
REFUSED = "told to come back later"
NEW_BOOT = "the broker was restarted"
NEW_LINK = "the connection was lost"
SILENCE = "the broker fell silent"


def nth(seconds: tuple[float, ...], number: int) -> float:
    """The wait for the `number`-th time, counted from 0."""
    return seconds[min(number, len(seconds) - 1)]


class Watch:
    """The clock of a link, which stands still while its thread does, and the broker's silence."""

    def __init__(self, pace: Pace, wall: float) -> None:
        self.pace = pace
        self.now = 0.0
        self.heard_at = -math.inf  # of any frame at all
        self.moves = 0  # connections replaced in this silence
        self._wall = wall
        self._since = self._move_from = 0.0

    def turn(self, wall: float) -> None:
        """A turn of the loop begins. A long one was no waiting: we were stopped, or starved."""
        self.now += min(max(0.0, wall - self._wall), self.pace.gap)
        self._wall = wall

    def heard(self) -> None:
        """A frame came."""
        self.heard_at = self.now
        self.idle()

    def idle(self) -> None:
        """Nothing is waited for: no silence counts that was before."""
        self._since = self._move_from = self.now
        self.moves = 0

    @property
    def silent(self) -> float:
        """For how long a broker has been waited for."""
        return self.now - self._since

    @property
    def move_due(self) -> bool:
        """Whether to replace the connection: a half-open one never says that it is."""
        wait = nth(self.pace.answer, self.moves) if self.moves else self.pace.silence
        return self.now - self._move_from >= wait

    def moved(self) -> None:
        """The connection was replaced."""
        self.moves += 1
        self._move_from = self.now

    @property
    def lost(self) -> bool:
        """Whether to give up."""
        grace = self.pace.broker_grace
        if self.heard_at == -math.inf:
            grace = min(grace, self.pace.connect_grace)
        return self.silent > grace


@dataclass(eq=False, slots=True)
class Course:
    """One stream's sendings.

    `due` is when we speak of it next, unless something comes before; `why` is the reason.
    """

    state: StreamState
    pace: Pace
    durable: bool = True
    sent_at: float = 0.0
    due: float = math.inf
    why: str = ""
    unanswered: int = 0  # sendings in a row that nothing answered
    barren: int = 0  # sendings in a row that brought no id, beyond the first
    refused_at: float = math.inf  # the first in a row of errors that told us to come back
    cancelled: bool = False
    buried: bool = False  # a `fate` told that it has ended
    home: tuple[int, int] = (0, 0)  # boot and link as they were told last
    overdue_at: float = math.inf

    # ---- what we do ----------------------------------------------------------------------------

    def sent(self, now: float) -> None:
        """The first sending went out."""
        self._spoke(now)
        if not self.durable:  # nobody will ask again: time for a slow broker
            self.due = now + self.pace.answer[-1]

    def sent_again(self, now: float) -> None:
        """The link sends it again, as `tick` said."""
        self.state.sent_again()
        self.barren += 1
        self._spoke(now)

    def cancel(self, now: float) -> None:
        """`cancel` goes out; from now on nothing is sent again but that."""
        if not self.cancelled:
            self.cancelled, self.unanswered = True, 0
        self._spoke(now)

    def _spoke(self, now: float) -> None:
        self.sent_at = now
        self.due, self.why = now + nth(self.pace.answer, self.unanswered), NO_ANSWER
        self.unanswered += 1

    # ---- what happens --------------------------------------------------------------------------

    def receive(self, message: Message, now: float, left: float | None = None) -> Delta | None:
        """Take a frame of this stream; returns what its reader gets to see."""
        state = self.state
        if not state.counts(message.header):
            return None
        if message.kind == kinds.ERROR and self._come_back(from_body(message.body), now, left):
            return None
        had, boot = len(state.ids), state.boot
        delta = state.receive(message)
        if message.kind == kinds.ACCEPTED:
            self._accepted(boot)
        if len(state.ids) > had:
            self.barren, self.refused_at = 0, math.inf
        if state.gap:
            self._lost(now, state.gap)
        return delta

    def _accepted(self, boot_before: int) -> None:
        if self.state.boot != boot_before:
            self.refused_at = math.inf
        if not self.cancelled:
            self.unanswered, self.due, self.why = 0, math.inf, ""

    def _come_back(self, error: PoolError, now: float, left: float | None) -> bool:
        """Whether an error only puts the stream off: it was running, and may again later."""
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

    def at_home(self, boot: int, link: int, now: float) -> None:
        """The broker and connection that we speak to; another than the stream's brings nothing."""
        before, self.home = self.home, (boot, link)
        state = self.state
        if self.cancelled:
            if before not in ((0, 0), self.home):
                self.due = now
        elif state.accepted and (state.boot, state.link) != self.home:
            self._lost(now, NEW_LINK if state.boot == boot else NEW_BOOT)

    def moved(self, now: float) -> None:
        """The link has replaced its connection."""
        if self.why != REFUSED:
            self._lost(now, SILENCE)
            self.due = now

    def _lost(self, now: float, why: str) -> None:
        """Nothing more comes of the newest sending."""
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
        self.buried = state in ENDED
        if state == "unknown":
            self.state.cancel_here()
        elif self.buried:
            self.due = now + nth(self.pace.answer, 0)

    def about(self, message: Message) -> PoolError | None:
        """The stream's end by an error that is about it without being its terminal."""
        state, attempt = self.state, message.header.attempt
        error = from_body(message.body)
        if error.code == DuplicateId.code:
            return error if attempt == state.attempt else None
        return error if not state.boot and state.counts(message.header) else None

    # ---- what is due ---------------------------------------------------------------------------

    def tick(self, now: float, heard_at: float, left: float | None = None) -> Step:
        """What to do now; may end the stream. `heard_at`: when any frame came last."""
        if self.state.over:
            return Step.NOTHING
        if left is not None and left <= 0:
            self.overdue_at = min(self.overdue_at, now)
            late = now - self.overdue_at >= self.pace.overdue
            return Step.GIVE_UP if late else Step.NOTHING
        if now < self.due:
            return Step.NOTHING
        return self._cancel_again() if self.cancelled else self._send_again(now, heard_at)

    def _cancel_again(self) -> Step:
        if not self.buried:
            return Step.CANCEL
        self.state.cancel_here()
        return Step.NOTHING

    def _send_again(self, now: float, heard_at: float) -> Step:
        if self.why == NO_ANSWER and heard_at < self.sent_at:
            return Step.NOTHING  # nobody is there; the watch on silence is what counts
        if not self.durable:
            self._lost(now, NO_ANSWER)
            return Step.NOTHING
        return Step.SEND
