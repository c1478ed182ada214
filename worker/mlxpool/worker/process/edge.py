"""The worker's main thread: the broker's link, the beats, signals and the end. No MLX.

Nothing it does can wait for the compute thread.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
from collections import deque
from collections.abc import Mapping
from typing import Any

import psutil
import zmq

from mlxpool.common.config.schema import WorkerConfig
from mlxpool.common.errors import Internal, TooLarge, from_body
from mlxpool.common.exit_codes import AGAIN, ALONE, REFUSED
from mlxpool.common.progress import Block
from mlxpool.common.protocol import deltas, kinds
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Message
from mlxpool.common.trace import History
from mlxpool.common.transport.keys import Credentials
from mlxpool.worker.compute.messages import (
    Drop,
    DropAll,
    HandBack,
    HandedBack,
    Key,
    Loaded,
    Opened,
    Outbound,
    Rows,
    Unusable,
)
from mlxpool.worker.compute.progress import Progress, monotonic
from mlxpool.worker.compute.thread import Compute
from mlxpool.worker.engine.factory import faults_of
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.prepare import Answer, Prepared, Preparer
from mlxpool.worker.process.resume import count_of
from mlxpool.worker.process.waker import Wake
from mlxpool.worker.testing.frame_faults import FrameFaults

log = logging.getLogger("mlxpool.worker")

BEAT = 1.0  # seconds
WELCOME_GRACE = 5.0  # seconds


class Edge:
    """Build it, `run` it; the result is the exit code."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.history = History(f"worker-{config.slot}")
        faults = faults_of(config, self.history)
        self.faults = FrameFaults(faults)
        credentials = Credentials.of(config.server_key, config.key)
        self.link = Link(config.endpoint, config.token, self.history, credentials)
        self.trouble = ""  # with the connection, as it was told last
        self.wake = Wake()
        self.mail: deque[Outbound | Prepared | Answer] = deque()
        block = Block.open(config.block_fd) if config.block_fd >= 0 else Block.private()
        self.progress = Progress(self.wake.nudge, monotonic, block)
        self.compute = Compute(config, self.progress, self._post, faults)
        self.preparer: Preparer | None = None
        self.generation = 0  # of the link; what was made for an older one is not sent
        self.capacity = 0
        self.works = 0  # `work` frames of this epoch
        self.draining = False
        self.alive: set[Key] = set()  # received and not ended
        self.preparing: set[Key] = set()
        self.cancelled: set[Key] = set()  # cancelled while they were prepared
        self.positions: dict[Key, int] = {}  # where the ids of a run in preparation begin
        self.farewell: Mapping[str, Any] | None = None  # the `bye` to leave with
        self.leave_at = math.inf  # without it, when no welcome came
        self.beat_at = 0.0
        self.phase = ""
        self.exit_code: int | None = None
        self.process = psutil.Process()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the broker says stop, its end of stdin closes, or SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end(0))
        self.wake.on_signals()
        poller = zmq.Poller()
        poller.register(self.wake.end, zmq.POLLIN)
        poller.register(self.link.socket, zmq.POLLIN)
        self.progress.edge_begins()
        self.compute.start()
        while self.exit_code is None:
            poller.poll(self._timeout_ms())
            self._turn(poller)
        return self._close()

    def _turn(self, poller: zmq.Poller) -> None:
        self.progress.edge_turns()
        self.wake.empty()
        self._read_mail()
        self._read_socket()
        now = monotonic()
        if self.link.silent_too_long(now) and self.exit_code is None:
            self._redial(poller, now)
        self.link.turn(now)
        if self.config.dials:
            self._look_at_link()
        self._leave(now)
        self._beat(now)
        self.link.flush()

    def _timeout_ms(self) -> int:
        now = monotonic()
        due = self.beat_at + BEAT if self.link.epoch else now + BEAT
        due = min(due, self.leave_at, self.link.next_wake(now))
        return math.ceil(max(0.0, due - now) * 1000)

    def _look_at_link(self) -> None:
        """A worker of another supervisor ends when its key is refused, or it stays alone."""
        handshake = self.link.handshake
        handshake.succeeded()
        if handshake.trouble != self.trouble:
            self.trouble = handshake.trouble
            if self.trouble:
                log.error(self.trouble)
        if handshake.refusal:
            self._end(REFUSED)
        elif self.link.alone_too_long(self.config.orphan_grace):
            alone = {"endpoint": self.link.endpoint, "seconds": self.config.orphan_grace}
            log.error("no broker answers", extra=alone)
            self._end(ALONE)

    def _redial(self, poller: zmq.Poller, now: float) -> None:
        log.warning("the broker says nothing: calling it again")
        poller.unregister(self.link.socket)
        ended = self.link.redial(now)
        poller.register(self.link.socket, zmq.POLLIN)
        if ended:
            self._drop_all()

    def orphaned(self) -> None:
        """The broker is gone; called by another thread."""
        log.warning("the broker is gone")
        self._end(0)
        self.wake.nudge()

    def _end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code

    def _close(self) -> int:
        if not self.exit_code:
            self._send(kinds.BYE, {})
        self.link.close()
        return self.exit_code or 0

    # ---- from the other threads ----------------------------------------------------------------

    def _post(self, mail: Outbound | Prepared | Answer) -> None:
        self.mail.append(mail)
        self.wake.nudge()

    def _read_mail(self) -> None:
        while self.mail:
            self._take(self.mail.popleft())

    def _take(self, mail: Outbound | Prepared | Answer) -> None:
        if isinstance(mail, Rows):
            self.compute.room.release()
        if isinstance(mail, Opened):
            self._opened(mail)
        elif isinstance(mail, Loaded):
            self.capacity = mail.sequences
            self._credit()
        elif isinstance(mail, Unusable):
            self._unusable(mail)
        elif mail.generation == self.generation:
            self._take_current(mail)

    def _take_current(self, mail: Rows | HandedBack | Prepared | Answer) -> None:
        if isinstance(mail, Rows):
            self._deliver([row for row in mail.rows if (row.id, row.attempt) in self.alive])
        elif isinstance(mail, Prepared):
            self._prepared(mail)
        elif isinstance(mail, Answer):
            self._answer(mail)
        else:
            self._handed_back()

    def _answer(self, answer: Answer) -> None:
        try:
            self._send(kinds.TOKENS, answer.body, id=answer.id, blobs=answer.blobs)
        except TooLarge as error:
            self._send(kinds.TOKENS, error.body(), id=answer.id)

    def _opened(self, opened: Opened) -> None:
        self.preparer = Preparer(opened, self._post)
        self.preparer.start()
        self._hello(opened.digest, opened.context)

    def _unusable(self, unusable: Unusable) -> None:
        """Leave with the reason; the broker takes `bye` only from an epoch it has given."""
        if not self.link.introduced:
            self._hello("", 0)
        self.farewell = unusable.error
        self.leave_at = monotonic() + WELCOME_GRACE

    def _leave(self, now: float) -> None:
        if self.farewell is None or not (self.link.epoch or now >= self.leave_at):
            return
        self._send(kinds.BYE, {"error": dict(self.farewell)})
        self._end(1)

    def _hello(self, digest: str, context: int) -> None:
        hello = {
            "slot": "" if self.config.dials else self.config.slot,
            "model": self.config.name,
            "pid": os.getpid(),
            "start_time": self.process.create_time(),
            "host": platform.node(),
            "digest": digest,
            "context": context,
        }
        self.link.introduce(hello, monotonic())

    def _prepared(self, prepared: Prepared) -> None:
        key = prepared.key
        self.preparing.discard(key)
        if key not in self.alive:
            return  # handed back meanwhile
        if key in self.cancelled:
            self.cancelled.discard(key)
            self._refuse(key, _CANCELLED)
        elif prepared.error is not None:
            self._refuse(key, prepared.error.body())
        elif prepared.admit is not None and not self.draining:
            self.compute.tell(prepared.admit)

    def _refuse(self, key: Key, end: Mapping[str, Any]) -> None:
        """End a run that never reached the compute thread."""
        self._deliver([Delta(*key, self.positions.pop(key, 0), "", b"", end=dict(end))])

    def _deliver(self, rows: list[Delta]) -> None:
        ended = {(row.id, row.attempt) for row in rows if row.end is not None}
        self.alive -= ended
        for key in ended:
            self.positions.pop(key, None)
        for group in deltas.batches(rows):
            self._send_rows(group)
        if ended:
            self._credit()

    def _send_rows(self, rows: list[Delta]) -> None:
        if not self.link.epoch:
            return
        body, blob = deltas.pack_deltas(rows)
        parts = self.link.frame(kinds.DELTAS, body, blobs=(blob,))
        if self.history.on:
            for row in rows:
                self._history_of_row(row)
        if not self.faults.on:
            self.link.put(parts)
            return
        before = max(0, self.link.epoch - 1)
        stale = self.link.frame(kinds.DELTAS, body, blobs=(blob,), epoch=before)
        self.faults.send(self.link, rows, parts, stale)
        self.faults.after(self.link, rows)

    def _history_of_row(self, row: Delta) -> None:
        end = row.end and (row.end.get("code") or row.end.get("reason"))
        self.history.write("deltas", id=row.id, attempt=row.attempt, pos=row.pos, n=row.n, end=end)

    # ---- from the broker -----------------------------------------------------------------------

    def _read_socket(self) -> None:
        while (message := self.link.receive()) is not None:
            self._guarded(message)

    def _guarded(self, message: Message) -> None:
        """One message that we stumble over costs its own request, never the worker."""
        try:
            self._handle(message)
        except Exception as error:
            log.exception("a message failed", extra={"kind": message.kind})
            key = (message.header.id or b"", message.header.attempt)
            if message.kind == kinds.WORK and key in self.preparing:
                self.preparing.discard(key)
                self._refuse(key, Internal(f"the request could not be read: {error!r}").body())

    def _handle(self, message: Message) -> None:
        kind, header = message.kind, message.header
        if kind == kinds.WELCOME:
            self._welcome(message)
        elif kind == kinds.WHO:
            self._who()
        elif kind == kinds.STOP:
            self._stop(message.body)
        elif kind == kinds.HEARD:
            pass  # that it came is all it says
        elif header.epoch != self.link.epoch or not self.link.epoch:
            log.warning("frame of another epoch", extra={"kind": kind})
        else:
            self._handle_current(message, (header.id or b"", header.attempt))

    def _handle_current(self, message: Message, key: Key) -> None:
        kind = message.kind
        if kind == kinds.WORK:
            self._work(message, key)
        elif kind in (kinds.TOKENIZE, kinds.DETOKENIZE) and self.preparer is not None:
            self.preparer.tell(message, self.generation)
        elif kind == kinds.CANCEL:
            self._cancel(key)
        elif kind == kinds.DRAIN:
            self._drain()

    def _stop(self, body: Mapping[str, Any]) -> None:
        error = body.get("error")
        if error is None:
            self._end(AGAIN if body.get("again") else 0)
        elif not self.link.epoch:  # one that serves is told by its connection, not by a word
            log.error("the broker refuses this worker", extra={"why": from_body(error).message})
            self._end(REFUSED)

    def _who(self) -> None:
        if self.link.again(monotonic()):
            log.warning("the broker does not know this connection: saying hello again")
            self._drop_all()

    def _welcome(self, message: Message) -> None:
        if not self.link.welcome(message):
            return
        self._drop_all()
        self.works = 0
        self.beat_at = 0.0
        if self.capacity:
            self._credit()

    def _drop_all(self) -> None:
        """The broker has given everything that we run to somebody else, or will."""
        self.generation += 1
        for keys in (self.alive, self.preparing, self.cancelled):
            keys.clear()
        self.positions.clear()
        self.compute.tell(DropAll(self.generation))

    def _work(self, message: Message, key: Key) -> None:
        self.works += 1
        count = count_of(message)
        if self.history.on:
            self.history.write("work", id=key[0], attempt=key[1], count=count)
        if self.draining:
            self._yield([key])
            return
        self.alive.add(key)
        self.preparing.add(key)
        self.positions[key] = count
        if self.faults.on:
            self.faults.accept(message, key)
        assert self.preparer is not None, "the broker gives work after the first credit only"
        self.preparer.tell(message, self.generation)

    def _cancel(self, key: Key) -> None:
        if key in self.preparing:
            self.cancelled.add(key)
        elif key in self.alive:
            self.compute.tell(Drop(key))

    def _drain(self) -> None:
        if not self.draining:
            self.draining = True
            self.compute.tell(HandBack())

    def _handed_back(self) -> None:
        """The compute thread has stopped, and every row it made is delivered."""
        for key in self.cancelled & self.alive:
            self._refuse(key, _CANCELLED)
        self._yield(sorted(self.alive))
        for keys in (self.alive, self.preparing, self.cancelled):
            keys.clear()
        self.positions.clear()

    def _yield(self, keys: list[Key]) -> None:
        if keys:
            self._send(kinds.YIELD, {"runs": [list(key) for key in keys]})
            for id, attempt in keys:
                self.history.write("yield", id=id, attempt=attempt)
        self._credit()

    # ---- to the broker -------------------------------------------------------------------------

    def _credit(self) -> None:
        free = 0 if self.draining else max(0, self.capacity - len(self.alive))
        self._send(kinds.CREDIT, {"sequences": free, "works": self.works})

    def _beat(self, now: float) -> None:
        progress = self.progress
        if not self.link.epoch or (now < self.beat_at + BEAT and progress.phase == self.phase):
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
            "layout": progress.layout,
            "memory": {**progress.memory, "rss": self.process.memory_info().rss},
            "prefix": progress.prefix,
        }
        if self.config.dials:  # whoever cannot read the progress block is told what is in it
            look = progress.block.read()
            body["look"] = [look.tokens, look.fresh, look.usual_token_ns, look.usual_step_ns]
        self._send(kinds.BEAT, body)

    def _send(
        self,
        kind: str,
        body: Mapping[str, Any],
        *,
        id: bytes | None = None,
        blobs: tuple[bytes, ...] = (),
    ) -> None:
        """Without an epoch nothing is sent: nobody would take it."""
        if self.link.epoch:
            self.link.put(self.link.frame(kind, body, id=id, blobs=blobs))


_CANCELLED: Mapping[str, Any] = {"text": "", "reason": "cancelled", "usage": {}}
