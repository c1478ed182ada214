"""A client's one connection: a thread that owns the socket and serves every stream of the process.

Callers hand it commands through a queue and get frames back through callbacks, which run on this
thread and must not wait.
"""

from __future__ import annotations

import math
import os
import queue
import socket as sockets_of_the_system
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from mlxpool.client.stream import Delta, StreamState
from mlxpool.common import sockets, wire
from mlxpool.common.errors import BrokerLost, PoolError, from_body
from mlxpool.common.paths import default_run_dir
from mlxpool.common.wire import Header, Message

PING = 1.0  # seconds between signs of life while there is something to wait for
ACK_IDS = 64  # ids read before an ack goes out; the rest follows with the next ping
BROKER_GRACE = 60.0  # seconds of silence after which the client ends its streams itself
RETRY_MS = 10  # until a full socket is tried again
CONNECT_GRACE = 5.0  # the same, as long as nothing was ever heard

OnDelta = Callable[[Delta], None]
OnEnd = Callable[[], None]
OnReply = Callable[[Message | PoolError], None]


class Stream:
    """One stream as the link sees it; `read` is told by its reader and acknowledged."""

    def __init__(self, state: StreamState, on_delta: OnDelta, on_end: OnEnd) -> None:
        self.state = state
        self.on_delta = on_delta
        self.on_end = on_end
        self.read = 0  # ids the reader has taken; written by its thread alone
        self.acked = 0


