"""The loop of the worker's main thread: polls the link and the mailbox, sends heartbeats, exits.

It never waits for the compute thread, so heartbeats continue whatever that thread does.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from time import monotonic

import psutil
import zmq

from mlxpool.common.config.schema import WorkerConfig
from mlxpool.common.errors import PoolError, from_body
from mlxpool.common.exit_codes import AGAIN, ALONE, REFUSED
from mlxpool.common.protocol import from_client, to_worker
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.from_worker import Beat, Bye, Hello, ProgressSample
from mlxpool.common.protocol.to_worker import Stop, Welcome
from mlxpool.common.transport.waker import Waker
from mlxpool.worker.compute.messages import (
    Answer,
    Loaded,
    Outbound,
    SaveAll,
    StepDeltas,
    Unusable,
)
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.thread import Compute
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.preparation.service import Load
from mlxpool.worker.process.intake import PARSE, Intake, Prepared
from mlxpool.worker.process.link import Link
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.system import load_clock

log = logging.getLogger("mlxpool.worker")

WELCOME_TIMEOUT = 5.0  # seconds that a worker with an unusable model waits to send the error
MAX_SAVE_WITH_RUNS = 1.0  # the most seconds of writing prefixes while streams wait for the end
BEAT_INTERVAL = 1.0  # seconds between two heartbeats
REST_TIME = 2.0  # seconds without a request until `Intake.rest`


class Heartbeat:
    """Heartbeats: due every BEAT_INTERVAL, and when the compute thread changes its phase."""

    def __init__(self, progress: Progress, *, with_sample: bool) -> None:
        """`with_sample`: adds values of the progress block (shared memory) to heartbeats.

        True for a worker whose broker cannot read that memory itself, such as a remote broker.
        """
        self._progress = progress
        self._with_sample = with_sample
        self._process = psutil.Process()
        self._phase = ""
        self.next_at = BEAT_INTERVAL  # monotonic seconds

    def send_soon(self) -> None:
        """Makes the next heartbeat due immediately, at the start of an epoch."""
        self.next_at = BEAT_INTERVAL

    def is_due(self, now: float) -> bool:
        return now >= self.next_at or self._progress.phase != self._phase

    def beat(self, now: float, preparing: int, load: Load) -> Beat:
        """Returns the heartbeat to send now.

        `preparing`: the number of runs in preparation. `load`: the load of the preparation service.
        """
        progress = self._progress
        self._phase, self.next_at = progress.phase, now + BEAT_INTERVAL
        prepares = progress.phase == "idle" and (load.running or load.waiting)
        return Beat(
            phase="prepare" if prepares else progress.phase,
            phase_age_ms=round((now - progress.since) * 1000),
            progress=progress.count,
            prefill=progress.prefilling_request,
            step_ms=progress.step_ms,
            running=progress.running,
            waiting=progress.waiting + preparing,
            layout=progress.layout,
            load_progress=progress.loaded,
            memory={
                **progress.memory.take(),
                "capacity_tokens": progress.capacity_tokens,
                "preemptions": progress.preemptions,
                "rss": self._process.memory_info().rss,
                "prepare": load.memory,
            },
            prefix=progress.prefix,
            speculation=progress.speculation,
            load=load_clock.LOAD.times,
            look=self._sample() if self._with_sample else None,
        )

    def _sample(self) -> ProgressSample:
        now = self._progress.block.read()
        return ProgressSample(now.tokens, now.fresh, now.usual_token_ns, now.usual_step_ns)


Mail = Outbound | Prepared


class Mailbox:
    """The queue of messages from other threads to the main thread.

    The mailbox is unbounded: the compute thread bounds its own messages, see
    compute.messages.DeltaQueue.
    """

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self._mail: deque[Mail] = deque()

    def post(self, mail: Mail) -> None:
        """Enqueues a message and wakes the main thread. Any thread may call it."""
        self._mail.append(mail)
        self.waker.wake()

    def take(self) -> Iterator[Mail]:
        """Yields the queued messages in order, and removes them."""
        while self._mail:
            yield self._mail.popleft()


class Edge:
    """The loop of the main thread. `run`, called once, returns the exit code."""

    def __init__(
        self,
        config: WorkerConfig,
        mailbox: Mailbox,
        progress: Progress,
        link: Link,
        compute: Compute,
        intake: Intake,
    ) -> None:
        """`compute` and `intake` post to `mailbox`."""
        self.config = config
        self.mailbox = mailbox
        self.progress = progress
        self.link = link
        self.compute = compute
        self.intake = intake
        self.heartbeat = Heartbeat(progress, with_sample=config.dials)
        self._link_error = ""  # the last logged error of the link
        self._unusable: PoolError | None = None  # the error to send with `bye`
        self._leave_at = math.inf  # when to exit with this error, even unsent
        self._exit_code: int | None = None
        self._serves = False  # whether the model is loaded
        self._busy_at = 0.0  # the time of the last request (monotonic seconds)

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until the broker sends `stop`, stdin ends, or SIGTERM arrives.

        Returns the exit code.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._exit(0))
        self.mailbox.waker.wake_on_signals()
        poller = zmq.Poller()
        poller.register(self.mailbox.waker, zmq.POLLIN)
        poller.register(self.link.socket, zmq.POLLIN)
        self.progress.edge_begins()
        self.compute.start()
        while self._exit_code is None:
            poller.poll(self._timeout_ms())
            self._turn(poller)
        return self._close()

    def _turn(self, poller: zmq.Poller) -> None:
        self.progress.edge_turns()
        self.mailbox.waker.drain()
        for mail in self.mailbox.take():
            self.handle_mail(mail)
        while (message := self.link.receive()) is not None:
            self._handle_message(message)
        now = monotonic()
        if self.link.silent_too_long(now) and self._exit_code is None:
            self._redial(poller, now)
        self.link.send_due_hello(now)
        if self.config.dials:
            self._check_link()
        self._leave_if_unusable(now)
        self.rest(now)
        if self.link.epoch and self.heartbeat.is_due(now):
            self.link.send(self._beat(now))
        self.link.flush()

    def rest(self, now: float) -> None:
        """Lets the intake do other work if there was no request for REST_TIME.

        `now`: monotonic seconds.
        """
        if self.intake.tasks or not self._serves:
            self._busy_at = now
        elif now - self._busy_at >= REST_TIME:
            self.intake.rest()

    def _beat(self, now: float) -> Beat:
        return self.heartbeat.beat(now, self.intake.preparing, self.intake.load)

    def _timeout_ms(self) -> int:
        now = monotonic()
        due = self.heartbeat.next_at if self.link.epoch else now + BEAT_INTERVAL
        due = min(due, self._leave_at, self.link.next_wake(now))
        return math.ceil(max(0.0, due - now) * 1000)

    def _check_link(self) -> None:
        """Exits if the broker refuses the worker's key, or if no broker answers.

        Only called in a worker that its broker did not start.
        """
        handshake = self.link.handshake
        handshake.succeeded()
        if handshake.trouble != self._link_error:
            self._link_error = handshake.trouble
            if self._link_error:
                log.error(self._link_error)
        if handshake.refusal:
            self._exit(REFUSED)
        elif self.link.alone_too_long(self.config.orphan_grace):
            alone = {"endpoint": self.link.endpoint, "seconds": self.config.orphan_grace}
            log.error("no broker answers", extra=alone)
            self._exit(ALONE)

    def _redial(self, poller: zmq.Poller, now: float) -> None:
        log.warning("the broker sends nothing: connecting to it again")
        poller.unregister(self.link.socket)
        epoch_ended = self.link.redial(now)
        poller.register(self.link.socket, zmq.POLLIN)
        if epoch_ended:
            self.intake.drop_all()

    # ---- the end -------------------------------------------------------------------------------

    def orphaned(self) -> None:
        """Exits, because the broker is gone. Called by another thread."""
        log.warning("the broker is gone")
        self._exit(0)
        self.mailbox.waker.wake()

    def _exit(self, code: int) -> None:
        """Ends the loop with exit code `code`; only the first call counts."""
        if self._exit_code is None:
            self._exit_code = code

    def _leave_if_unusable(self, now: float) -> None:
        """Sends `bye` with the reason and exits, if the model cannot be used.

        Waits until an epoch has begun, but not beyond `_leave_at`.
        """
        if self._unusable is not None and (self.link.epoch or now >= self._leave_at):
            self.link.send(Bye(self._unusable.body()))
            self._exit(1)

    def _save_prefixes(self) -> None:
        """Makes the compute thread write the prefix cache to disk, for a bounded time.

        The time is shorter while runs are left: the broker continues these in other workers only
        after this process has ended.
        """
        if not self.config.model.prefix_disk or not self._serves:
            return
        limit = self.config.save_limit
        if self.intake.runs():
            limit = min(limit, MAX_SAVE_WITH_RUNS)
        saved = threading.Event()
        self.compute.send(SaveAll(monotonic() + limit, saved))
        saved.wait(limit)

    def _close(self) -> int:
        if self._unusable is None:
            self._save_prefixes()
        if not self._exit_code:
            self.link.send(Bye())
        self.link.close()
        return self._exit_code or 0

    # ---- from the other threads ----------------------------------------------------------------

    def handle_mail(self, mail: Mail) -> None:
        """Handles a message of the compute thread, or the outcome of a preparation."""
        if isinstance(mail, StepDeltas):
            self.compute.delta_queue.acknowledge()
        if isinstance(mail, Opened | OpenedEncoder):
            self._opened(mail)
        elif isinstance(mail, Loaded):
            self._loaded(mail)
        elif isinstance(mail, Unusable):
            self._model_unusable(mail.error)
        elif isinstance(mail, Prepared):
            self.intake.prepared(mail)
        elif isinstance(mail, Answer):
            self.intake.answered(mail)
        elif mail.fence != self.intake.fence:
            pass  # the message's runs were dropped with an older connection
        elif isinstance(mail, StepDeltas):
            self.intake.deliver(mail.deltas)
        else:
            self.intake.handed_back()

    def _loaded(self, loaded: Loaded) -> None:
        """Makes the worker ready after its engine was loaded, once requests can be prepared."""
        self._serves = True
        if self.intake.is_ready(partial(self.mailbox.post, loaded)):
            load_clock.log_end()
            self.intake.loaded(loaded.max_sequences)

    def _opened(self, opened: Opened | OpenedEncoder) -> None:
        self.intake.opened(opened)
        self._introduce(opened.digest, opened.context)

    def _introduce(self, digest: str, context: int) -> None:
        hello = Hello(
            slot="" if self.config.dials else self.config.slot,
            model=self.config.name,
            pid=os.getpid(),
            start_time=psutil.Process().create_time(),
            host=platform.node(),
            digest=digest,
            context=context,
        )
        self.link.introduce(hello, monotonic())

    def _model_unusable(self, error: PoolError) -> None:
        """Arranges an exit with `error` as the reason, because the model cannot be used.

        Sends a hello first, because the broker accepts `bye` only from a worker with an epoch.
        """
        if not self.link.introduced:
            self._introduce("", 0)
        self._unusable = error
        self._leave_at = monotonic() + WELCOME_TIMEOUT

    # ---- from the broker -----------------------------------------------------------------------

    def _handle_message(self, message: Message) -> None:
        """Handles a message; an error in it must not end the worker."""
        try:
            self._handle(message)
        except Exception:
            log.exception("a message failed", extra={"kind": message.kind})

    def _handle(self, message: Message) -> None:
        kind, epoch = message.kind, message.header.epoch
        if kind == to_worker.Welcome.kind:
            self._welcome(epoch, Welcome.parse(message.body))
        elif kind == to_worker.Who.kind:
            self._who()
        elif kind == to_worker.Stop.kind:
            self._stop(Stop.parse(message.body))
        elif kind == to_worker.Heard.kind:
            pass  # the link has recorded the arrival of the frame
        elif epoch != self.link.epoch or not self.link.epoch:
            log.warning("frame of another epoch", extra={"kind": kind})
        else:
            self._handle_current(message)

    def _handle_current(self, message: Message) -> None:
        """Handles a message of the current epoch."""
        kind, header = message.kind, message.header
        if kind in PARSE:
            self.intake.begin(message)
        elif kind == from_client.Cancel.kind:
            self.intake.cancel((header.id or b"", header.attempt))
        elif kind == to_worker.Drain.kind:
            self.intake.drain()

    def _welcome(self, epoch: int, welcome: Welcome) -> None:
        if self.link.welcome(epoch, welcome):
            self.intake.new_epoch()
            self.heartbeat.send_soon()

    def _who(self) -> None:
        if self.link.lose_epoch(monotonic()):
            log.warning("the broker does not know this connection: saying hello again")
            self.intake.drop_all()

    def _stop(self, stop: Stop) -> None:
        if stop.error is None:
            self._exit(AGAIN if stop.again else 0)
        elif not self.link.epoch:  # with an epoch, the connection itself reports a refusal
            log.error(
                "the broker refuses this worker", extra={"why": from_body(stop.error).message}
            )
            self._exit(REFUSED)
