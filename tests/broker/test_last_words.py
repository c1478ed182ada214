"""A death and the last word before it come on different ways; whichever is first, both count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxpool.broker import edge, events

FD, SLOT, PEER, EPOCH = 7, "m/0", 3, 5


class Broker(edge.Broker):
    """With the parts that a worker's end needs; `words` are what can be read in each turn."""

    def __init__(self, words: list[tuple[str] | None], *, by_itself: bool) -> None:
        self.worker = SimpleNamespace(said_bye=False, error=None)
        parts: dict[str, Any] = {
            "back": SimpleNamespace(receive=lambda now: words.pop(0), forget=lambda number: None),
            "core": SimpleNamespace(fleet=SimpleNamespace(worker=lambda epoch: self.worker)),
            "poller": SimpleNamespace(unregister=lambda descriptor: None),
            "supervisor": SimpleNamespace(
                left_by_itself=lambda slot: by_itself,
                reap=lambda slot: SimpleNamespace(cause="exit code 1", own=True, prefill=None),
            ),
            "watches": {FD: SimpleNamespace(slot=SLOT)},
            "worker_peers": {SLOT: PEER},
            "epochs": {PEER: EPOCH},
        }
        vars(self).update(parts)
        self._noticed, self._rows = {}, []
        self.told: list[tuple[type[events.Event], Any]] = []

    def _from_worker(self, *words: Any) -> None:
        self.worker.error = {"code": "model_load_failed"}

    def perform(self, event: events.Event, now: float) -> None:
        self.told.append((type(event), self.worker.error))


@pytest.mark.parametrize(("by_itself", "turns"), [(True, 2), (False, 1)])
def test_a_last_word_is_waited_for_where_one_is_due(by_itself: bool, turns: int) -> None:
    broker = Broker([None, ("bye",), None], by_itself=by_itself)
    for turn in range(turns):
        assert broker.told == []
        broker._worker_ended(FD, turn / 100)
    ((kind, error),) = broker.told
    assert kind is events.WorkerExited
    assert (error is not None) == by_itself


def test_not_for_ever() -> None:
    broker = Broker([None, None, None], by_itself=True)
    broker._worker_ended(FD, 0.0)
    broker._worker_ended(FD, edge.DRY / 2)
    assert broker.told == []
    broker._worker_ended(FD, edge.DRY)
    assert broker.told == [(events.WorkerExited, None)]
