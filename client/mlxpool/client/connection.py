"""A client's connection: its thread reads the socket, serves streams and calls, and retries.

Any thread may call the methods of the first two sections. Only the connection's thread calls the
other methods. This thread starts with the first command.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from mlxpool.client.calls import Call, Calls
from mlxpool.client.dealer import Dealer
from mlxpool.client.open_stream import OpenStream, front_endpoint
from mlxpool.client.request import (
    Draft,
    Question,
    deadline_of,
    index_of,
    is_durable,
    reports_prompt,
    sent_again,
)
from mlxpool.client.retry import Action, Pace, Peer, SilenceTimer, StreamRetry
from mlxpool.client.stream import Delta, Frame, Result, StreamState, frame_of_row, parse_frame
from mlxpool.common.errors import BadRequest, BrokerLost, PoolError, Unauthorized, from_body
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.deltas import Deltas, unpack_deltas
from mlxpool.common.protocol.frames import Content, Message
from mlxpool.common.protocol.from_client import Ack, Cancel, Ping
from mlxpool.common.protocol.kept.job_messages import Fetch
from mlxpool.common.protocol.owners import encoded_for
from mlxpool.common.protocol.to_client import Failed, Fate, Pong
from mlxpool.common.trace import History
from mlxpool.common.transport.keys import Credentials

ACK_IDS = 64  # ids read before an ack is sent; the next ping acknowledges the remaining ids

Answer = TypeVar("Answer")


class Connection:
    """One connection to a broker, for any number of streams, calls and threads."""

    def __init__(
        self,
        run_dir: str | Path | None,
        endpoint: str | None,
        pace: Pace,
        credentials: Credentials | None,
    ) -> None:
        """Raises BadRequest for a malformed endpoint.

        Raises ValueError for a run directory whose path is too long for a socket.
        """
        endpoint = front_endpoint(run_dir, endpoint)
        self.timer = SilenceTimer(pace, time.monotonic())
        self._pace = pace
        self._dealer = Dealer(endpoint, credentials)
        self._calls = Calls(pace, self._dealer.send)
        self._streams: dict[bytes, OpenStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._history = History("client")
        self._process = os.getpid()  # a forked process has no thread for the connection
        self._ping_at = self._tick_at = 0.0
        self._lock = threading.Lock()  # held while the thread starts or ends
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Ends the thread. Open streams are cancelled and end with BrokerLost.

        In a forked process this method does nothing: the connection belongs to the parent process.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing.set()
        if thread is None:
            self._history.close()
        else:
            self._dealer.wake()
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def check_process(self) -> None:
        """Raises BadRequest in a forked process: the client belongs to its parent process.

        The forked process has no thread that reads the socket, so every wait would be endless.
        """
        if self._process != os.getpid():
            raise BadRequest(
                f"this client was made in process {self._process} and is used in its fork"
                f" {os.getpid()}; make a client in each process, after the fork"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client of a pool cannot be pickled: its connection and its thread belong to this"
            " process; send the run directory or the endpoint, and make a client where it is used"
        )

    def _do(self, command: Callable[[], None]) -> None:
        """Gives the thread a command to run.

        Raises BrokerLost after `close`, BadRequest in a forked process, and the errors of
        `Dealer.open`.
        """
        self.check_process()  # before the lock: at the fork another thread may have held it
        with self._lock:
            if self._closing.is_set():
                raise BrokerLost("the client is closed")
            if self._thread is None:
                self._dealer.open()
                thread = threading.Thread(target=self._run, name="mlxpool", daemon=True)
                thread.start()
                self._thread = thread
            self._commands.put(command)
        self._dealer.wake()

    # ---- commands of other threads ---------------------------------------------------------------

    def open(
        self, draft: Draft, deliver: Callable[[Delta | None], None], owner: str = ""
    ) -> OpenStream:
        """Sends the message that starts a stream. Raises TooLarge or BadRequest if this fails.

        `owner` is the owner on whose behalf the message is sent, see `AsyncClient.for_owner`.
        """
        ident = os.urandom(frames.ID_BYTES)
        if isinstance(draft, Fetch):
            state = StreamState(ident, draft.start)
        else:
            state = StreamState(ident, reports=reports_prompt(draft), index=index_of(draft))
        parts = encoded_for(owner, draft, state.id, state.attempt)
        seconds = deadline_of(draft)
        deadline = None if seconds is None else time.monotonic() + seconds
        retry = StreamRetry(state, self._pace, is_durable(draft))
        stream = OpenStream(state, retry, draft, deadline, deliver, owner=owner)

        def send() -> None:
            self._history.write("submit", id=state.id)
            self._streams[state.id] = stream
            self._dealer.send(parts)
            retry.sent(self.timer.now)
            self._history.write("sent", id=state.id, attempt=state.attempt, count=0)

        self._do(send)
        return stream

    def took(self, stream: OpenStream, delta: Delta | None) -> Delta | None:
        """Notes that the reader took a delta, and returns the delta; None is the end of the stream.

        At the end raises the error of the stream, if it has one.
        """
        if delta is None:
            stream.finished = True
            if stream.state.error is not None:
                raise stream.state.error
            return None
        stream.read += len(delta.ids)
        if stream.read - stream.acked >= ACK_IDS:
            self._do(self._acknowledge)
        return delta

    def result(self, stream: OpenStream) -> Result:
        """Returns the whole completion.

        Raises the stream's error, and RuntimeError before the end. In a forked process it raises
        BadRequest if the stream had not ended before the fork.
        """
        if not stream.state.over:
            self.check_process()
        return stream.state.whole()

    def leave(self, stream: OpenStream) -> None:
        """Cancels a stream that its reader leaves, unless the stream has ended."""
        finished, stream.finished = stream.finished, True
        if not finished and not stream.state.over:
            with contextlib.suppress(PoolError):  # in a forked process the parent owns the stream
                self._do(partial(self._cancel, stream))

    def abandon(self, stream: OpenStream) -> None:
        """Cancels a stream without taking a lock.

        A finalizer calls this method between any two instructions of a thread, which may hold the
        lock.
        """
        finished, stream.finished = stream.finished, True
        over = finished or stream.state.over or self._closing.is_set()
        if not over and self._process == os.getpid():
            self._commands.put(partial(self._cancel, stream))
            self._dealer.wake()

    def _cancel(self, stream: OpenStream) -> None:
        if self._streams.get(stream.state.id) is stream:
            self._send(Cancel(), stream.state.id, stream.owner)
            stream.retry.cancel_sent(self.timer.now)

    def ask(
        self,
        question: Question[Answer],
        on_reply: Callable[[Answer | PoolError], None],
        owner: str = "",
    ) -> None:
        """Sends a call. The connection's thread passes the answer, or an error, to `on_reply`."""
        ident, kind = question.id, question.content.kind
        parts = encoded_for(owner, question.content, ident)

        def send() -> None:
            now = self.timer.now
            call = Call(kind, parts, owner)
            self._calls.ask(ident, call, lambda reply: on_reply(question.answer(reply)), now)
            if not self._calls.peer_known:
                self._send(Ping())  # the `pong` reports the link of the connection
            stream = self._streams.get(ident) if kind == Cancel.kind else None
            if stream is not None and stream.owner == owner:
                stream.retry.cancel_sent(now)

        self._do(send)

    def forget(self, question: Question[Answer]) -> None:
        """Drops a call whose caller no longer waits, and cancels it at its worker."""

        def send() -> None:
            call = self._calls.forget(question.id)
            if call is not None:
                self._send(Cancel(), question.id, call.owner)

        with contextlib.suppress(PoolError):  # after `close` everything is cancelled
            self._do(send)

    # ---- the thread's loop -----------------------------------------------------------------------

    def _run(self) -> None:
        """Serves until `closing` is set; then cancels open streams and calls with BrokerLost."""
        try:
            while not self._closing.is_set():
                self._turn()
            self._run_commands()  # such as the cancel of a stream that a reader closed
            for stream in self._streams.values():
                self._send(Cancel(), stream.state.id, stream.owner)
            for ident, call in self._calls.cancellable():
                self._send(Cancel(), ident, call.owner)
            self._dealer.flush()
        finally:
            self._closing.set()
            self._end_all(BrokerLost("the client was closed before the stream ended"))
            self._dealer.close()
            self._history.close()

    def _turn(self) -> None:
        """Waits, reads everything, then does the due work.

        Reading comes first, because a silence may be a delay of this process, not of the broker.
        """
        waiting = self.waits()
        due_in = min(self._ping_at, self._tick_at) - time.monotonic()
        self._dealer.wait(due_in if waiting else None)
        now = time.monotonic()
        self.timer.advance(now)
        if self._dealer.handshake.succeeded():
            self.timer.connected = True
            if waiting:
                self._send(Ping())  # its `pong` causes the retry of lost streams
        if self._dealer.handshake.refusal and waiting:
            self._end_all(Unauthorized(self._dealer.handshake.refusal))
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
            self._acknowledge()
            if self.waits():
                self._send(Ping())

    def waits(self) -> bool:
        """Returns whether a stream or a call waits for the broker."""
        return bool(self._streams or self._calls)

    def _run_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _send(self, content: Content, ident: bytes | None = None, owner: str = "") -> None:
        self._dealer.send(encoded_for(owner, content, ident))

    def _acknowledge(self) -> None:
        """Acknowledges the token ids that readers took, of streams that the broker has accepted."""
        have = []
        for stream in self._streams.values():
            if stream.state.accepted and stream.read > stream.acked:
                stream.acked = stream.read
                have.append((stream.state.id, stream.state.start + stream.read))
        if have:
            self._send(Ack(have))

    # ---- received messages -----------------------------------------------------------------------

    def _read(self) -> None:
        for parts in self._dealer.received():
            self.timer.heard()
            try:
                self._handle(frames.decode(parts))
            except (PoolError, KeyError, TypeError, ValueError):
                continue  # the frame counts as lost: the `pos` of the next frame shows the gap

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
        elif ident in self._calls:
            self._calls.answer(message, self.timer.now)
        elif kind == Failed.kind:
            self._error_of_sending(message)

    def _receive(self, stream: OpenStream, frame: Frame) -> None:
        state, retry, had = stream.state, stream.retry, stream.state.accepted
        left = stream.left() if isinstance(frame.content, Failed) else None
        delta = retry.receive(frame, self.timer.now, left)
        if delta is not None:
            if self._history.on:
                facts = {"id": state.id, "attempt": state.attempt, "pos": delta.pos}
                self._history.write("taken", **facts, ids=list(delta.ids))
            stream.deliver(delta)
        if state.over:
            self._end(stream)
        elif retry.due <= self.timer.now:
            self._retry(stream)
        elif state.accepted and not had:
            peer = {"boot": state.boot, "link": state.link}
            self._history.write("accepted", id=state.id, attempt=state.attempt, **peer)
            self._identified((state.boot, state.link))

    def _fate(self, message: Message) -> None:
        ident = message.header.id
        stream = self._streams.get(ident or b"")
        if stream is not None:
            stream.retry.fate(Fate.parse(message.body).state, self.timer.now)
            if stream.state.over:
                self._end(stream)
        if ident in self._calls:
            self._calls.answer(message, self.timer.now)

    def _error_of_sending(self, message: Message) -> None:
        """Handles an error about a sent message, such as `duplicate_id`; it may end the stream."""
        stream = self._streams.get(message.body.get("about") or b"")
        if stream is not None:
            error, attempt = from_body(message.body), message.header.attempt
            stream.state.error = stream.retry.error_of_sending(error, attempt)
            if stream.state.over:
                self._end(stream)

    def _identified(self, peer: Peer) -> None:
        """Handles the broker's boot number and its number (link) of this connection.

        Messages that were sent to another broker process or connection are lost.
        """
        for stream in list(self._streams.values()):
            stream.retry.identified(peer, self.timer.now)
            self._retry(stream)
        self._calls.identified(peer, self.timer.now)

    # ---- due work --------------------------------------------------------------------------------

    def _tick(self) -> None:
        timer, streams = self.timer, self._streams.values()
        if timer.lost or (self._dealer.handshake.hopeless and timer.heard_at == -math.inf):
            self._give_up()
        elif timer.reconnect_due and (self._calls or any(s.retry.durable for s in streams)):
            self._reconnect()  # streams that are not durable cannot continue on a new connection
        for stream in list(streams):
            self._retry(stream)
        if timer.heard_at > -math.inf:
            self._calls.tick(timer.now)

    def _reconnect(self) -> None:
        self._dealer.replace()
        self.timer.reconnected()
        self._send(Ping())
        for stream in self._streams.values():
            stream.retry.reconnected(self.timer.now)
        self._calls.reconnected(self.timer.now)

    def _give_up(self) -> None:
        known = self.timer.heard_at > -math.inf or self.timer.connected
        self._end_all(self._dealer.no_answer(self.timer.silent, known=known))
        # Drops the unsent messages: a broker that starts later must not get ended requests.
        self._dealer.replace()
        self.timer.reset()

    def _retry(self, stream: OpenStream) -> None:
        """Retries or ends a stream, if this is due."""
        left = stream.left()
        action = stream.retry.tick(self.timer.now, self.timer.heard_at, left)
        if action is Action.SEND:
            self._send_again(stream, left)
        elif action is Action.CANCEL:
            self._send(Cancel(), stream.state.id, stream.owner)
            stream.retry.cancel_sent(self.timer.now)
        elif action is Action.GIVE_UP:
            stream.state.error = BrokerLost(
                f"the deadline passed {-(left or 0):.0f} s ago, and the broker at"
                f" {self._dealer.endpoint} did not end the stream"
            )
        if stream.state.over:
            self._end(stream)

    def _send_again(self, stream: OpenStream, left: float | None) -> None:
        state, why = stream.state, stream.retry.why
        try:
            draft = sent_again(stream.draft, state, left)
            stream.retry.sent_again(self.timer.now)
            parts = encoded_for(stream.owner, draft, state.id, state.attempt)
        except PoolError as error:  # prompt and ids together are too large for a message
            state.error = error
            return
        self._dealer.send(parts)
        stream.acked = len(state.ids)
        self._history.write("resend", id=state.id, why=why)
        self._history.write("sent", id=state.id, attempt=state.attempt, count=len(state.ids))

    # ---- the end ---------------------------------------------------------------------------------

    def _end(self, stream: OpenStream) -> None:
        state = stream.state
        if self._streams.pop(state.id, None) is not None:
            reason = state.result.reason if state.result else getattr(state.error, "code", "")
            self._history.write("end", id=state.id, reason=reason)
            stream.deliver(None)

    def _end_all(self, error: PoolError) -> None:
        for stream in list(self._streams.values()):
            stream.state.error = error
            self._end(stream)
        self._calls.fail(error)
