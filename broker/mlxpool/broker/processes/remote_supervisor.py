"""The supervisor of `mlxpool worker`, which runs a worker for a broker on another machine.

It ends when the broker dismisses the worker or refuses its key, or after `orphan_grace` without a
broker. It restarts a crashed or hung worker after a delay.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import time

from mlxpool.broker.processes.supervisor import (
    OBSERVE_INTERVAL,
    Child,
    DialSettings,
    Supervisor,
)
from mlxpool.broker.workers.liveness import Watch, judge
from mlxpool.broker.workers.worker import restart_delay
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.exit_codes import AGAIN, ALONE, REFUSED, STOPPED
from mlxpool.common.gpus import GpusUnavailable
from mlxpool.common.transport.waker import Waker

log = logging.getLogger("mlxpool.worker")

PROVEN_AFTER = 60.0  # seconds of life after which an exit does not count as a failed start
FINAL_EXIT_CODES = {STOPPED: 0, REFUSED: 1, ALONE: 3}  # worker's exit code -> exit code here


class RemoteSupervisor:
    """Keeps one worker running for a broker on another machine, and restarts it after failures.

    `run` ends when the worker is dismissed, or at SIGTERM or SIGINT. It raises GpusUnavailable if
    gpu_ids has a GPU that this machine lacks.
    """

    def __init__(
        self, config: PoolConfig, endpoint: str, name: str, model: ModelConfig, dial: DialSettings
    ) -> None:
        """Raises ConfigError if `config.run_dir` cannot be used."""
        check_run_dir(config.run_dir)
        self._config, self._name, self._model = config, name, model
        self._slot = f"{name}/{os.getpid()}"
        self._supervisor = Supervisor(config, endpoint, dial=dial)
        self._failures = 0  # number of consecutive failed starts
        self._start_at = 0.0
        self._started_at = 0.0
        self._watch = Watch()
        self._end_signals = 0
        self._waker = Waker()

    def run(self) -> int:
        """Keeps the worker running until the end. Returns the exit code of this process."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        # The worker inherits SIG_IGN: SIGUSR1 must not end it before it has installed its handler.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            while True:
                code = self._turn()
                if code is not None:
                    return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._supervisor.close()
            self._waker.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._waker.wake(number)

    def _turn(self) -> int | None:
        """Waits for an event and handles it. Returns the exit code at the end, else None."""
        now = time.monotonic()
        if not self._supervisor.children:
            if self._end_signals:
                return 0
            if now >= self._start_at:
                self._start(now)
        child = self._supervisor.children.get(self._slot)
        if self._wait(child, now) and child is not None:
            return self._on_exit(child, time.monotonic())
        self._judge(time.monotonic())
        return None

    def _start(self, now: float) -> None:
        try:
            self._supervisor.start(self._slot, self._name, self._model)
        except GpusUnavailable as error:
            raise GpusUnavailable(f"cannot start the worker of {self._name!r}: {error}") from None
        self._started_at, self._watch = now, Watch()

    def _wait(self, child: Child | None, now: float) -> bool:
        """Waits for the worker's end, a signal or a due time. Returns whether the worker ended."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        if child is not None:
            poll.register(child.exit_descriptor, select.POLLIN | select.POLLHUP)
        due = self._supervisor.next_wake() if child is not None else self._start_at
        ready = {number for number, _ in poll.poll(max(0, math.ceil((due - now) * 1000)))}
        if self._waker.fileno() in ready:
            self._stop(len(self._waker.drain()))
        return child is not None and child.exit_descriptor in ready

    def _stop(self, signals: int) -> None:
        """Sends SIGTERM, after which the worker hands back its runs. A second signal kills it."""
        self._end_signals += signals
        self._supervisor.stop(self._slot, time.monotonic())
        if self._end_signals > 1:
            self._supervisor.close()

    def _judge(self, now: float) -> None:
        """Judges the worker by its process and progress, as a broker judges its own workers."""
        self._supervisor.kill_overdue(now)
        if not self._supervisor.observation_due(now):
            return
        sample = self._supervisor.observe(self._slot)
        self._watch.observe(sample, 0.0, now, OBSERVE_INTERVAL)
        limit = self._model.memory_limit
        verdict = judge(self._watch, self._config, welcomed=False, memory_limit=limit)
        if verdict.suspect and verdict.dump and not self._supervisor.children[self._slot].dumped:
            self._supervisor.dump_stacks(self._slot)
        if verdict.hung:
            log.warning("worker condemned", extra={"why": verdict.cause})
            self._supervisor.stop(self._slot, now, at_once=sample.stopped)

    def _on_exit(self, child: Child, now: float) -> int | None:
        worker_exit = self._supervisor.reap(self._slot)
        code = child.process.returncode
        if self._end_signals:
            return 0
        if code in FINAL_EXIT_CODES and not child.commanded:
            log.info("worker ended", extra={"cause": worker_exit.cause})
            return FINAL_EXIT_CODES[code]
        config = self._config
        self._failures = 1 if now - self._started_at > PROVEN_AFTER else self._failures + 1
        delay = restart_delay(
            self._failures, config.restart_delay, config.restart_delay_max, os.getpid()
        )
        self._start_at = now + (0.0 if code == AGAIN else delay)
        log.warning(
            "worker ended", extra={"cause": worker_exit.cause, "again_in_s": round(delay, 3)}
        )
        return None
