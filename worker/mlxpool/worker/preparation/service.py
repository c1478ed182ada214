"""The thread that gives jobs to lanes: short ones first, fair between owners, each with a limit."""

from __future__ import annotations

import contextlib
import math
import queue
import selectors
import signal
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Protocol

import psutil

from mlxpool.common.errors import BadRequest, DeadlineExceeded, Internal, OutOfMemory, PoolError
from mlxpool.common.transport.waker import Waker
from mlxpool.worker.preparation.jobs import Encode, Render, Result, perform
from mlxpool.worker.preparation.lanes import ForkServer, Lane, LaneEnded
from mlxpool.worker.preparation.limits import (
    ENCODE_MEMORY,
    MAX_LANES,
    RENDER_TIMEOUT,
    SHORT_TEXT,
    SHORT_TIME,
)
from mlxpool.worker.preparation.queue import FairQueue, Waiting
from mlxpool.worker.prompt.interface import Opened, RenderedChat, TextModel
from mlxpool.worker.system.cpu_threads import CpuThreads, process_cpu_threads

MAX_TRIES = 2  # when a lane was ended from outside, its job is not to blame
MEMORY_INTERVAL = 0.1  # seconds between two readings of what lanes take while one has a long job
CANCELLED = Internal("the request was cancelled")  # the result of a job that was cancelled

