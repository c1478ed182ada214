"""Starts and ends the broker's process: its lock, descriptor limit, signals and stop."""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.edge.http_gateway import ABORT_GRACE, HttpGateway
from mlxpool.common.files import FolderLocked, lock_folder
from mlxpool.common.transport.waker import Waker

log = logging.getLogger("mlxpool.broker")

MIN_DESCRIPTORS = 256
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class AlreadyRunning(OSError):
    """Raised if another broker has locked this run directory."""


def lock(run_dir: Path) -> int:
    """Locks the run directory. The kernel releases the lock however this process ends.

    Returns a descriptor to close. Raises AlreadyRunning if another broker has the lock.
    """
    try:
        return lock_folder(run_dir)
    except FolderLocked as locked:
        raise AlreadyRunning(
            f"another broker (pid {locked.holder}) serves the run directory {run_dir};"
            " stop it with `mlxpool stop`, or give another with --run-dir"
        ) from None


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard limit, and returns it.

    Raises OSError below MIN_DESCRIPTORS: libzmq aborts a process that runs out of descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < MIN_DESCRIPTORS:
        raise OSError(
            f"the limit of open files is {hard}, the broker needs {MIN_DESCRIPTORS};"
            " raise it with ulimit -n"
        )
    return hard


class Lifecycle:
    """The shutdown of the broker: decides when and how it stops. Used by the broker's thread.

    The loop ends when `stopping` is true and the last child process has ended.
    """

    def __init__(
        self,
        perform: Perform,
        notifier: ServiceNotifier,
        gateway: HttpGateway | None,
        on_stop: Callable[[bool, float], None] = lambda final, now: None,
    ) -> None:
        """`on_stop(final, now)` is called when the broker stops. `final`: no broker follows it."""
        self.ending = False  # an end was requested; answers over HTTP may still run
        self.stopping = False
        self._perform = perform
        self._notifier = notifier
        self._gateway = gateway
        self._on_stop = on_stop

    def end(self, now: float) -> None:
        """Lets answers over HTTP finish, then stops the broker. Another broker may follow."""
        if self.ending:
            return
        self.ending = True
        self._notifier.stopping()
        if self._gateway is None:
            self.stop(now, final=False)
        else:
            self._gateway.drain(now, lambda now: self.stop(now, final=False))

    def end_at_once(self, now: float) -> None:
        """Stops without a drain of HTTP: answers end with errors within ABORT_GRACE seconds."""
        if self._gateway is not None:
            self._gateway.abort(now, ABORT_GRACE)
        self.stop(now, final=False)

    def stop(self, now: float, *, final: bool) -> None:
        """Ends all streams, then the workers. `final`: no other broker follows."""
        if not self.stopping:
            self.ending = self.stopping = True
            self._notifier.stopping()
            if self._gateway is not None:
                self._gateway.abort(now)
            self._perform(ev.Shutdown(final), now)
            self._on_stop(final, now)


class Signals:
    """Receives signals on the main thread. `waker` becomes readable after a signal."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        kill_workers: Callable[[float], None],
        reload: Callable[[], object],
    ) -> None:
        self.waker = Waker()
        self._lifecycle = lifecycle
        self._kill_workers = kill_workers
        self._reload = reload

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the handlers during a `with` block."""
        before = {number: signal.signal(number, self._on_signal) for number in HANDLED}
        # Workers inherit SIG_IGN: SIGUSR1 must not end a worker that has not installed its handler.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.waker.wake(number)

    def handle(self, now: float) -> None:
        """Acts on the signals received since the last call."""
        numbers = self.waker.drain()
        for number in set(numbers):
            log.info("signal", extra={"number": number})
        if signal.SIGHUP in numbers:
            self._reload()
        ends = sum(number in (signal.SIGTERM, signal.SIGINT) for number in numbers)
        if ends > 1 or (ends and self._lifecycle.ending):
            self._kill_workers(now)  # the second signal: end without a drain
            self._lifecycle.end_at_once(now)
        elif ends:
            self._lifecycle.end(now)  # the sender may start another broker
