"""Keeps the gateway process of `http` running: starts it, restarts it after delays, and ends it."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from typing import Protocol

from mlxpool.broker.telemetry.snapshot import GatewayInfo
from mlxpool.broker.workers.worker import restart_delay
from mlxpool.common.config.schema import PoolConfig

log = logging.getLogger("mlxpool.broker")

PROVEN_AFTER = 60.0  # seconds of life after which an end does not count as a failed start
ABORT_GRACE = 4.0  # seconds for the gateway to end its last answers with errors
RUNNING = ("starting", "ready", "draining")


class Process(Protocol):
    """The interface of processes.gateway_process.GatewayProcess that this module uses."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def resident_bytes(self) -> int: ...

    def start(self, config: PoolConfig) -> int: ...

    def beats(self) -> int | None: ...

    def signal(self, number: int) -> None: ...

    def stop_listening(self) -> None: ...

    def reap(self) -> str: ...


class Sources(Protocol):
    """The interface of edge.loop.Loop that this module uses."""

    def add_source(self, source: int, handle: Callable[[float], object]) -> None: ...

    def remove_source(self, descriptor: int) -> None: ...


class HttpGateway:
    """Supervises the gateway process.

    Owned by the broker's thread. GatewayInfo lists its states.
    """

    def __init__(
        self, process: Process, settings: Callable[[], PoolConfig], sources: Sources, boot: int
    ) -> None:
        """`boot` seeds the random part of the delays before restarts."""
        self.state = "stopped"
        self._process = process
        self._settings = settings
        self._sources = sources
        self._boot = boot
        self._descriptor = -1  # readable when the process has sent a report
        self._started_at = self._heard_at = 0.0
        self._start_at = math.inf
        self._kill_at = math.inf
        self._restarts = self._failures = 0
        self._last_exit = ""
        self._hung = ""  # the reason for killing the process, else ""
        self._ending = False
        self._reload_due = False  # a reload was requested while the process was starting
        self._then: Callable[[float], None] = _nothing

    @property
    def ended(self) -> bool:
        """Returns whether no gateway process runs and no start is planned."""
        return self.state == "stopped"

    def info(self, now: float) -> GatewayInfo:
        """Returns the row of the gateway in `ps`."""
        running = self._process.pid is not None
        return GatewayInfo(
            url=self._process.url,
            state=self.state,
            pid=self._process.pid,
            uptime_s=round(now - self._started_at, 3) if running else None,
            rss=self._process.resident_bytes,
            restarts=self._restarts,
            last_exit=self._last_exit or None,
        )

    # ---- start ---------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Starts the process. Its state becomes `ready` at its first heartbeat."""
        self._start_at = math.inf
        try:
            self._descriptor = self._process.start(self._settings())
        except OSError as error:
            self._last_exit = f"not started: {error.strerror}"
            self._restart_later(now)
            return
        self.state, self._hung, self._reload_due = "starting", "", False
        self._started_at = self._heard_at = now
        self._sources.add_source(self._descriptor, self._on_news)

    def _on_news(self, now: float) -> None:
        beats = self._process.beats()
        if beats is None:
            self._on_exit(now)
        elif beats:
            self._heard_at = now
            if self.state == "starting":
                self.state = "ready"
                if self._reload_due:
                    self.reload()
                log.info(
                    "the gateway is ready",
                    extra={"url": self._process.url, "pid": self._process.pid},
                )

    def _on_exit(self, now: float) -> None:
        self._sources.remove_source(self._descriptor)
        cause = self._process.reap()
        self._kill_at = math.inf
        if self._ending:
            self._end(now)
            return
        self._last_exit = self._hung or cause
        self._restarts += 1
        if now - self._started_at > PROVEN_AFTER:
            self._failures = 0
        self._restart_later(now)
        self._failures += 1

    def _restart_later(self, now: float) -> None:
        config = self._settings()
        most = config.restart_delay_max
        delay = restart_delay(self._failures, config.restart_delay, most, self._boot)
        self.state, self._start_at = "restarting", now + delay
        shown = {"cause": self._last_exit, "again_in_s": round(delay, 3)}
        log.warning("the gateway has ended", extra=shown)

    # ---- observe -------------------------------------------------------------------------------

    def next_wake(self) -> float:
        """Returns the time of the next `check`."""
        return min(self._start_at, self._kill_at, self._silent_until())

    def _silent_until(self) -> float:
        """Returns the time at which the process is considered hung if no heartbeat comes before.

        A starting process has `load_limit` seconds for its first heartbeat. Later it has 2 *
        `beat_limit` seconds for each heartbeat. Returns infinity if no process runs, or if the
        process is being stopped.
        """
        if self.state not in RUNNING or self._kill_at < math.inf:
            return math.inf
        config = self._settings()
        limit = config.load_limit if self.state == "starting" else 2 * config.beat_limit
        return self._heard_at + limit

    def check(self, now: float) -> None:
        """Starts the process if a restart is due; kills it if it is silent or stops too slowly."""
        if now >= self._start_at:
            self.start(now)
        elif now >= self._silent_until():
            self._hung = f"hung: it said nothing for {now - self._heard_at:.1f} s"
            self._kill_at = now
        if now >= self._kill_at:
            self._kill_at = now + 1.0  # repeated until the kernel has ended the process
            self._process.signal(signal.SIGKILL)

    def reload(self) -> None:
        """Makes the process read its keys again. A starting process does so once it is ready."""
        if self.state == "starting":  # there is no handler yet: the signal would end the process
            self._reload_due = True
        else:
            self._process.signal(signal.SIGHUP)

    # ---- end -----------------------------------------------------------------------------------

    def drain(self, now: float, then: Callable[[float], None]) -> None:
        """Lets answers finish for at most `http_drain_timeout` s, and then ends the process.

        Calls `then` after the end of the process.
        """
        self._then = then
        log.info(
            "answers over HTTP may finish", extra={"seconds": self._settings().http_drain_timeout}
        )
        self._stop(now, signal.SIGTERM, self._settings().http_drain_timeout + ABORT_GRACE)

    def abort(self, now: float, grace: float | None = None) -> None:
        """Makes the process end its answers with errors.

        Kills it after `grace` seconds, default stop_grace.
        """
        self._then = _nothing
        self._stop(now, signal.SIGINT, self._settings().stop_grace if grace is None else grace)

    def _stop(self, now: float, number: int, grace: float) -> None:
        self._ending = True
        self._process.stop_listening()
        if self.state in RUNNING:
            self.state, self._kill_at = "draining", min(self._kill_at, now + grace)
            self._process.signal(number)
        else:
            self._end(now)

    def _end(self, now: float) -> None:
        self.state, self._start_at = "stopped", math.inf
        then, self._then = self._then, _nothing
        then(now)


def _nothing(now: float) -> None:
    """Does nothing: the default for the callback after the end of the process."""
