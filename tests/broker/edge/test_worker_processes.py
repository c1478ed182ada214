"""A worker's exit and its last message arrive separately, in either order; both are handled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.edge.loop import Priority
from mlxpool.broker.edge.worker_processes import MAX_DELAY, WorkerProcesses
from mlxpool.broker.processes.supervisor import OBSERVE_INTERVAL
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.broker.workers.exit_causes import WorkerExit
from mlxpool.broker.workers.liveness import Sample
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.gpus import GpusUnavailable
from mlxpool.common.progress import ProgressReading
from support.fake_peers import FakePeers

SLOT, NUMBER, EPOCH = "m/0", 3, 5


@dataclass
class FakeChild:
    slot: str = SLOT
    pid: int = 77
    exit_descriptor: int = 7
    gpus: tuple[str, ...] = ("1",)


class FakeSupervisor:
    """A fake supervisor, each of whose workers starts and is reaped once.

    If `error` is set, a start raises it.
    """

    def __init__(self) -> None:
        self.running: dict[str, FakeChild] = {}
        self.by_itself = True
        self.error: OSError | GpusUnavailable | None = None
        self.stopped: list[tuple[str, bool]] = []

    @property
    def children(self) -> Mapping[str, FakeChild]:
        return self.running

    def start(self, slot: str, name: str, model: ModelConfig) -> FakeChild:
        if self.error is not None:
            raise self.error
        self.running[slot] = FakeChild(slot)
        return self.running[slot]

    def stop(self, slot: str, now: float, *, at_once: bool = False) -> None:
        self.stopped.append((slot, at_once))

    def kill_overdue(self, now: float) -> None: ...

    def observation_due(self, now: float) -> bool:
        return True

    def observe(self, slot: str) -> Sample:
        return Sample(ProgressReading("idle"))

    def exited_by_itself(self, slot: str) -> bool:
        return self.by_itself

    def reap(self, slot: str) -> WorkerExit:
        del self.running[slot]
        return WorkerExit("exit code 1", True, None)


class FakeLoop:
    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[float], object]] = {}

    def add_source(
        self, source: int, handle: Callable[[float], object], priority: Priority
    ) -> None:
        assert priority is Priority.WORKER_EXITS
        self.handlers[source] = handle

    def remove_source(self, descriptor: int) -> None:
        del self.handlers[descriptor]


class Workers:
    """A WorkerProcesses with fakes and one worker that has got `welcome`.

    `on_read` is called at each read of the workers' socket.
    """

    def __init__(self) -> None:
        self.supervisor, self.loop = FakeSupervisor(), FakeLoop()
        state = Core(PoolConfig(models={"m": ModelConfig()}), boot=1).state
        self.worker = state.workers[EPOCH] = Worker(SLOT, "m", epoch=EPOCH)
        self.events: list[ev.Event] = []
        self.remote: set[str] = set()
        self.on_read: Callable[[], bool] = lambda: True
        self.sessions = WorkerSessions(FakePeers())
        self.processes = WorkerProcesses(
            self.supervisor,
            self.sessions,
            state,
            lambda event, now: self.events.append(event),
            self.loop,
            read_pending=lambda now: self.on_read(),
            stop_remote=lambda slot, now: slot in self.remote,
        )
        self.processes.start(SLOT, "m", 0.0)
        self.sessions.open(SLOT, NUMBER)
        self.sessions.welcome(NUMBER, EPOCH)
        assert self.events == [ev.Spawned(SLOT, 77, ("1",))]
        self.events.clear()

    def exit(self, now: float) -> bool:
        """Runs a pass with a readable exit descriptor. Returns whether the exit was reported."""
        self.loop.handlers[7](now)
        return bool(self.events)


@pytest.fixture
def workers() -> Workers:
    return Workers()


EXITED = ev.WorkerExited(SLOT, "exit code 1", own=True)


def test_a_worker_that_exits_by_itself_has_time_for_its_last_message(workers: Workers) -> None:
    assert not workers.exit(0.0)
    workers.worker.said_bye = True
    assert workers.exit(0.01)
    assert workers.events == [EXITED]
    assert not workers.loop.handlers and workers.sessions.connection(SLOT) is None


def test_the_exit_of_a_killed_worker_is_reported_at_once(workers: Workers) -> None:
    workers.supervisor.by_itself = False
    assert workers.exit(0.0)


def test_the_last_message_may_be_read_in_the_same_turn(workers: Workers) -> None:
    def read() -> bool:
        workers.worker.said_bye = True
        return True

    workers.on_read = read
    assert workers.exit(0.0)


def test_an_exit_waits_until_all_frames_are_handled(workers: Workers) -> None:
    workers.worker.said_bye = True
    workers.on_read = lambda: False
    assert not workers.exit(0.0)
    workers.on_read = lambda: True
    assert workers.exit(0.01)


def test_an_exit_is_reported_at_the_latest_after_max_delay(workers: Workers) -> None:
    assert not workers.exit(0.0)
    assert not workers.exit(MAX_DELAY / 2)
    assert workers.exit(MAX_DELAY)


def test_a_worker_without_a_session_is_reported_at_once(workers: Workers) -> None:
    workers.sessions.release(SLOT)
    assert workers.exit(0.0)


def test_a_start_that_fails_is_reported(workers: Workers) -> None:
    errors: list[OSError | GpusUnavailable] = [OSError("no room"), GpusUnavailable("no GPU")]
    for number, error in enumerate(errors):
        workers.supervisor.error = error
        workers.processes.start("m/1", "m", 0.0)
        why = f"cannot start the worker of 'm': {error}"
        assert workers.events[number:] == [ev.SpawnFailed("m/1", why)]


def test_the_worker_of_another_supervisor_is_not_stopped_by_ours(workers: Workers) -> None:
    workers.remote.add("r/0")
    workers.processes.stop("r/0", 0.0, at_once=True)
    workers.processes.stop(SLOT, 0.0, at_once=True)
    assert workers.supervisor.stopped == [(SLOT, True)]


def test_the_core_judges_each_observed_worker(workers: Workers) -> None:
    workers.processes.observe(1.0)
    assert workers.events == [ev.Looked(SLOT, Sample(ProgressReading("idle")), OBSERVE_INTERVAL)]
