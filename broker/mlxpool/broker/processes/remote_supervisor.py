"""`mlxpool worker`: one worker of a broker elsewhere, started, watched and started again here.

It ends when the broker sends its worker away, refuses its key, or is not there for `orphan_grace`;
a worker that crashes or hangs is replaced after a pause.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import time

from mlxpool.broker.processes.supervisor import TICK, Child, Dial, Supervisor
from mlxpool.broker.workers.liveness import Watch, judge
from mlxpool.broker.workers.restart_delay import restart_delay
from mlxpool.common.config.loading import check_run_dir
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.exit_codes import AGAIN, ALONE, REFUSED, STOPPED

log = logging.getLogger("mlxpool.worker")

PROOF = 60.0  # seconds that a worker lives: its end is no failure to start
FINAL = {STOPPED: 0, REFUSED: 1, ALONE: 3}  # its exit code -> ours


class Outpost:
    """Build it, `run` it; it ends with its worker, or at SIGTERM or SIGINT."""

    def __init__(
        self, config: PoolConfig, endpoint: str, name: str, model: ModelConfig, dial: Dial
    ) -> None:
        """Raises ConfigError when `config.run_dir` cannot be used."""
        check_run_dir(config.run_dir)
        self.config, self.name, self.model = config, name, model
        self.slot = f"{name}/{os.getpid()}"
        self.supervisor = Supervisor(config, endpoint, dial=dial)
        self.failures = 0
        self.start_at = 0.0
        self.started_at = 0.0
        self.watch = Watch()
        self.stops = 0  # signals to end
        self._signals, self._bell = socket.socketpair()
        self._signals.setblocking(False)

    def run(self) -> int:
        """Keep the worker running; returns the exit code."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        # The worker inherits this: asked for its stacks too early, it must not die of it.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            while True:
                code = self._turn()
                if code is not None:
                    return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.supervisor.close()
            self._signals.close()
            self._bell.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self._bell.send(bytes([number]))

    def _turn(self) -> int | None:
        """Wait for something and handle it; the exit code when all is over."""
        now = time.monotonic()
        if not self.supervisor.children:
            if self.stops:
                return 0
            if now >= self.start_at:
                self._start(now)
        child = self.supervisor.children.get(self.slot)
        if self._wait(child, now) and child is not None:
            return self._ended(child, time.monotonic())
        self._look(time.monotonic())
        return None

    def _start(self, now: float) -> None:
        self.supervisor.start(self.slot, self.name, self.model)
        self.started_at, self.watch = now, Watch()

    def _wait(self, child: Child | None, now: float) -> bool:
        """Until the worker has ended (True), a signal came, or something is due."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        if child is not None:
            poll.register(child.watch, select.POLLIN | select.POLLHUP)
        due = self.supervisor.next_wake() if child is not None else self.start_at
        ready = {number for number, _ in poll.poll(max(0, math.ceil((due - now) * 1000)))}
        if self._signals.fileno() in ready:
            self._stop(len(self._signals.recv(64)))
        return child is not None and child.watch in ready

    def _stop(self, signals: int) -> None:
        """The worker hands over what it runs by leaving; whoever asks twice does not wait."""
        self.stops += signals
        self.supervisor.stop(self.slot, time.monotonic())
        if self.stops > 1:
            self.supervisor.close()

    def _look(self, now: float) -> None:
        """Judge it as a broker judges its own: by its process and its progress."""
        self.supervisor.poll(now)
        if not self.supervisor.due(now):
            return
        sample = self.supervisor.look(self.slot)
        self.watch.observe(sample, 0.0, now, TICK)
        limit = self.model.memory_limit
        verdict = judge(self.watch, self.config, welcomed=False, memory_limit=limit)
        if verdict.suspect and verdict.dump and not self.supervisor.children[self.slot].dumped:
            self.supervisor.dump(self.slot)
        if verdict.hung:
            log.warning("worker condemned", extra={"why": verdict.cause})
            self.supervisor.stop(self.slot, now, at_once=sample.stopped)

    def _ended(self, child: Child, now: float) -> int | None:
        end = self.supervisor.reap(self.slot)
        code = child.process.returncode
        if self.stops:
            return 0
        if code in FINAL and not child.commanded:
            log.info("worker ended", extra={"cause": end.cause})
            return FINAL[code]
        config = self.config
        self.failures = 1 if now - self.started_at > PROOF else self.failures + 1
        delay = restart_delay(
            self.failures, config.restart_delay, config.restart_delay_max, os.getpid()
        )
        self.start_at = now + (0.0 if code == AGAIN else delay)
        log.warning("worker ended", extra={"cause": end.cause, "again_in_s": round(delay, 3)})
        return None
