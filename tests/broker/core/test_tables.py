"""The five tables of states: an event that is not in a table raises, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import pytest

from mlxpool.broker.jobs import job_states
from mlxpool.broker.jobs.active import ActiveJob
from mlxpool.broker.jobs.job_states import JobPhase
from mlxpool.broker.models import model
from mlxpool.broker.models.model import Model, ModelState
from mlxpool.broker.requests import request as requests
from mlxpool.broker.requests.request import RequestState
from mlxpool.broker.store import operations as op
from mlxpool.broker.store.records import Scope
from mlxpool.broker.workers import gpu_places
from mlxpool.broker.workers import worker as workers
from mlxpool.broker.workers.gpu_places import Place, PlaceState
from mlxpool.broker.workers.worker import Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.protocol.frames import pack
from mlxpool.common.protocol.kept.job_messages import Submit
from support.core_requests import new_request
from support.store_model import StoreModel

TABLES: list[tuple[type[Enum], Mapping[Any, Mapping[str, Any]], Enum, set[Enum]]] = [
    (RequestState, requests.TRANSITIONS, RequestState.QUEUED, set(requests.TERMINAL)),
    (WorkerState, workers.TRANSITIONS, WorkerState.STARTING, {WorkerState.LOST}),
    (ModelState, model.TRANSITIONS, ModelState.COLD, set()),
    (JobPhase, job_states.TRANSITIONS, JobPhase.WAITING, set()),
    (PlaceState, gpu_places.TRANSITIONS, PlaceState.UNPLACED, set()),
]


def new_worker(state: WorkerState) -> Worker:
    return Worker("m/0", "m", state=state)


def new_job(phase: JobPhase) -> ActiveJob:
    store = StoreModel(lambda: 0.0)
    message = Submit.parse({"key": "a", "model": "m", "prompt": "x"}, ())
    request = pack(message.request)
    scope = Scope("uid:1", "", "a")
    store.perform(op.Submit(bytes(16), scope, bytes(16), "generate", "m", request, 1))
    return ActiveJob(store.job("a"), 1, "m", phase=phase)


def cases(table: Mapping[Any, Mapping[str, Any]], legal: bool) -> list[tuple[Any, str, Any]]:
    """Returns (state, event, next state) of all pairs in the table, or of all other pairs."""
    events = sorted({event for exits in table.values() for event in exits} | {"nonsense"})
    return [
        (state, event, exits.get(event))
        for state, exits in table.items()
        for event in events
        if (event in exits) is legal
    ]


@pytest.mark.parametrize(("states", "table", "first", "last"), TABLES)
def test_every_state_has_its_row_and_terminal_states_have_no_exits(
    states: type[Enum],
    table: Mapping[Any, Mapping[str, Any]],
    first: Enum,
    last: set[Enum],
) -> None:
    assert set(table) == set(states)
    assert {state for state, exits in table.items() if not exits} == last


@pytest.mark.parametrize(("states", "table", "first", "last"), TABLES)
def test_every_state_is_reachable_and_leads_to_an_end(
    states: type[Enum],
    table: Mapping[Any, Mapping[str, Any]],
    first: Enum,
    last: set[Enum],
) -> None:
    reached, new = set(), {first}
    while new:
        reached |= new
        new = {after for state in new for after in table[state].values()} - reached
    assert reached == set(states)
    assert all(set(table[state].values()) & (last | reached) for state in set(states) - last)


MACHINES: dict[type[Enum], Callable[[Any], Any]] = {
    RequestState: lambda state: new_request(state=state),
    WorkerState: new_worker,
    PlaceState: lambda state: Place("m/0", state, ("0",)),
    ModelState: lambda state: Model("m", ModelConfig(path="builtin:counting"), [], state=state),
    JobPhase: new_job,
}


def moves(legal: bool) -> list[tuple[type[Enum], Any, str, Any]]:
    """Returns (kind of state, state, event, following state) of all tables."""
    return [(kind, *case) for kind, table, *_ in TABLES for case in cases(table, legal)]


def state_of(thing: Any) -> Enum:
    state = thing.phase if isinstance(thing, ActiveJob) else thing.state
    assert isinstance(state, Enum)
    return state


@pytest.mark.parametrize(("kind", "state", "event", "after"), moves(True))
def test_legal_moves(kind: type[Enum], state: Enum, event: str, after: Enum) -> None:
    thing = MACHINES[kind](state)
    thing.move(event)
    assert state_of(thing) is after
    assert kind is not RequestState or thing.live is (after not in requests.TERMINAL)


@pytest.mark.parametrize(("kind", "state", "event", "_"), moves(False))
def test_illegal_moves_change_nothing(kind: type[Enum], state: Enum, event: str, _: None) -> None:
    thing = MACHINES[kind](state)
    with pytest.raises(ValueError, match=f"is {state.value}: no '{event}' there"):
        thing.move(event)
    assert state_of(thing) is state
    assert kind is not PlaceState or thing.gpus == ("0",)


@pytest.mark.parametrize(
    ("state", "workers", "failures", "shown"),
    [
        (ModelState.COLD, [], 0, "cold"),
        (ModelState.WANTED, [], 0, "cold"),
        (ModelState.WANTED, [], 2, "starting"),
        (ModelState.WANTED, [WorkerState.LOADING], 0, "starting"),
        (ModelState.BROKEN, [WorkerState.STARTING], 5, "starting"),
        (ModelState.WANTED, [WorkerState.LOADING, WorkerState.SUSPECT], 0, "ready"),
        (ModelState.COLD, [WorkerState.STOPPING], 0, "draining"),
        (ModelState.WANTED, [WorkerState.CONDEMNED], 1, "draining"),
        (ModelState.FAILED, [], 1, "failed"),
        (ModelState.BROKEN, [], 5, "broken"),
        (ModelState.BROKEN, [], 0, "cold"),  # a replica has served in the meantime
        (ModelState.WANTED, [], 5, "broken"),  # the model's probe waits for memory
        (ModelState.COLD, [], 5, "broken"),  # the model was drained and opened again
        (ModelState.DRAINING, [WorkerState.READY], 0, "draining"),
        (ModelState.DRAINED, [], 5, "drained"),
    ],
)
def test_the_state_of_a_model_that_operators_see(
    state: ModelState, workers: list[WorkerState], failures: int, shown: str
) -> None:
    actual = model.shown_state(
        state,
        workers,
        load_failed=state is ModelState.FAILED,
        failures=failures,
        restart_limit=5,
    )
    assert actual == shown


def test_every_worker_that_lives_can_exit() -> None:
    for state, exits in workers.TRANSITIONS.items():
        assert state is WorkerState.LOST or exits["exit"] is WorkerState.LOST


@pytest.mark.parametrize("state", list(WorkerState))
def test_only_a_ready_worker_has_credit(state: WorkerState) -> None:
    worker = new_worker(state)
    worker.sequences, worker.works_sent, worker.works_seen = 5, 7, 5
    assert worker.credit() == (3 if state is WorkerState.READY else 0)
    worker.works_sent = 99
    assert worker.credit() == 0
