"""Which idle models are unloaded to free memory."""

from __future__ import annotations

from mlxpool.broker.models.model import Model
from mlxpool.broker.models.registry import to_evict
from mlxpool.broker.workers.worker import Slot, Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig


def idle(name: str, since: float, need: int = 4, **config: float) -> Model:
    slot = Slot(f"{name}/0", name, Worker(f"{name}/0", "m", state=WorkerState.READY))
    return Model(name, ModelConfig(path="p", **config), [slot], need=need, idle_since=since)  # type: ignore[arg-type]


def test_the_least_recently_used_idle_models_are_chosen() -> None:
    models = [idle("a", 3.0), idle("b", 1.0), idle("c", 2.0), idle("busy", 0.0)]
    models.append(idle("pinned", 0.5, keep_alive=-1.0))
    assert [m.name for m in to_evict(models, 4)] == ["b"]
    assert [m.name for m in to_evict(models, 5)] == ["b", "c"]
    assert to_evict(models, 13) == [], "not enough: nobody goes"