Deliver = Callable[[Hashable, Result], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What waits and runs. `bytes`: of these jobs; `memory`: resident bytes of all processes."""

    waiting: int = 0
    running: int = 0
    bytes: int = 0
    memory: int = 0


@dataclass(eq=False, slots=True)
class Running:
    """A job in a lane. `long`: short jobs do not wait for it. `tries`: lanes it was given to."""

    waiting: Waiting
    lane: Lane
    began: float
    long: bool
    tries: int


class Service(Protocol):
    """Performs jobs. `deliver` is called once for each job, in the service's thread."""

    load: Load

    def start(self) -> None: ...

    def submit(self, waiting: Waiting) -> None:
        """Enqueue a job."""

    def submit_result(self, key: Hashable, result: Result) -> None:
        """Deliver a result that needs no job."""

    def cancel(self, key: Hashable) -> None:
        """End a job with the result CANCELLED, unless it has one already."""

    def cancel_all(self) -> None:
        """End every job that was submitted until now, without a result."""


class InlineService(threading.Thread):
    """Performs jobs one after the other in this thread: for texts of our own code alone."""

    def __init__(self, text: TextModel, deliver: Deliver) -> None:
        super().__init__(name="prepare", daemon=True)
        self.load = Load()
        self._text = text
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self._inbox.get()()

    def submit(self, waiting: Waiting) -> None:
        """See Service."""
        self._inbox.put(partial(self._perform, waiting))

    def _perform(self, waiting: Waiting) -> None:
        result = perform(self._text, waiting.job)
        if isinstance(result, RenderedChat):
            result = perform(self._text, encoding_of(waiting, result).job)
        self._deliver(waiting.key, result)

    def submit_result(self, key: Hashable, result: Result) -> None:
        """See Service."""
        self._inbox.put(partial(self._deliver, key, result))

    def cancel(self, key: Hashable) -> None:
        """Does nothing: every job is short."""

    def cancel_all(self) -> None:
        """Does nothing: the caller ignores the results."""


class PreparationService(threading.Thread):
    """Performs submitted jobs in lanes; `deliver` is called in this thread, once for each job.

    At most one job of a long text runs at a time, and one that is short. A short one that takes
    longer than SHORT_TIME becomes a long one, so that the next does not wait for it.
    """

    def __init__(
        self,
        server: ForkServer,
        deliver: Deliver,
        cpu_threads: CpuThreads,
        memory_limit: int = 0,
    ) -> None:
        """`memory_limit`: bytes of the worker and these processes together; 0: no limit."""
        super().__init__(name="prepare", daemon=True)
        self._server = server
        self._deliver = deliver
        self._cpu_threads = cpu_threads
        self._memory_limit = memory_limit
        self._worker = psutil.Process()
        self._waker = Waker()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._short, self._long = FairQueue(), FairQueue()
        self._running: dict[Hashable, Running] = {}
        self._idle: Lane | None = None  # for the next short job
        self._watch_at = math.inf  # when memory is looked at again
        self.load = Load()

    # ---- any thread ----------------------------------------------------------------------------

    def submit(self, waiting: Waiting) -> None:
        """See Service."""
        self._command(partial(self._add, waiting))

    def submit_result(self, key: Hashable, result: Result) -> None:
        """See Service."""
        self._command(partial(self._deliver, key, result))

    def cancel(self, key: Hashable) -> None:
        """See Service."""
        self._command(partial(self._end, key, CANCELLED))

    def cancel_all(self) -> None:
        """See Service."""
        self._command(self._end_all)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.wake()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the process ends."""
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        with contextlib.suppress(Internal):  # the first job tries again and gets the error
            self._idle = self._new_lane()
        while True:
            for key, _ in self._selector.select(self._timeout(monotonic())):
                key.data()
            self.turn(monotonic())

    def turn(self, now: float) -> None:
        """Obey commands, end what is late, fill the lanes; `now` in monotonic seconds."""
        while not self._commands.empty():
            self._commands.get()()
        for waiting in [*self._short.expired(now), *self._long.expired(now)]:
            self._deliver(waiting.key, _late(waiting))
        for one in list(self._running.values()):
            if now >= one.waiting.deadline:
                self._end(one.waiting.key, _late(one.waiting))
            elif not one.long and now >= one.began + SHORT_TIME and self._has_free_lane:
                self._become_long(one)
        self._fill(now)
        if now >= self._watch_at:
            self._watch_memory(now)
        self.load = replace(
            self.load,
            waiting=len(self._short) + len(self._long),
            running=len(self._running),
            bytes=self._short.bytes
            + self._long.bytes
            + sum(one.waiting.size for one in self._running.values()),
        )

    def _timeout(self, now: float) -> float | None:
        """Seconds until something is due; None: nothing is."""
        due = min(self._watch_at, self._short.next_deadline(), self._long.next_deadline())
        for one in self._running.values():
            due = min(due, one.waiting.deadline)
            if not one.long and self._has_free_lane:
                due = min(due, one.began + SHORT_TIME)
        return None if due == math.inf else max(0.0, due - now)

    # ---- jobs ----------------------------------------------------------------------------------

    @property
    def _has_free_lane(self) -> bool:
        return len(self._running) < MAX_LANES

    def _add(self, waiting: Waiting) -> None:
        (self._short if waiting.size <= SHORT_TEXT else self._long).add(waiting)

    def _fill(self, now: float) -> None:
        """Give the next short and the next long job to a lane, unless such a one runs."""
        running = self._running.values()
        while len(self._short) and self._has_free_lane and all(one.long for one in running):
            self._start(self._short.take(), now)
        while (
            len(self._long)
            and self._has_free_lane
            and all(one.waiting.size <= SHORT_TEXT for one in running)
        ):
            self._start(self._long.take(), now)

    def _start(self, waiting: Waiting, now: float, tries: int = 1) -> None:
        """Give a job to a lane, or its error to its owner."""
        long = waiting.size > SHORT_TEXT
        lane = None
        if not long:
            lane, self._idle = self._idle, None
        try:
            lane = lane or self._new_lane()
        except Internal as error:
            self._deliver(waiting.key, error)
            return
        one = self._running[waiting.key] = Running(waiting, lane, now, False, tries)
        if long:
            self._become_long(one)
        lane.begin(waiting.job)
        self._watch(lane)

    def _become_long(self, one: Running) -> None:
        one.long = True
        self._cpu_threads.begin_long_work()
        self._watch_at = min(self._watch_at, monotonic())

    def _end(self, key: Hashable, result: Result) -> None:
        """End a job before its result is there; one that has its result already is left alone."""
        one = self._running.get(key)
        if one is not None:
            self._kill(one.lane)
            self._remove(one)
        elif self._short.remove(key) is None and self._long.remove(key) is None:
            return
        self._deliver(key, result)

    def _end_all(self) -> None:
        self._short.clear()
        self._long.clear()
        for one in list(self._running.values()):
            self._kill(one.lane)
            self._remove(one)

    def _remove(self, one: Running) -> None:
        del self._running[one.waiting.key]
        if one.long:
            self._cpu_threads.end_long_work()

    # ---- lanes ---------------------------------------------------------------------------------

    def _new_lane(self) -> Lane:
        lane = self._server.fork()
        self._selector.register(lane, selectors.EVENT_READ, partial(self._on_lane, lane))
        return lane

    def _watch(self, lane: Lane) -> None:
        """Wait for what the lane does next."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.has_unsent else 0)
        self._selector.modify(lane, events, partial(self._on_lane, lane))

    def _kill(self, lane: Lane) -> None:
        self._selector.unregister(lane)
        lane.kill()

    def _on_lane(self, lane: Lane) -> None:
        """A lane has something to read, can take more, or has ended."""
        one = next((one for one in self._running.values() if one.lane is lane), None)
        if lane.has_unsent:
            lane.flush()
            self._watch(lane)
        try:
            result = lane.result()
        except LaneEnded:
            self._selector.unregister(lane)
            code = lane.reap()
            if lane is self._idle:
                self._idle = None
            if one is not None:
                self._remove(one)
                self._on_end(one, code)
            return
        if one is not None and result is not None:
            self._on_result(one, result)

    def _on_result(self, one: Running, result: Result) -> None:
        self._remove(one)
        if one.long or self._idle is not None:
            self._kill(one.lane)
        else:
            self._idle = one.lane
        if isinstance(result, RenderedChat):  # its text is long, so encoding it is a job by itself
            self._long.add(encoding_of(one.waiting, result))
        else:
            self._deliver(one.waiting.key, result)

    def _on_end(self, one: Running, code: int) -> None:
        """A lane has ended instead of answering."""
        error = _error_of(code, one.waiting)
        if error is not None:
            self._deliver(one.waiting.key, error)
        elif one.tries < MAX_TRIES:
            self._start(one.waiting, monotonic(), one.tries + 1)
        else:
            ended = f"preparing the request ended its process {one.tries} times, with code {code}"
            self._deliver(one.waiting.key, BadRequest(ended))

    def _watch_memory(self, now: float) -> None:
        """Measure all processes; end the largest lane when they exceed the limit."""
        shared = self._server.memory()
        extra = {one: max(0, one.lane.memory() - shared) for one in self._running.values()}
        memory = shared + sum(extra.values())
        self.load = replace(self.load, memory=memory)
        self._watch_at = now + MEMORY_INTERVAL if self._running else math.inf
        if self._memory_limit and extra:
            total = self._worker.memory_info().rss + memory
            if total > self._memory_limit:
                largest = max(extra, key=lambda one: extra[one])
                self._end(
                    largest.waiting.key,
                    _too_much_memory(largest, extra[largest], total, self._memory_limit),
                )


def service_of(
    opened: Opened, deliver: Deliver, *, prepare_limit: float, memory_limit: int = 0
) -> Service:
    """The service for a model: with processes, unless its text functions are our own code."""
    if opened.source is None:
        return InlineService(opened.text, deliver)
    server = ForkServer(opened.source, prepare_limit)
    return PreparationService(server, deliver, process_cpu_threads(), memory_limit)


def encoding_of(waiting: Waiting, chat: RenderedChat) -> Waiting:
    """The job that encodes a rendered chat, in place of the one that rendered it."""
    assert isinstance(waiting.job, Render)
    job = Encode(chat.text, waiting.job.context, chat.messages_end, chat.thinks)
    return replace(waiting, size=max(len(chat.text), SHORT_TEXT + 1), job=job)


def _late(waiting: Waiting) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the deadline passed while the prompt of {waiting.size} bytes was prepared (deadline_ms)"
    )


def _too_much_memory(one: Running, own: int, total: int, limit: int) -> OutOfMemory:
    return OutOfMemory(
        f"preparing the prompt of {one.waiting.size} bytes takes {own} bytes of memory, the worker"
        f" {total} with it, and memory_limit is {limit}; shorten the prompt, or raise the limit",
        details={"prompt_bytes": one.waiting.size, "value": total, "bound": limit},
    )


def _error_of(code: int, waiting: Waiting) -> PoolError | None:
    """What the end of a lane by one of its limits means; None: it was ended from outside."""
    if code == -signal.SIGALRM:
        return BadRequest(
            f"the chat template was not done after {RENDER_TIMEOUT:g} s: it was stopped"
        )
    if code == -signal.SIGPROF:
        return BadRequest(
            f"the tokenizer was not done with a text of {waiting.size} bytes within the limit of"
            " prepare_limit: it was stopped"
        )
    if code == -signal.SIGABRT:
        return BadRequest(
            f"the tokenizer takes more than {ENCODE_MEMORY} bytes of memory for a text of"
            f" {waiting.size} bytes: it was stopped"
        )
    return None
