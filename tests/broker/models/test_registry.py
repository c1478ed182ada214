"""The registry of models: the effect of changed settings on a model."""

from __future__ import annotations

import pytest

from mlxpool.broker.models.model import Model, ModelState
from mlxpool.broker.models.registry import Registry, to_evict
from mlxpool.broker.workers.worker import Slot, Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("pin", "event", "after"),
    [
        (True, "load failed", ModelState.WANTED),
        (True, "breaker opened", ModelState.WANTED),
        (False, "load failed", ModelState.COLD),
        (False, "breaker opened", ModelState.COLD),
    ],
)
def test_a_pinned_model_is_needed_again_when_its_settings_are_mended(
    pin: bool, event: str, after: ModelState
) -> None:
    registry = Registry(GIB, restart_limit=5)
    registry.add("m", ModelConfig(path="/wrong", pin=pin), "/wrong", 1)
    registry.model("m").move(event)
    registry.change("m", ModelConfig(path="/right", pin=pin), "/right", 1)
    assert registry.model("m").state is after


# ---- eviction ------------------------------------------------------------------------------------
# The choice of idle models that are unloaded to free memory.


def idle(name: str, since: float, need: int = 4, **config: float) -> Model:
    slot = Slot(f"{name}/0", name, Worker(f"{name}/0", "m", state=WorkerState.READY))
    return Model(name, ModelConfig(path="p", **config), [slot], need=need, idle_since=since)  # type: ignore[arg-type]


def test_the_least_recently_used_idle_models_are_chosen() -> None:
    models = [idle("a", 3.0), idle("b", 1.0), idle("c", 2.0), idle("busy", 0.0)]
    models.append(idle("pinned", 0.5, keep_alive=-1.0))
    assert [m.name for m in to_evict(models, 4)] == ["b"]
    assert [m.name for m in to_evict(models, 5)] == ["b", "c"]
    assert to_evict(models, 13) == [], "not enough: nobody goes"