class Link:
    """Starts its thread at the first command; `close` ends it."""

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        *,
        broker_grace: float = BROKER_GRACE,
        connect_grace: float = CONNECT_GRACE,
    ) -> None:
        """Raises ValueError for a run directory whose path is too long for a socket."""
        self.endpoint = endpoint or sockets.ipc(Path(run_dir or default_run_dir()), "front")
        self.broker_grace, self.connect_grace = broker_grace, connect_grace
        self.heard_at = 0.0  # monotonic; 0: never
        self._asked_at = 0.0  # since when we wait for a sign of life
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[bytes, Stream] = {}
        self._replies: dict[bytes, OnReply] = {}
        self._unsent: deque[Sequence[bytes]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._wake_end = sockets_of_the_system.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)

    # ---- from any thread -----------------------------------------------------------------------

    def open(self, stream: Stream, body: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Send `generate`. Raises TooLarge when the request cannot travel."""
        state = stream.state
        parts = wire.encode(Header(wire.GENERATE, state.id, 0, state.attempt), body, blobs)

        def command() -> None:
            self._streams[state.id] = stream
            self._send(parts)

        self._do(command)

    def cancel(self, request_id: bytes, on_reply: OnReply | None = None) -> None:
        """Send `cancel`; its `fate` goes to `on_reply`."""
        self.ask(wire.CANCEL, {}, on_reply, request_id)

    def ask(
        self,
        kind: str,
        body: Mapping[str, Any],
        on_reply: OnReply | None,
        request_id: bytes | None = None,
        blobs: Sequence[bytes] = (),
    ) -> bytes:
        """Send a call whose answer goes to `on_reply`; returns its id."""
        ident = request_id or os.urandom(wire.ID_BYTES)
        parts = wire.encode(Header(kind, ident, 0, 0), body, blobs)

        def command() -> None:
            if on_reply is not None:
                self._replies[ident] = on_reply
            self._send(parts)

        self._do(command)
        return ident

    def forget(self, ident: bytes) -> None:
        """The caller no longer waits for this answer."""
        self._do(lambda: self._replies.pop(ident, None) and None)

    def took(self, stream: Stream, ids: int) -> None:
        """The reader took so many more ids."""
        stream.read += ids
        if stream.read - stream.acked >= ACK_IDS:
            self._do(self._ack)

    def close(self) -> None:
        """End the thread; streams that are open end with `broker_lost`."""
        with self._lock:
            thread, self._thread, self._closing = self._thread, None, True
        self._nudge()
        if thread is None:
            self._free()
        elif thread is not threading.current_thread():
            thread.join(timeout=5)

    def _do(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise BrokerLost("the client is closed")
            if self._thread is None:
                self._socket = sockets.dealer(self._context, self.endpoint)
                self._thread = threading.Thread(target=self._run, name="mlxpool", daemon=True)
                self._thread.start()
            self._commands.put(command)
        self._nudge()

    def _nudge(self) -> None:
        try:
            self._wake_end.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # nudged enough, or closed

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ping_at = time.monotonic() + PING
        try:
            while not self._closing:
                waiting = bool(self._streams or self._replies)
                timeout = math.ceil(max(0.0, ping_at - time.monotonic()) * 1000)
                if self._unsent:
                    timeout = min(timeout, RETRY_MS)
                poller.poll(timeout if waiting or self._unsent else None)
                self._flush()
                self._empty_wake()
                if not (self._streams or self._replies):
                    # Nothing was waited for, so no silence counts that was before.
                    self._asked_at, ping_at = 0.0, time.monotonic() + PING
                while not self._commands.empty():
                    self._commands.get()()
                self._read()
                now = time.monotonic()
                if now >= ping_at:
                    ping_at = now + PING
                    self._tick(now)
            while not self._commands.empty():  # such as the cancel of a stream left early
                self._commands.get()()
        finally:
            self._end_all(BrokerLost("the client was closed before the stream ended"))
            self._socket.close(linger=200)
            self._free()

    def _free(self) -> None:
        self._context.term()
        self._wake.close()
        self._wake_end.close()

    def _empty_wake(self) -> None:
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _send(self, parts: Sequence[bytes]) -> None:
        if not self._asked_at:
            self._asked_at = time.monotonic()
        self._unsent.append(parts)
        self._flush()

    def _flush(self) -> None:
        """Send in order what the socket takes; the rest is tried again in a moment."""
        while self._unsent:
            try:
                self._socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _read(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.heard_at, self._asked_at = time.monotonic(), 0.0
            try:
                self._handle(wire.decode(parts))
            except (PoolError, KeyError, TypeError, ValueError):
                continue  # a frame that we cannot read is as good as lost: `pos` will tell

    def _handle(self, message: Message) -> None:
        ident = message.header.id
        if message.kind == wire.DELTAS:
            for row in wire.unpack_deltas(message):
                self._grouped(row)
        elif message.kind == wire.PONG:
            self._check_home(int(message.body["boot"]), int(message.body["link"]))
        elif ident is not None and ident in self._streams and message.kind != wire.FATE:
            self._frame(self._streams[ident], message)
        elif ident is not None and ident in self._replies:
            reply = self._replies.pop(ident)
            reply(from_body(message.body) if message.kind == wire.ERROR else message)
        elif message.kind == wire.ERROR:
            self._about(message)

    def _frame(self, stream: Stream, message: Message) -> None:
        delta = stream.state.receive(message)
        if delta is not None:
            stream.on_delta(delta)
        if stream.state.over:
            self._end(stream)

    def _grouped(self, row: wire.Delta) -> None:
        stream = self._streams.get(row.id)
        if stream is None or row.attempt != stream.state.attempt:
            return
        body = {"text": row.text, "logprobs": row.logprobs, "facts": row.facts}
        delta = stream.state.take(row.pos, body, wire.unpack_ids(row.ids))
        if delta is not None:
            stream.on_delta(delta)
        if stream.state.over:
            self._end(stream)

    def _about(self, message: Message) -> None:
        """An error that ends no stream by its header, such as `duplicate_id` at its start."""
        stream = self._streams.get(message.body.get("about") or b"")
        if stream is not None and not stream.state.boot:
            self._fail(stream, from_body(message.body))

    def _check_home(self, boot: int, link: int) -> None:
        """Streams of another broker process, or of a connection that is no more, are gone."""
        for stream in list(self._streams.values()):
            state = stream.state
            if state.boot and (state.boot, state.link) != (boot, link):
                what = "broker was restarted" if state.boot != boot else "connection was lost"
                self._fail(stream, BrokerLost(f"the {what}; send the request again"))

    def _tick(self, now: float) -> None:
        self._ack()
        if self._streams or self._replies:
            self._send(wire.encode(Header(wire.PING, None, 0, 0)))
        grace = self.broker_grace if self.heard_at else min(self.connect_grace, self.broker_grace)
        if self._asked_at and now - self._asked_at > grace:
            silent = now - self._asked_at
            self._end_all(
                BrokerLost(
                    f"no broker answers at {self.endpoint} for {silent:.0f} s;"
                    " start one with `mlxpool serve`"
                )
            )
            self._asked_at = 0.0

    def _ack(self) -> None:
        have = []
        for stream in self._streams.values():
            if stream.read > stream.acked:
                stream.acked = stream.read
                have.append([stream.state.id, stream.read])
        if have:
            self._send(wire.encode(Header(wire.ACK, None, 0, 0), {"have": have}))

    def _fail(self, stream: Stream, error: PoolError) -> None:
        stream.state.error = error
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        self._streams.pop(stream.state.id, None)
        stream.on_end()

    def _end_all(self, error: PoolError) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, error)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply(error)
