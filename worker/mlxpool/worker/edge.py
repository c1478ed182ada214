"""The worker's main thread: the broker's socket, the beats, signals and the end. No MLX.

Nothing it does can wait for the compute thread.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import socket as sockets_of_the_system
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import psutil
import zmq

from mlxpool.common import sockets, wire
from mlxpool.common.config import WorkerConfig
from mlxpool.common.errors import Internal, PoolError, TooLarge
from mlxpool.common.wire import Delta, Header, Message
from mlxpool.worker.compute import Compute
from mlxpool.worker.mail import Drop, Key, Loaded, Opened, Outbound, Rows, Unusable
from mlxpool.worker.prepare import Answer, Prepared, Preparer
from mlxpool.worker.progress import Progress, monotonic

log = logging.getLogger("mlxpool.worker")

BEAT = 1.0  # seconds
RETRY_MS = 10
WELCOME_GRACE = 5.0  # seconds


class Edge:
    """Build it, `run` it; the result is the exit code."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = sockets.dealer(self.context, config.endpoint)
        self.wake, self._wake_end = sockets_of_the_system.socketpair()
        self.wake.setblocking(False)
        self._wake_end.setblocking(False)
        self.mail: deque[Outbound | Prepared | Answer] = deque()
        self.progress = Progress(self._nudge, monotonic)
        self.compute = Compute(config, self.progress, self._post)
        self.preparer: Preparer | None = None
        self.epoch = 0  # 0: no welcome yet
        self.capacity = 0
        self.works = 0  # `work` frames of this epoch
        self.alive: set[Key] = set()  # received and not ended
        self.preparing: set[Key] = set()
        self.cancelled: set[Key] = set()  # cancelled while they were prepared
        self.positions: dict[Key, int] = {}  # where the ids of a run in preparation begin
        self.unsent: deque[list[bytes]] = deque()
        self.early: list[tuple[str, Mapping[str, Any]]] = []  # said before the welcome
        self.beat_at = 0.0
        self.phase = ""
        self.exit_code: int | None = None
        self.process = psutil.Process()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the broker says stop, its end of stdin closes, or SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end(0))
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        poller = zmq.Poller()
        for source in (self.socket, self.wake, sys.stdin.fileno()):
            poller.register(source, zmq.POLLIN)
        self.compute.start()
        while self.exit_code is None:
            readable = dict(poller.poll(self._timeout_ms()))
            if sys.stdin.fileno() in readable and not os.read(sys.stdin.fileno(), 4096):
                log.warning("the broker is gone")
                self._end(0)
            self._empty_wake()
            self._read_mail()
            self._read_socket()
            self._beat()
            self._flush()
        return self._close()

    def _timeout_ms(self) -> int:
        wait = math.ceil(max(0.0, self.beat_at + BEAT - monotonic()) * 1000)
        return min(wait, RETRY_MS) if self.unsent else wait

    def _end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code

    def _close(self) -> int:
        if self.epoch and not self.exit_code:
            self._send(wire.BYE, {})
        self._flush()
        self.socket.close()
        self.context.term()
        return self.exit_code or 0

    # ---- from the other threads ----------------------------------------------------------------

    def _post(self, mail: Outbound | Prepared | Answer) -> None:
        self.mail.append(mail)
        self._nudge()

    def _nudge(self) -> None:
        try:
            self._wake_end.send(b"\0")
        except BlockingIOError:
            pass  # it has been nudged enough

    def _empty_wake(self) -> None:
        try:
            while self.wake.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _read_mail(self) -> None:
        while self.mail:
            mail = self.mail.popleft()
            if isinstance(mail, Rows):
                self.compute.room.release()
                self._deliver(list(mail.rows))
            elif isinstance(mail, Prepared):
                self._prepared(mail)
            elif isinstance(mail, Answer):
                self._answer(mail)
            elif isinstance(mail, Opened):
                self._opened(mail)
            elif isinstance(mail, Loaded):
                self.capacity = mail.sequences
                self._credit()
            else:
                self._unusable(mail)

    def _answer(self, answer: Answer) -> None:
        try:
            self._send(wire.TOKENS, answer.body, id=answer.id, blobs=answer.blobs)
        except TooLarge as error:
            self._send(wire.TOKENS, error.body(), id=answer.id)

    def _opened(self, opened: Opened) -> None:
        self.preparer = Preparer(opened, self._post)
        self.preparer.start()
        self._hello(opened.digest, opened.context)

    def _unusable(self, unusable: Unusable) -> None:
        if self.preparer is None:
            self._hello("", 0)
        self._flush()
        # The broker takes `bye` only from an epoch it has given: wait for the welcome.
        give_up = monotonic() + WELCOME_GRACE
        while not self.epoch and monotonic() < give_up:
            self.socket.poll(RETRY_MS)
            self._read_socket()
        self._send(wire.BYE, {"error": dict(unusable.error)})
        self._end(1)

    def _hello(self, digest: str, context: int) -> None:
        body = {
            "slot": self.config.slot,
            "token": self.config.token,
            "pid": os.getpid(),
            "start_time": self.process.create_time(),
            "host": platform.node(),
            "digest": digest,
            "context": context,
        }
        self._put(wire.encode(Header(wire.HELLO), body))

    def _prepared(self, prepared: Prepared) -> None:
        self.preparing.discard(prepared.key)
        if prepared.key in self.cancelled:
            self.cancelled.discard(prepared.key)
            self._refuse(prepared.key, {"text": "", "reason": "cancelled", "usage": {}})
        elif prepared.admit is not None:
            self.compute.tell(prepared.admit)
        elif prepared.error is not None:
            self._refuse(prepared.key, prepared.error.body())

    def _refuse(self, key: Key, end: dict[str, Any]) -> None:
        """End a run that never reached the compute thread."""
        self._deliver([Delta(*key, self.positions.pop(key, 0), "", b"", end=end)])

    def _deliver(self, rows: list[Delta]) -> None:
        ended = {(row.id, row.attempt) for row in rows if row.end is not None}
        self.alive -= ended
        for key in ended:
            self.positions.pop(key, None)
        for group in wire.batches(rows):
            body, blob = wire.pack_deltas(group)
            self._send(wire.DELTAS, body, blobs=(blob,))
        if ended:
            self._credit()

    # ---- from the broker -----------------------------------------------------------------------

    def _read_socket(self) -> None:
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode(parts, max_body=wire.MAX_BACK_BODY)
            except PoolError as error:
                log.warning("bad frame from the broker", extra={"why": str(error)})
                continue
            self._guarded(message)

    def _guarded(self, message: Message) -> None:
        """One message that we stumble over costs its own request, never the worker."""
        try:
            self._handle(message)
        except Exception as error:
            log.exception("a message failed", extra={"kind": message.kind})
            key = (message.header.id or b"", message.header.attempt)
            if message.kind == wire.WORK and key in self.preparing:
                self.preparing.discard(key)
                self._refuse(key, Internal(f"the request could not be read: {error!r}").body())

    def _handle(self, message: Message) -> None:
        kind, header = message.kind, message.header
        key = (header.id or b"", header.attempt)
        if kind == wire.WELCOME:
            self._welcome(header.epoch)
        elif kind == wire.STOP:
            self._end(0)
        elif header.epoch != self.epoch:
            log.warning("frame of another epoch", extra={"kind": kind})
        elif kind == wire.WORK:
            self._work(message, key)
        elif kind in (wire.TOKENIZE, wire.DETOKENIZE) and self.preparer is not None:
            self.preparer.tell(message)
        elif kind == wire.CANCEL:
            self._cancel(key)

    def _welcome(self, epoch: int) -> None:
        self.epoch = epoch
        early, self.early = self.early, []
        for kind, body in early:
            self._send(kind, body)

    def _work(self, message: Message, key: Key) -> None:
        self.works += 1
        self.alive.add(key)
        self.preparing.add(key)
        resume = message.body.get("resume") or {}
        self.positions[key] = int(resume.get("count", 0))
        assert self.preparer is not None, "the broker gives work after the first credit only"
        self.preparer.tell(message)

    def _cancel(self, key: Key) -> None:
        if key in self.preparing:
            self.cancelled.add(key)
        elif key in self.alive:
            self.compute.tell(Drop(key))

    # ---- to the broker -------------------------------------------------------------------------

    def _credit(self) -> None:
        free = max(0, self.capacity - len(self.alive))
        self._send(wire.CREDIT, {"sequences": free, "works": self.works})

    def _beat(self) -> None:
        now = monotonic()
        progress = self.progress
        if not self.epoch or (now < self.beat_at + BEAT and progress.phase == self.phase):
            return
        self.beat_at, self.phase = now, progress.phase
        body = {
            "phase": progress.phase,
            "phase_age_ms": round((now - progress.since) * 1000),
            "progress": progress.count,
            "prefill": progress.in_prefill,
            "step_ms": progress.step_ms,
            "running": progress.running,
            "waiting": progress.waiting + len(self.preparing),
            "memory": {**progress.memory, "rss": self.process.memory_info().rss},
            "prefix": progress.prefix,
        }
        self._send(wire.BEAT, body)

    def _send(
        self,
        kind: str,
        body: Mapping[str, Any],
        *,
        id: bytes | None = None,
        blobs: tuple[bytes, ...] = (),
    ) -> None:
        if not self.epoch:
            self.early.append((kind, body))
            return
        header = Header(kind, id, self.epoch)
        self._put(wire.encode(header, body, blobs, max_body=wire.MAX_BACK_BODY))

    def _put(self, parts: list[bytes]) -> None:
        self.unsent.append(parts)

    def _flush(self) -> None:
        while self.unsent:
            try:
                self.socket.send_multipart(self.unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.unsent.popleft()
