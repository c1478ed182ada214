"""Workers as processes: starts and stops them, and reports their samples and exits.

Invariant: all messages of a worker are handled before its exit is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.core.state import State
from mlxpool.broker.edge.loop import Priority
from mlxpool.broker.processes.supervisor import OBSERVE_INTERVAL
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.broker.workers.exit_causes import WorkerExit
from mlxpool.broker.workers.liveness import Sample
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.gpus import GpusUnavailable

log = logging.getLogger("mlxpool.broker")

MAX_DELAY = 0.25  # most seconds by which frames of workers delay the report of an exit


class Child(Protocol):
    """The interface of processes.supervisor.Child that this module uses."""

    @property
    def slot(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def exit_descriptor(self) -> int: ...

    @property
    def gpus(self) -> tuple[str, ...]: ...


class Supervisor(Protocol):
    """The interface of processes.supervisor.Supervisor that this module uses."""

    @property
    def children(self) -> Mapping[str, Child]: ...

    def start(self, slot: str, name: str, model: ModelConfig) -> Child: ...

    def stop(self, slot: str, now: float, *, at_once: bool = False) -> None: ...

    def kill_overdue(self, now: float) -> None: ...

    def observation_due(self, now: float) -> bool: ...

    def observe(self, slot: str) -> Sample: ...

    def exited_by_itself(self, slot: str) -> bool: ...

    def reap(self, slot: str) -> WorkerExit: ...


class Sources(Protocol):
    """The interface of edge.loop.Loop that this module uses."""

    def add_source(
        self, source: int, handle: Callable[[float], object], priority: Priority
    ) -> None: ...

    def remove_source(self, descriptor: int) -> None: ...


class WorkerProcesses:
    """Starts, stops and observes workers. Owned by the broker's thread."""

    def __init__(
        self,
        supervisor: Supervisor,
        sessions: WorkerSessions,
        state: State,
        perform: Perform,
        sources: Sources,
        *,
        read_pending: Callable[[float], bool],
        stop_remote: Callable[[str, float], bool],
        unreachable: Callable[[float], str] = lambda now: "",
    ) -> None:
        """`read_pending` handles frames of workers and returns whether no frame is left.

        `stop_remote` stops a slot's worker, or returns False if this broker started the worker.
        `unreachable` returns why a new worker could not connect; "" if it could.
        """
        self._supervisor = supervisor
        self._sessions = sessions
        self._state = state
        self._perform = perform
        self._sources = sources
        self._read_pending = read_pending
        self._stop_remote = stop_remote
        self._unreachable = unreachable
        self._exited_at: dict[str, float] = {}  # slot -> time at which its exit was noticed

    def start(self, slot: str, model: str, now: float) -> None:
        try:
            if why := self._unreachable(now):
                raise OSError(why)
            child = self._supervisor.start(slot, model, self._state.registry.models[model].config)
        except (OSError, GpusUnavailable) as error:
            why = f"cannot start the worker of {model!r}: {error}"
            log.error("worker not started", extra={"slot": slot, "why": str(error)})
            self._perform(ev.SpawnFailed(slot, why), now)
            return
        handle = partial(self.on_exit, child)
        self._sources.add_source(child.exit_descriptor, handle, Priority.WORKER_EXITS)
        self._perform(ev.Spawned(slot, child.pid, child.gpus), now)

    def stop(self, slot: str, now: float, *, at_once: bool) -> None:
        if not self._stop_remote(slot, now):
            self._supervisor.stop(slot, now, at_once=at_once)

    def observe(self, now: float) -> None:
        """Kills workers that did not end in time, and makes the core judge all other workers."""
        self._supervisor.kill_overdue(now)
        if self._supervisor.observation_due(now):
            for slot in list(self._supervisor.children):
                sample = self._supervisor.observe(slot)
                self._perform(ev.Looked(slot, sample, OBSERVE_INTERVAL), now)

    def on_exit(self, child: Child, now: float) -> None:
        """Reports the end of a child once its frames are handled, or after MAX_DELAY seconds."""
        slot = child.slot
        noticed = self._exited_at.setdefault(slot, now)
        complete = self._read_pending(now) and self._has_explained_end(slot)
        if not complete and now - noticed < MAX_DELAY:
            return  # the descriptor stays readable, so the next turn tries again
        del self._exited_at[slot]
        self._sources.remove_source(child.exit_descriptor)
        worker_exit = self._supervisor.reap(slot)
        self._sessions.close(slot)
        event = ev.WorkerExited(slot, worker_exit.cause, worker_exit.own, worker_exit.prefill)
        self._perform(event, now)

    def _has_explained_end(self, slot: str) -> bool:
        """Returns whether a worker has reported the cause of its end, or did not exit by itself."""
        epoch = self._sessions.epoch_of_slot(slot)
        if epoch is None or self._state.has_explained_end(epoch):
            return True
        return not self._supervisor.exited_by_itself(slot)
