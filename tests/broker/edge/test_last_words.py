"""A death and the last word before it come on different ways; whichever is first, both count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxpool.broker.edge import worker_ingress
from mlxpool.broker.edge.loop import Broker
from mlxpool.broker.interface import events
from mlxpool.broker.processes.supervisor import Child
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.to_broker import Bye

FD, SLOT, PEER, EPOCH = 7, "m/0", 3, 5


class FromWorkers(worker_ingress.FromWorkers):
    """With the parts that a worker's end needs; `words` are what can be read in each turn."""

    def __init__(self, words: list[tuple[str] | None], *, by_itself: bool) -> None:
        self.worker = SimpleNamespace(said_bye=False, error=None)
        parts: dict[str, Any] = {
            "back": SimpleNamespace(receive=lambda now: words.pop(0), forget=lambda number: None),
            "core": SimpleNamespace(
                state=SimpleNamespace(workers=SimpleNamespace(get=lambda epoch: self.worker))
            ),
            "poller": SimpleNamespace(unregister=lambda descriptor: None),
            "supervisor": SimpleNamespace(
                left_by_itself=lambda slot: by_itself,
                reap=lambda slot: SimpleNamespace(cause="exit code 1", own=True, prefill=None),
            ),
            "perform": lambda event, now: self.told.append((type(event), self.worker.error)),
        }
        super().__init__(cast(Broker, SimpleNamespace(**parts)))
        self.watches = {FD: cast(Child, SimpleNamespace(slot=SLOT))}
        self.peers, self.epochs = {SLOT: PEER}, {PEER: EPOCH}
        self.told: list[tuple[type[events.Event], Any]] = []

    def take(self, *words: Any) -> None:
        self.worker.error = {"code": "model_load_failed"}


@pytest.mark.parametrize(("by_itself", "turns"), [(True, 2), (False, 1)])
def test_a_last_word_is_waited_for_where_one_is_due(by_itself: bool, turns: int) -> None:
    workers = FromWorkers([None, ("bye",), None], by_itself=by_itself)
    for turn in range(turns):
        assert workers.told == []
        workers.ended(FD, turn / 100)
    ((kind, error),) = workers.told
    assert kind is events.WorkerExited
    assert (error is not None) == by_itself


def test_not_for_ever() -> None:
    workers = FromWorkers([None, None, None], by_itself=True)
    workers.ended(FD, 0.0)
    workers.ended(FD, worker_ingress.DRY / 2)
    assert workers.told == []
    workers.ended(FD, worker_ingress.DRY)
    assert workers.told == [(events.WorkerExited, None)]


def test_the_error_of_a_last_word_is_a_map() -> None:
    error = {"code": "internal", "message": "the device is lost"}
    assert Bye.parse({"error": error}).error == error
    assert Bye.parse({}).error is None
    with pytest.raises(BadRequest, match="must be a map"):
        Bye.parse({"error": "words"})
