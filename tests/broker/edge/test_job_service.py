"""The job manager between core, store and clients: the effects of the store's health."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.core import events as core
from mlxpool.broker.core.core import Core
from mlxpool.broker.edge import job_service
from mlxpool.broker.edge.job_service import JobService
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.manager import JobManager
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import Refused, Result
from mlxpool.broker.store.writer import Health, HealthState
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.protocol.frames import decode
from mlxpool.common.protocol.kept.job_messages import Submit
from support.core_harness import BOOT, request_id
from support.store_model import StoreModel

SUBMIT = Submit.parse({"model": "m", "prompt": "x", "key": "k"}, ())


class FakeWriter:
    """A fake store writer: performs operations immediately, in memory, while its health is good."""

    def __init__(self, opener: object, boot: int, wake: Callable[[], None]) -> None:
        self.model = StoreModel(lambda: 1000.0)
        self.state = HealthState.OK
        self.busy = False
        self.closed = False

    def start(self) -> None:
        pass

    def offer(self, operation: Operation) -> Refused | None:
        if self.busy:
            return Refused("store_busy", "too much waits")
        self.model.offer(operation)
        self.model.refusing = "" if self.state is HealthState.OK else "store_closed"
        self.model.commit()
        return None

    def take(self) -> list[tuple[Operation, Result]]:
        return self.model.take()

    @property
    def health(self) -> Health:
        return Health(self.state, "because", 0, 0, 0.0)

    def close(self, timeout: float | None = None) -> bool:
        self.closed = True
        return True


@dataclass
class Front:
    """A fake of the clients' connections, which records the sent messages.

    Sending to a connection in `gone` fails.
    """

    sent: list[tuple[int, Any]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def send(self, number: int, parts: list[bytes]) -> bool:
        self.sent.append((number, decode(parts)))
        return number not in self.gone


@dataclass
class Parts:
    service: JobService
    pool: Core
    writer: FakeWriter
    front: Front
    performed: list[core.Event]
    fenced: list[float]

    def ask(self, number: int, now: float = 1.0) -> None:
        event = ev.QuestionAsked(
            1, "uid:1", request_id(number), 1, SUBMIT, request_id(100 + number), 7
        )
        self.service.handle(event, now)
        self.service.serve(now)

    @property
    def answers(self) -> list[str]:
        """Returns kinds and codes of the sent messages."""
        return [str(message.body.get("code", message.kind)) for _, message in self.front.sent]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    writers: list[FakeWriter] = []

    def made_writer(*given: Any) -> FakeWriter:
        writers.append(FakeWriter(*given))
        return writers[-1]

    monkeypatch.setattr(job_service, "StoreWriter", made_writer)
    monkeypatch.setattr(job_service, "opener", lambda *settings: None)
    models = {"m": ModelConfig(path="builtin:counting")}
    config = PoolConfig(run_dir=tmp_path, state_dir=str(tmp_path / "jobs"), models=models)
    front, performed, fenced = Front(), list[core.Event](), list[float]()
    untyped: Any = front
    pool = Core(config, BOOT)
    service = JobService(
        pool,
        BOOT,
        lambda: config,
        untyped,
        lambda event, now: performed.append(event),
        fenced.append,
        lambda slot: "",
    )
    (writer,) = writers
    service.start()
    yield Parts(service, pool, writer, front, performed, fenced)
    service.close()
    assert writer.closed


def test_a_submission_is_answered_when_it_is_stored(parts: Parts) -> None:
    parts.ask(1)
    assert parts.answers == ["accepted"]
    assert [row.job.scope.key for row in parts.writer.model.rows.values()] == ["k"]
    assert parts.service.figures().store == "ok"


def test_a_busy_store_refuses_and_goes_on(parts: Parts) -> None:
    parts.writer.busy = True
    parts.ask(1)
    parts.writer.busy = False
    parts.ask(2)
    assert parts.answers == ["queue_full", "accepted"]


def test_a_failed_store_refuses_until_it_is_back(parts: Parts) -> None:
    parts.writer.state = HealthState.FAILED
    parts.service.serve(1.0)
    parts.ask(1)
    assert parts.answers == ["store_unavailable"] and parts.service.figures().store == "failed"
    parts.writer.state = HealthState.OK
    parts.service.serve(2.0)
    parts.ask(2, 2.0)
    assert parts.answers == ["store_unavailable", "accepted"] and not parts.fenced


def test_a_full_disk_is_no_loss_of_the_store(parts: Parts) -> None:
    parts.writer.state = HealthState.FULL
    parts.service.serve(1.0)
    parts.writer.state = HealthState.OK
    parts.ask(1)
    assert parts.answers == ["accepted"]


def test_a_broker_whose_store_another_has_taken_ends(parts: Parts) -> None:
    parts.writer.state = HealthState.FENCED
    parts.service.serve(5.0)
    parts.service.serve(6.0)
    assert parts.fenced == [5.0]


def test_a_client_that_is_gone_is_reported(parts: Parts) -> None:
    parts.front.gone.add(1)
    parts.ask(1)
    assert core.LinkLost(1) in parts.performed


def test_a_fault_of_the_manager_costs_one_event(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = JobManager.handle

    def fail(manager: JobManager, event: ev.Event, now: float) -> Any:
        if isinstance(event, ev.QuestionAsked):
            raise RuntimeError("a bug")
        return handle(manager, event, now)

    counters = parts.pool.state.counters
    monkeypatch.setattr(JobManager, "handle", fail)
    parts.ask(1)
    monkeypatch.undo()
    assert counters.internal_errors == 1 and parts.answers == ["internal"]
