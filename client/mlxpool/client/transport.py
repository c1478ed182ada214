"""A client's one connection: a thread that owns the socket and serves every stream of the process.

Callers hand it commands through a queue and get frames back through callbacks, which run on this
thread and must not wait. When something is sent again is decided in `resend`.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpool.client import request
from mlxpool.client.calls import Calls, OnReply
from mlxpool.client.retry import Course, Pace, Step, Watch
from mlxpool.client.socket import Port
from mlxpool.client.stream import Delta, StreamState
from mlxpool.common.errors import BadRequest, BrokerLost, PoolError, Unauthorized
from mlxpool.common.paths import default_run_dir
from mlxpool.common.protocol import deltas, frames, kinds
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import Credentials

ACK_IDS = 64  # ids read before an ack goes out; the rest follows with the next ping

OnDelta = Callable[[Delta], None]
OnEnd = Callable[[], None]


class Stream:
    """One stream as the link sees it; `read` is told by its reader and acknowledged."""

    def __init__(self, state: StreamState, on_delta: OnDelta, on_end: OnEnd) -> None:
        self.state = state
        self.on_delta = on_delta
        self.on_end = on_end
        self.course = Course(state, Pace())
        self.body: Mapping[str, Any] = {}
        self.blobs: Sequence[bytes] = ()
        self.deadline: float | None = None  # monotonic; the user's own
        self.read = 0  # ids the reader has taken; written by its thread alone
        self.acked = 0  # ids of which the broker knows that we have them

    def left(self) -> float | None:
        """Seconds to the user's deadline; None: the user gave none."""
        return None if self.deadline is None else self.deadline - time.monotonic()


