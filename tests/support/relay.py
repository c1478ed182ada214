"""A TCP relay in the test process that simulates a bad network. Loopback only.

A single thread moves the bytes of all connections; any other thread may call the controls.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxpool.common.closing import Closing
from support.pool import PATIENCE

Target = tuple[str, str] | tuple[str, str, int]  # ("ipc", path) or ("tcp", host, port)

CHUNK_BYTES = 64 * 1024
MAX_HELD_BYTES = 1024 * 1024  # bytes of a direction; when they are buffered, its source is not read
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST and drop unsent bytes


@dataclass(eq=False)
class Pipe:
    """One direction of a connection; `chunks` are (time to send, bytes)."""

    source: socket.socket
    sink: socket.socket
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)
    held: int = 0
    ended: bool = False  # the source has sent all its bytes
    may_send_at: float = 0.0  # used only if the rate is limited

    def read(self, ready_at: float) -> None:
        data = self.source.recv(CHUNK_BYTES)
        self.ended = not data
        if data:
            self.chunks.append((ready_at, data))
            self.held += len(data)

    def write(self, now: float, rate: float) -> None:
        ready_at, data = self.chunks.popleft()
        most = len(data) if not rate else max(1, min(len(data), int(rate / 20)))
        sent = self.sink.send(data[:most])
        self.held -= sent
        if rate:
            self.may_send_at = now + sent / rate
        if sent < len(data):
            self.chunks.appendleft((ready_at, data[sent:]))

    def due(self) -> float | None:
        """Returns the time of the next write; None if there are no bytes to write."""
        return max(self.chunks[0][0], self.may_send_at) if self.chunks else None


class Relay(Closing):
    """Accepts on an ephemeral port and forwards to `target`, with the faults that a test sets."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self._pipes: list[Pipe] = []
        self._frozen = self._closing = False
        self._delay = self._rate = 0.0
        self._wake, self._wake_end = socket.socketpair()
        self._wake.setblocking(False)
        self._commands: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    # ---- controls ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Resets every connection; new connections are accepted as before."""
        self._do(self._reset_all)

    def freeze(self) -> None:
        """Stops moving bytes without closing connections, as if they were half-open."""
        self._do(lambda: setattr(self, "_frozen", True))

    def thaw(self) -> None:
        """Continues after `freeze`."""
        self._do(lambda: setattr(self, "_frozen", False))

    def delay(self, seconds: float) -> None:
        """Delays every chunk that arrives from now on."""
        self._do(lambda: setattr(self, "_delay", seconds))

    def drip(self, bytes_per_second: float) -> None:
        """Limits the rate of each direction; with 0 there is no limit."""
        self._do(lambda: setattr(self, "_rate", bytes_per_second))

    def close(self) -> None:
        """Resets all connections and ends the thread."""
        if self._closing:
            return
        self._do(lambda: setattr(self, "_closing", True))
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the relay's thread did not end"
        for socket_ in (self._listener, self._wake, self._wake_end):
            socket_.close()

    def _do(self, command: Callable[[], None]) -> None:
        """Runs a command in the relay's thread and waits for it."""
        done = threading.Event()
        self._commands.append((command, done))
        self._wake_end.send(b"\0")
        assert done.wait(PATIENCE), "the relay's thread does not answer"

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        finally:
            self._reset_all()

    def _step(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            timeout = None if self._frozen else self._register(selector, time.monotonic())
            ready: dict[object, int] = {key.fileobj: mask for key, mask in selector.select(timeout)}
        if self._wake in ready:
            self._wake.recv(4096)
        while self._commands:
            command, done = self._commands.popleft()
            command()
            done.set()
        if self._frozen or self._closing:
            return
        if self._listener in ready:
            self._accept()
        for pipe in list(self._pipes):
            if pipe in self._pipes:
                self._move(pipe, ready)

    def _register(self, selector: selectors.BaseSelector, now: float) -> float | None:
        """Registers the sockets to wait for; returns the timeout in seconds, or None."""
        selector.register(self._listener, selectors.EVENT_READ)
        masks: dict[socket.socket, int] = {}
        soon: list[float] = []
        for pipe in self._pipes:
            due = pipe.due()
            if not pipe.ended and pipe.held < MAX_HELD_BYTES:
                masks[pipe.source] = masks.get(pipe.source, 0) | selectors.EVENT_READ
            if due is not None and due <= now:
                masks[pipe.sink] = masks.get(pipe.sink, 0) | selectors.EVENT_WRITE
            elif due is not None:
                soon.append(due - now)
        for socket_, mask in masks.items():
            selector.register(socket_, mask)
        return min(soon, default=None)

    def _accept(self) -> None:
        try:
            inner, _ = self._listener.accept()
        except BlockingIOError:
            return
        try:
            outer = self._connect()
        except OSError:  # the target does not listen
            _reset(inner)
            return
        for connection in (inner, outer):
            connection.setblocking(False)
        self._pipes += [Pipe(inner, outer), Pipe(outer, inner)]

    def _connect(self) -> socket.socket:
        if self._target[0] == "ipc":
            outer = socket.socket(socket.AF_UNIX)
            try:
                outer.connect(self._target[1])
            except OSError:
                outer.close()
                raise
            return outer
        _, host, port = (*self._target, 0)[:3]
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def _move(self, pipe: Pipe, ready: dict[object, int]) -> None:
        now, due = time.monotonic(), pipe.due()
        try:
            if ready.get(pipe.source, 0) & selectors.EVENT_READ and not pipe.ended:
                with contextlib.suppress(BlockingIOError):
                    pipe.read(now + self._delay)
            if ready.get(pipe.sink, 0) & selectors.EVENT_WRITE and due is not None and due <= now:
                with contextlib.suppress(BlockingIOError):
                    pipe.write(now, self._rate)
        except OSError:
            self._drop(pipe)
            return
        if pipe.ended and not pipe.chunks:
            self._drop(pipe)

    def _drop(self, pipe: Pipe) -> None:
        """Resets both sides of a connection."""
        for connection in (pipe.source, pipe.sink):
            _reset(connection)
        self._pipes = [
            other for other in self._pipes if other.source not in (pipe.source, pipe.sink)
        ]

    def _reset_all(self) -> None:
        while self._pipes:
            self._drop(self._pipes[0])


def _reset(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
