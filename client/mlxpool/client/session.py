"""The thread of a connection: reads the socket, serves every stream and call, sends again.

Everything here belongs to that thread, except what says otherwise.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable

from mlxpool.client.calls import Calls
from mlxpool.client.dealer import Dealer
from mlxpool.client.incoming import Frame, frame_of_row, parse_frame
from mlxpool.client.open_stream import OpenStream
from mlxpool.client.request import resumed
from mlxpool.client.retry import Action, Pace, Peer, SilenceTimer
from mlxpool.client.stream import Delta
from mlxpool.common.errors import BrokerLost, PoolError, Unauthorized, from_body
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.deltas import Deltas, unpack_deltas
from mlxpool.common.protocol.frames import Content, Message, encoded
from mlxpool.common.protocol.to_broker import Ack, Cancel, Ping
from mlxpool.common.protocol.to_client import Failed, Fate, Pong
from mlxpool.common.trace import History


class Session:
    """One connection's loop; commands of other threads come through a queue."""

    def __init__(
        self,
        dealer: Dealer,
        pace: Pace,
        commands: queue.SimpleQueue[Callable[[Session], None]],
        closing: threading.Event,
        history: History,
    ) -> None:
        """`closing` ends `run`, once the dealer is woken; `run` sets it when it ends."""
        self.timer = SilenceTimer(pace, time.monotonic())
        self.calls = Calls(pace, dealer.send)
        self._dealer = dealer
        self._pace = pace
        self._commands = commands
        self._closing = closing
        self._history = history
        self._streams: dict[bytes, OpenStream] = {}
        self._ping_at = self._tick_at = 0.0

    def wake(self) -> None:
        """Have the thread look at the commands and at `closing`; from any thread."""
        self._dealer.wake()

    # ---- commands ------------------------------------------------------------------------------

    def open(self, stream: OpenStream, parts: list[bytes]) -> None:
        """Send a stream's first `generate`."""
        state = stream.state
        self._history.write("submit", id=state.id)
        self._streams[state.id] = stream
        self._dealer.send(parts)
        stream.retry.sent(self.timer.now)
        self._history.write("sent", id=state.id, attempt=state.attempt, count=0)

    def cancel(self, stream: OpenStream) -> None:
        """Send `cancel` for a stream, unless it has ended."""
        if self._streams.get(stream.state.id) is stream:
            self._send(Cancel(), stream.state.id)
            stream.retry.cancel_sent(self.timer.now)

    def cancel_asked(self, request_id: bytes) -> None:
        """Another `cancel` went out for this id, which may be a stream of this connection."""
        if request_id in self._streams:
            self._streams[request_id].retry.cancel_sent(self.timer.now)

    def acknowledge(self) -> None:
        """Send how many ids readers have taken, of the streams that this broker accepted."""
        have = []
        for stream in self._streams.values():
            if stream.state.accepted and stream.read > stream.acked:
                stream.acked = stream.read
                have.append((stream.state.id, stream.read))
        if have:
            self._send(Ack(have))

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `closing` is set; then cancel the streams and end them with BrokerLost."""
        try:
            while not self._closing.is_set():
                self._turn()
            self._run_commands()  # such as the cancel of a stream left early
            for ident in self._streams:
                self._send(Cancel(), ident)
            self._dealer.flush()
        finally:
            self._closing.set()
            self._end_all(BrokerLost("the client was closed before the stream ended"))
            self._dealer.close()
            self._history.close()

    def _turn(self) -> None:
        """Wait, read everything, then do what is due: the delay may have been our own."""
        waiting = self._waiting()
        due_in = min(self._ping_at, self._tick_at) - time.monotonic()
        self._dealer.wait(due_in if waiting else None)
        now = time.monotonic()
        self.timer.advance(now)
        if self._dealer.connected() and waiting:
            self._ping()  # its `pong` tells whether streams have to be sent again
        if self._dealer.refusal and waiting:
            self._end_all(Unauthorized(self._dealer.refusal))
        if not waiting:
            self.timer.reset()
            self._ping_at, self._tick_at = now + self._pace.ping, now + self._pace.tick
        self._run_commands()
        self._read()
        if now >= self._tick_at:
            self._tick_at = now + self._pace.tick
            self._tick()
        if now >= self._ping_at:
            self._ping_at = now + self._pace.ping
            self.acknowledge()
            self._ping()

    def _waiting(self) -> bool:
        return bool(self._streams or self.calls)

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()(self)

    def _send(self, content: Content, ident: bytes | None = None) -> None:
        self._dealer.send(encoded(content, ident))

    def _ping(self) -> None:
        if self._waiting():
            self._send(Ping())

    # ---- what arrives --------------------------------------------------------------------------

    def _read(self) -> None:
        for parts in self._dealer.received():
            self.timer.heard()
            try:
                self._handle(frames.decode(parts))
            except (PoolError, KeyError, TypeError, ValueError):
                continue  # an unreadable frame counts as lost: the next `pos` shows the gap

    def _handle(self, message: Message) -> None:
        kind, ident = message.kind, message.header.id
        stream = self._streams.get(ident or b"")
        if kind == Deltas.kind:
            for row in unpack_deltas(message):
                if (of_row := self._streams.get(row.id)) is not None:
                    self._receive(of_row, frame_of_row(row))
        elif kind == Pong.kind:
            pong = Pong.parse(message.body)
            self._identified((pong.boot, pong.link))
        elif kind == Fate.kind:
            self._fate(message)
        elif stream is not None:
            if (frame := parse_frame(message)) is not None:
                self._receive(stream, frame)
        elif ident in self.calls:
            self.calls.answer(message, self.timer.now)
        elif kind == Failed.kind:
            self._error_of_sending(message)

    def _receive(self, stream: OpenStream, frame: Frame) -> None:
        state, retry, had = stream.state, stream.retry, stream.state.accepted
        left = stream.left() if isinstance(frame.content, Failed) else None
        delta = retry.receive(frame, self.timer.now, left)
        if delta is not None:
            self._deliver(stream, delta)
        if state.over:
            self._end(stream)
        elif retry.due <= self.timer.now:
            self._retry(stream)
        elif state.accepted and not had:
            peer = {"boot": state.boot, "link": state.link}
            self._history.write("accepted", id=state.id, attempt=state.attempt, **peer)
            self._identified((state.boot, state.link))

    def _deliver(self, stream: OpenStream, delta: Delta) -> None:
        if self._history.on:
            state = stream.state
            what = {"id": state.id, "attempt": state.attempt, "pos": delta.pos}
            self._history.write("taken", **what, ids=list(delta.ids))
        stream.on_delta(delta)

    def _fate(self, message: Message) -> None:
        ident = message.header.id
        stream = self._streams.get(ident or b"")
        if stream is not None:
            stream.retry.fate(Fate.parse(message.body).state, self.timer.now)
            if stream.state.over:
                self._end(stream)
        if ident in self.calls:
            self.calls.answer(message, self.timer.now)

    def _error_of_sending(self, message: Message) -> None:
        """An error about one of our messages, such as `duplicate_id`, which is no terminal."""
        stream = self._streams.get(message.body.get("about") or b"")
        if stream is not None:
            error, attempt = from_body(message.body), message.header.attempt
            stream.state.error = stream.retry.error_of_sending(error, attempt)
            if stream.state.over:
                self._end(stream)

    def _identified(self, peer: Peer) -> None:
        """The broker told who it is. What was sent to another peer is lost."""
        for stream in list(self._streams.values()):
            stream.retry.identified(peer, self.timer.now)
            self._retry(stream)
        self.calls.identified(peer, self.timer.now)

    # ---- what is due ---------------------------------------------------------------------------

    def _tick(self) -> None:
        timer = self.timer
        if timer.lost or (self._dealer.hopeless and timer.heard_at == -math.inf):
            self._give_up()
        elif timer.reconnect_due and self._can_gain():
            self._reconnect()
        for stream in list(self._streams.values()):
            self._retry(stream)
        if timer.heard_at > -math.inf:
            self.calls.tick(timer.now)

    def _can_gain(self) -> bool:
        """Whether a call or stream can go on over a new connection."""
        return bool(self.calls) or any(s.retry.durable for s in self._streams.values())

    def _reconnect(self) -> None:
        self._dealer.replace()
        self.timer.reconnected()
        self._ping()
        for stream in self._streams.values():
            stream.retry.reconnected(self.timer.now)
        self.calls.reconnected(self.timer.now)

    def _give_up(self) -> None:
        known = self.timer.heard_at > -math.inf
        advice = "" if known else "; start one with `mlxpool serve`"
        endpoint, trouble = self._dealer.endpoint, self._dealer.trouble
        silence = f"no broker answers at {endpoint} for {self.timer.silent:.0f} s"
        self._end_all(Unauthorized(trouble) if trouble else BrokerLost(silence + advice))
        self._dealer.replace()  # or a broker that starts later would get requests that have ended
        self.timer.reset()

    def _retry(self, stream: OpenStream) -> None:
        """Do what is due for one stream."""
        left = stream.left()
        action = stream.retry.tick(self.timer.now, self.timer.heard_at, left)
        if action is Action.SEND:
            self._send_again(stream, left)
        elif action is Action.CANCEL:
            self._send(Cancel(), stream.state.id)
            stream.retry.cancel_sent(self.timer.now)
        elif action is Action.GIVE_UP:
            stream.state.error = BrokerLost(
                f"the deadline passed {-(left or 0):.0f} s ago, and the broker at"
                f" {self._dealer.endpoint} did not end the stream"
            )
        if stream.state.over:
            self._end(stream)

    def _send_again(self, stream: OpenStream, left: float | None) -> None:
        assert stream.draft is not None
        state, why = stream.state, stream.retry.why
        draft = resumed(stream.draft, state, left)
        stream.retry.sent_again(self.timer.now)
        try:
            parts = encoded(draft, state.id, attempt=state.attempt)
        except PoolError as error:  # prompt and ids together became too large for a message
            state.error = error
            return
        self._dealer.send(parts)
        stream.acked = len(state.ids)
        self._history.write("resend", id=state.id, why=why)
        self._history.write("sent", id=state.id, attempt=state.attempt, count=len(state.ids))

    # ---- the end -------------------------------------------------------------------------------

    def _end(self, stream: OpenStream) -> None:
        state = stream.state
        if self._streams.pop(state.id, None) is not None:
            reason = state.result.reason if state.result else getattr(state.error, "code", "")
            self._history.write("end", id=state.id, reason=reason)
            stream.on_end()

    def _end_all(self, error: PoolError) -> None:
        for stream in list(self._streams.values()):
            stream.state.error = error
            self._end(stream)
        self.calls.fail(error)