class Link:
    """Starts its thread at the first command; `close` ends it."""

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        pace: Pace | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises ValueError for a run directory whose path is too long for a socket."""
        self._credentials = credentials
        self.endpoint = endpoint or sockets.ipc(Path(run_dir or default_run_dir()), "front")
        self.pace = pace or Pace()
        self._watch = Watch(self.pace, time.monotonic())
        self._ping_at = self._tick_at = 0.0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[bytes, Stream] = {}
        self._calls = Calls(self.pace)
        self._history = History("client")
        self._closing = False
        self._lock = threading.Lock()
        self._port: Port | None = None
        self._thread: threading.Thread | None = None

    # ---- from any thread -----------------------------------------------------------------------

    def open(self, stream: Stream, body: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Send `generate`. Raises TooLarge when the request cannot travel."""
        state = stream.state
        parts = frames.encode(Header(kinds.GENERATE, state.id, 0, state.attempt), body, blobs)
        seconds = request.deadline(body)
        stream.deadline = None if seconds is None else time.monotonic() + seconds
        stream.body, stream.blobs = body, blobs
        stream.course = Course(state, self.pace, body.get("durable") is not False)

        def command(port: Port) -> None:
            self._history.write("submit", id=state.id)
            self._streams[state.id] = stream
            port.send(parts)
            stream.course.sent(self._watch.now)
            self._history.write("sent", id=state.id, attempt=state.attempt, count=0)

        self._do(command)

    def cancel(self, stream: Stream) -> None:
        """End a stream whose reader has left. A closed client has ended it already."""
        ident = stream.state.id

        def command(port: Port) -> None:
            if self._streams.get(ident) is stream:
                port.send(frames.encode(Header(kinds.CANCEL, ident), {}))
                stream.course.cancel(self._watch.now)

        with contextlib.suppress(BrokerLost):
            self._do(command)

    def ask(
        self,
        kind: str,
        body: Mapping[str, Any],
        on_reply: OnReply,
        request_id: bytes | None = None,
        blobs: Sequence[bytes] = (),
    ) -> bytes:
        """Send a call whose answer goes to `on_reply`; returns its id.

        Raises BadRequest for a `request_id` that is none.
        """
        ident = os.urandom(frames.ID_BYTES) if request_id is None else request_id
        if not isinstance(ident, bytes) or len(ident) != frames.ID_BYTES:
            raise BadRequest(
                f"a request's id is {frames.ID_BYTES} bytes, got {ident!r:.60};"
                " of hexadecimal digits make them with bytes.fromhex"
            )
        parts = frames.encode(Header(kind, ident, 0, 0), body, blobs)

        def command(port: Port) -> None:
            self._calls.ask(ident, kind, parts, on_reply, port.send, self._watch.now)
            if kind == kinds.CANCEL and ident in self._streams:
                self._streams[ident].course.cancel(self._watch.now)

        self._do(command)
        return ident

    def forget(self, ident: bytes) -> None:
        """The caller no longer waits for this answer."""
        self._do(lambda _: self._calls.forget(ident))

    def took(self, stream: Stream, ids: int) -> None:
        """The reader took so many more ids."""
        stream.read += ids
        if stream.read - stream.acked >= ACK_IDS:
            self._do(self._ack)

    def close(self) -> None:
        """End the thread; streams that are open are cancelled, and end here with `broker_lost`."""
        with self._lock:
            thread, self._thread, self._closing = self._thread, None, True
        if self._port is not None:
            self._port.nudge()
        if thread is None:
            self._history.close()
        elif thread is not threading.current_thread():
            thread.join(timeout=5)

    def _do(self, command: Callable[[Port], None]) -> None:
        with self._lock:
            if self._closing:
                raise BrokerLost("the client is closed")
            if self._port is None:
                self._port = Port(self.endpoint, self._credentials)
            port = self._port
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(port,), name="mlxpool", daemon=True
                )
                self._thread.start()
            self._commands.put(lambda: command(port))
        port.nudge()

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self, port: Port) -> None:
        try:
            while not self._closing:
                self._turn(port)
            self._obey()  # such as the cancel of a stream left early
            for ident in self._streams:  # nobody reads them any more
                port.send(frames.encode(Header(kinds.CANCEL, ident), {}))
            port.flush()
        finally:
            self._closing = True
            self._end_all(BrokerLost("the client was closed before the stream ended"))
            port.close()
            self._history.close()

    def _turn(self, port: Port) -> None:
        """Everything is read before anything is judged: we may be the ones who were late."""
        waiting = self._waiting()
        soon = min(self._ping_at, self._tick_at) - time.monotonic()
        port.wait(soon if waiting else None)
        now = time.monotonic()
        self._watch.turn(now)
        if port.connected() and waiting:
            self._ping(port)  # its `pong` tells whether streams have to be sent again
        if port.refusal and waiting:
            self._end_all(Unauthorized(port.refusal))
        if not waiting:
            self._watch.idle()
            self._ping_at, self._tick_at = now + self.pace.ping, now + self.pace.tick
        self._obey()
        for parts in port.received():
            self._watch.heard()
            try:
                self._handle(port, frames.decode(parts))
            except (PoolError, KeyError, TypeError, ValueError):
                continue  # a frame that we cannot read is as good as lost: `pos` will tell
        if now >= self._tick_at:
            self._tick_at = now + self.pace.tick
            self._tick(port)
        if now >= self._ping_at:
            self._ping_at = now + self.pace.ping
            self._ack(port)
            self._ping(port)

    def _waiting(self) -> bool:
        return bool(self._streams or self._calls)

    def _obey(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _handle(self, port: Port, message: Message) -> None:
        kind, ident = message.kind, message.header.id
        stream = self._streams.get(ident or b"")
        if kind == kinds.DELTAS:
            for row in deltas.unpack_deltas(message):
                self._row(port, row)
        elif kind == kinds.PONG:
            self._at_home(port, int(message.body["boot"]), int(message.body["link"]))
        elif kind == kinds.FATE:
            self._fate(message)
        elif stream is not None:
            self._frame(port, stream, message)
        elif ident in self._calls:
            self._calls.answer(message, self._watch.now)
        elif kind == kinds.ERROR:
            self._about(message)

    # ---- streams -------------------------------------------------------------------------------

    def _row(self, port: Port, row: deltas.Delta) -> None:
        stream = self._streams.get(row.id)
        if stream is not None:
            body = {"text": row.text, "logprobs": row.logprobs, "facts": row.facts}
            header = Header(kinds.DELTA, row.id, 0, row.attempt, row.pos)
            self._frame(port, stream, Message(header, body, (row.ids,)))

    def _frame(self, port: Port, stream: Stream, message: Message) -> None:
        state, course, had = stream.state, stream.course, stream.state.accepted
        left = stream.left() if message.kind == kinds.ERROR else None
        delta = course.receive(message, self._watch.now, left)
        if delta is not None:
            self._give(stream, delta)
        if state.over:
            self._end(stream)
        elif course.due <= self._watch.now:
            self._step(port, stream)
        elif state.accepted and not had:
            where = {"boot": state.boot, "link": state.link}
            self._history.write("accepted", id=state.id, attempt=state.attempt, **where)
            self._at_home(port, state.boot, state.link)

    def _give(self, stream: Stream, delta: Delta) -> None:
        if self._history.on:
            state = stream.state
            what = {"id": state.id, "attempt": state.attempt, "pos": delta.pos}
            self._history.write("taken", **what, ids=list(delta.ids))
        stream.on_delta(delta)

    def _step(self, port: Port, stream: Stream) -> None:
        """Do what is due for one stream."""
        left = stream.left()
        step = stream.course.tick(self._watch.now, self._watch.heard_at, left)
        if step is Step.SEND:
            self._send_again(port, stream, left)
        elif step is Step.CANCEL:
            port.send(frames.encode(Header(kinds.CANCEL, stream.state.id), {}))
            stream.course.cancel(self._watch.now)
        elif step is Step.GIVE_UP:
            stream.state.error = BrokerLost(
                f"the deadline passed {-(left or 0):.0f} s ago, and the broker at {self.endpoint}"
                " did not end the stream"
            )
        if stream.state.over:
            self._end(stream)

    def _send_again(self, port: Port, stream: Stream, left: float | None) -> None:
        state, why = stream.state, stream.course.why
        body, blobs = request.again(stream.body, stream.blobs, state, left)
        stream.course.sent_again(self._watch.now)
        try:
            parts = frames.encode(Header(kinds.GENERATE, state.id, 0, state.attempt), body, blobs)
        except PoolError as error:  # prompt and ids together became too large to travel
            state.error = error
            return
        port.send(parts)
        stream.acked = len(state.ids)
        self._history.write("resend", id=state.id, why=why)
        self._history.write("sent", id=state.id, attempt=state.attempt, count=len(state.ids))

    def _about(self, message: Message) -> None:
        """An error that ends no stream by its header, such as `duplicate_id`."""
        stream = self._streams.get(message.body.get("about") or b"")
        if stream is not None:
            stream.state.error = stream.course.about(message)
            if stream.state.over:
                self._end(stream)

    def _end(self, stream: Stream) -> None:
        state = stream.state
        if self._streams.pop(state.id, None) is not None:
            reason = state.result.reason if state.result else getattr(state.error, "code", "")
            self._history.write("end", id=state.id, reason=reason)
            stream.on_end()

    def _ack(self, port: Port) -> None:
        """Only what this connection's broker has sent may be acknowledged to it."""
        have = []
        for stream in self._streams.values():
            if stream.state.accepted and stream.read > stream.acked:
                stream.acked = stream.read
                have.append([stream.state.id, stream.read])
        if have:
            port.send(frames.encode(Header(kinds.ACK), {"have": have}))

    def _fate(self, message: Message) -> None:
        ident = message.header.id
        stream = self._streams.get(ident or b"")
        if stream is not None:
            stream.course.fate(str(message.body.get("state")), self._watch.now)
            if stream.state.over:
                self._end(stream)
        if ident in self._calls:
            self._calls.answer(message, self._watch.now)

    # ---- the connection ------------------------------------------------------------------------

    def _at_home(self, port: Port, boot: int, link: int) -> None:
        """What was sent to another broker process, or on a connection that is no more, is lost."""
        for stream in list(self._streams.values()):
            stream.course.at_home(boot, link, self._watch.now)
            self._step(port, stream)
        self._calls.at_home((boot, link), port.send, self._watch.now)

    def _ping(self, port: Port) -> None:
        if self._waiting():
            port.send(frames.encode(Header(kinds.PING)))

    def _tick(self, port: Port) -> None:
        watch = self._watch
        if watch.lost or (port.hopeless and watch.heard_at == -math.inf):
            self._give_up(port)
        elif watch.move_due and self._gains():
            self._move(port)
        for stream in list(self._streams.values()):
            self._step(port, stream)
        if watch.heard_at > -math.inf:
            self._calls.tick(port.send, watch.now)

    def _gains(self) -> bool:
        """Whether a new connection helps anybody."""
        return bool(self._calls) or any(s.course.durable for s in self._streams.values())

    def _move(self, port: Port) -> None:
        port.replace()
        self._watch.moved()
        self._ping(port)
        for stream in self._streams.values():
            stream.course.moved(self._watch.now)
        self._calls.moved(port.send, self._watch.now)

    def _give_up(self, port: Port) -> None:
        known = self._watch.heard_at > -math.inf
        advice = "" if known else "; start one with `mlxpool serve`"
        silence = f"no broker answers at {self.endpoint} for {self._watch.silent:.0f} s"
        self._end_all(Unauthorized(port.trouble) if port.trouble else BrokerLost(silence + advice))
        port.replace()  # or a broker that comes later would find what nobody waits for
        self._watch.idle()

    def _end_all(self, error: PoolError) -> None:
        for stream in list(self._streams.values()):
            stream.state.error = error
            self._end(stream)
        self._calls.fail(error)
