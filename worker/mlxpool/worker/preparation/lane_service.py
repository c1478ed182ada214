"""The thread that gives jobs to lane processes.

It is fair between owners, and short jobs run beside long jobs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import selectors
import signal
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from time import monotonic

import psutil
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.transport.waker import Waker
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.preparation.errors import (
    CANCELLED,
    MemoryParts,
    ended_too_often,
    error_of_exit,
    late,
    too_much_memory,
)
from mlxpool.worker.preparation.jobs import CheckFormat, Result, pack, reads_images
from mlxpool.worker.preparation.lanes import ForkServer, Lane, LaneEnded
from mlxpool.worker.preparation.limits import (
    MAX_IMAGE_LANES,
    MAX_LANES,
    MAX_LANES_OF_OWNER,
    QUIET_TIME,
    SHORT_TEXT,
    SHORT_TIME,
    Limits,
)
from mlxpool.worker.preparation.queue import FairQueue, Waiting
from mlxpool.worker.preparation.room import Room, WorkerMemory
from mlxpool.worker.preparation.service import Deliver, InlineService, Load, Service, encoding_of
from mlxpool.worker.prompt.text_model import Opened, RenderedChat, TokenTable
from mlxpool.worker.system.cpu_threads import CpuThreads, process_cpu_threads

MAX_TRIES = 2  # tries of a job: if a lane process was ended from outside, the job is not the cause
MEMORY_INTERVAL = 0.1  # seconds between two readings of lanes' memory during a long job

log = logging.getLogger("mlxpool.worker")


def end_process() -> None:
    """Ends this worker process; the broker continues its streams in another worker."""
    os._exit(1)


class Running(Struct, eq=False):
    """A job in a lane process.

    `long`: the job is treated as long, so short jobs do not wait for it. `tries`: the number of
    lanes that were used for the job so far. `announced`: the job is announced as long work, so
    steps leave a core free.
    """

    waiting: Waiting
    lane: Lane
    began: float
    long: bool
    tries: int
    announced: bool = False


class LaneService(threading.Thread):
    """Performs jobs in lane processes; `deliver` is called in this thread, once for each job.

    At most one job with a long text and one short job run at a time. A short job that takes longer
    than SHORT_TIME becomes long, so that the next short job does not wait for it. Jobs with images
    have a separate queue and separate lanes, one for each owner, and are always treated as long.
    """

    def __init__(
        self,
        server: ForkServer,
        deliver: Deliver,
        cpu_threads: CpuThreads,
        memory_limit: int = 0,
        on_fault: Callable[[], object] = end_process,
        worker_memory: WorkerMemory | None = None,
    ) -> None:
        """`memory_limit`: bytes of the worker and its lane processes together; 0: no limit.

        `on_fault` is called if the thread fails, because requests would otherwise wait for ever.
        `worker_memory` frees memory before a job is ended because of the memory limit.
        """
        super().__init__(name="prepare", daemon=True)
        self._server = server
        self._deliver = deliver
        self._cpu_threads = cpu_threads
        self._room = Room(memory_limit, worker_memory or WorkerMemory())
        self._on_fault = on_fault
        self._worker = psutil.Process()
        self._waker = Waker()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._short, self._long, self._images = self._queues = (
            FairQueue(),
            FairQueue(),
            FairQueue(),
        )
        self._running: dict[Hashable, Running] = {}
        self._idle: Lane | None = None  # an idle lane process for the next short job
        self._watch_at = math.inf  # when to read the lanes' memory next
        self._closing = False
        self.load = Load()

    # ---- any thread ----------------------------------------------------------------------------

    def submit(self, waiting: Waiting) -> None:
        """Enqueues a job; see Service."""
        self._command(partial(self._add, waiting))

    def submit_result(self, key: Hashable, result: Result) -> None:
        """Delivers a result that needs no job; see Service."""
        self._command(partial(self._deliver, key, result))

    def cancel(self, key: Hashable) -> None:
        """Ends a job with the result CANCELLED, unless it already has a result; see Service."""
        self._command(partial(self._end, key, CANCELLED))

    def cancel_all(self) -> None:
        """Ends every job that was submitted so far, without a result; see Service."""
        self._command(self._end_all)

    def close(self) -> None:
        """Ends the thread and its processes. For tests only: the worker's end also ends them."""
        self._command(self._close)
        self.join()
        self.release()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.wake()

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until the process ends; a fault of this thread ends the process."""
        try:
            self._serve()
        except BaseException:
            log.exception("requests can no longer be prepared")
            self._on_fault()

    def _serve(self) -> None:
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        with contextlib.suppress(Internal):  # the first job tries again and gets the error
            self._idle = self._new_lane()
        self._watch_at = monotonic()
        while not self._closing:
            for key, _ in self._selector.select(self._timeout(monotonic())):
                key.data()
            self.turn(monotonic())

    def turn(self, now: float) -> None:
        """Executes commands, ends jobs after their deadline, and starts jobs.

        `now`: monotonic seconds.
        """
        while not self._commands.empty():
            self._commands.get()()
        if self._closing:
            return
        for waiting in [expired for each in self._queues for expired in each.expired(now)]:
            self._deliver(waiting.key, late(waiting.size))
        for running in list(self._running.values()):
            if now >= running.waiting.deadline:
                self._end(running.waiting.key, late(running.waiting.size))
                continue
            if not running.announced and now >= running.began + QUIET_TIME:
                self._announce(running)
            if not running.long and now >= running.began + SHORT_TIME and self._has_free_lane:
                self._become_long(running)
        self._fill(now)
        if now >= self._watch_at:
            self._watch_memory(now)
        self.load = replace(
            self.load,
            waiting=sum(map(len, self._queues)),
            running=len(self._running),
            bytes=sum(each.bytes for each in self._queues)
            + sum(running.waiting.size for running in self._running.values()),
        )

    def _timeout(self, now: float) -> float | None:
        """Returns the seconds until the next deadline or check; None if nothing is due."""
        due = min(self._watch_at, *(each.next_deadline() for each in self._queues))
        for running in self._running.values():
            due = min(due, running.waiting.deadline)
            if not running.announced:
                due = min(due, running.began + QUIET_TIME)
            elif not running.long and self._has_free_lane:
                due = min(due, running.began + SHORT_TIME)
        return None if due == math.inf else max(0.0, due - now)

    # ---- jobs ----------------------------------------------------------------------------------

    @property
    def _has_free_lane(self) -> bool:
        return len(self._running) < MAX_LANES

    def _add(self, waiting: Waiting) -> None:
        if reads_images(waiting.job):
            self._images.add(waiting)
        else:
            (self._short if waiting.size <= SHORT_TEXT else self._long).add(waiting)

    def _fill(self, now: float) -> None:
        """Starts waiting jobs, if lanes are free.

        Starts jobs with images, the next short job if no short job runs, and the next long job if
        no long text is being prepared.
        """
        self._fill_with_images(now)
        running = self._running.values()
        while self._has_free_lane and all(busy.long for busy in running):
            waiting = self._short.take(self._owners_with_many_lanes())
            if waiting is None:
                break
            self._start(waiting, now)
        while (
            len(self._long)
            and self._has_free_lane
            and not any(_is_long_text(busy.waiting) for busy in running)
        ):
            waiting = self._long.take()
            assert waiting is not None
            self._start(waiting, now)

    def _fill_with_images(self, now: float) -> None:
        """Starts jobs with images, one job of each owner."""
        while self._has_free_lane:
            running = [busy.waiting for busy in self._running.values()]
            owners = [busy.owner for busy in running if reads_images(busy.job)]
            waiting = None
            if len(owners) < MAX_IMAGE_LANES:
                waiting = self._images.take({*owners, *self._owners_with_many_lanes()})
            if waiting is None:
                return
            self._start(waiting, now)

    def _owners_with_many_lanes(self) -> set[str]:
        lanes = Counter(running.waiting.owner for running in self._running.values())
        return {owner for owner, count in lanes.items() if count >= MAX_LANES_OF_OWNER}

    def _start(self, waiting: Waiting, now: float, tries: int = 1) -> None:
        """Starts a job in a lane process, or delivers its error."""
        long = waiting.size > SHORT_TEXT or reads_images(waiting.job)
        lane = None
        if not long:
            lane, self._idle = self._idle, None
        try:
            message = pack(waiting.job)
            lane = lane or self._new_lane()
        except Exception as error:  # the job cannot be sent, or there is no lane process
            self._idle = lane or self._idle
            failed = Internal(f"the prompt could not be prepared: {error!r}")
            self._deliver(waiting.key, error if isinstance(error, PoolError) else failed)
            return
        running = self._running[waiting.key] = Running(waiting, lane, now, False, tries)
        if long:
            self._become_long(running)
        lane.begin(message)
        self._watch(lane)

    def _become_long(self, running: Running) -> None:
        running.long = True
        self._announce(running)
        self._watch_at = min(self._watch_at, monotonic())

    def _announce(self, running: Running) -> None:
        if not running.announced:
            running.announced = True
            self._cpu_threads.begin_long_work()

    def _end(self, key: Hashable, result: Result) -> None:
        """Ends a job with `result`; ignores a job that already has a result."""
        running = self._running.get(key)
        if running is not None:
            self._kill(running.lane)
            self._remove(running)
        elif not any(each.remove(key) for each in self._queues):
            return
        self._deliver(key, result)

    def _end_all(self) -> None:
        for each in self._queues:
            each.clear()
        for running in list(self._running.values()):
            self._kill(running.lane)
            self._remove(running)

    def _close(self) -> None:
        self._closing = True

    def release(self) -> None:
        """Ends all processes, after the thread has ended."""
        self._end_all()
        if self._idle is not None:
            self._kill(self._idle)
            self._idle = None
        self._server.close()
        self._selector.close()
        self._waker.close()

    def _remove(self, running: Running) -> None:
        del self._running[running.waiting.key]
        if running.announced:
            self._cpu_threads.end_long_work()

    # ---- lanes ---------------------------------------------------------------------------------

    def _new_lane(self) -> Lane:
        lane = self._server.fork()
        self._selector.register(lane, selectors.EVENT_READ, partial(self._on_lane, lane))
        return lane

    def _watch(self, lane: Lane) -> None:
        """Registers the lane process with the selector, for reads and pending writes."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if lane.has_unsent else 0)
        self._selector.modify(lane, events, partial(self._on_lane, lane))

    def _kill(self, lane: Lane) -> None:
        self._selector.unregister(lane)
        lane.kill()

    def _on_lane(self, lane: Lane) -> None:
        """Handles a lane process that has sent bytes, can receive more, or has ended."""
        running = next((each for each in self._running.values() if each.lane is lane), None)
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
            if running is not None:
                self._remove(running)
                self._on_end(running, code)
            return
        if running is not None and result is not None:
            self._on_result(running, result)

    def _on_result(self, running: Running, result: Result) -> None:
        self._remove(running)
        if running.long or self._idle is not None:
            self._kill(running.lane)
        else:
            self._idle = running.lane
        if isinstance(result, RenderedChat):  # the text is long, so a separate job encodes it
            self._add(encoding_of(running.waiting, result))
        else:
            self._deliver(running.waiting.key, result)

    def _on_end(self, running: Running, code: int) -> None:
        """Handles the end of a lane process without a result."""
        checks = isinstance(running.waiting.job, CheckFormat)
        limits = self._server.limits
        error = error_of_exit(code, running.waiting.size, limits, checks_format=checks)
        if error is not None:
            self._deliver(running.waiting.key, error)
        elif running.tries < MAX_TRIES:
            self._start(running.waiting, monotonic(), running.tries + 1)
        else:
            self._deliver(running.waiting.key, ended_too_often(running.tries, code))

    def _watch_memory(self, now: float) -> None:
        """Ends lane processes that a signal stopped, and the largest lane if memory is short."""
        for running in [each for each in self._running.values() if each.lane.is_stopped()]:
            self._kill(running.lane)
            self._remove(running)
            self._on_end(running, -signal.SIGSTOP)
        shared = self._server.memory()
        extra = {each: max(0, each.lane.memory() - shared) for each in self._running.values()}
        idle = 0 if self._idle is None else max(0, self._idle.memory() - shared)
        memory = shared + idle + sum(extra.values())
        self.load = replace(self.load, memory=memory)
        self._watch_at = now + MEMORY_INTERVAL if self._running else math.inf
        if not extra:
            self._room.rest(memory)
            return
        worker = self._worker.memory_info().rss
        if self._room.lacks(worker + memory, now):
            largest = max(extra, key=lambda running: extra[running])
            parts = MemoryParts(
                self._room.limit,
                worker,
                memory,
                extra[largest],
                self._room.worker.figures(),
                others=len(extra) - 1,
            )
            self._end(largest.waiting.key, too_much_memory(largest.waiting.size, parts))


def _is_long_text(waiting: Waiting) -> bool:
    return waiting.size > SHORT_TEXT and not reads_images(waiting.job)


def service_of(
    opened: Opened | OpenedEncoder,
    deliver: Deliver,
    *,
    limits: Limits,
    memory_limit: int = 0,
    worker_memory: WorkerMemory | None = None,
) -> Service:
    """Returns the service that prepares requests for a model.

    The service uses lane processes, unless the text functions (tokenizer and templates) are our own
    code. `memory_limit`: bytes of the worker and its lane processes together; 0: no limit.
    `worker_memory` frees memory of the worker for the lane processes.
    """
    if isinstance(opened, Opened) and opened.source is None:
        assert not isinstance(opened.text, TokenTable)
        return InlineService(opened.text, deliver)
    assert opened.source is not None
    server = ForkServer(opened.source, limits)
    return LaneService(
        server, deliver, process_cpu_threads(), memory_limit, worker_memory=worker_memory
    )
