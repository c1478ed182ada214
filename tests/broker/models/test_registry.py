"""The registry of models: the effect of changed settings on a model."""

from __future__ import annotations

import pytest

from mlxpool.broker.models.model import ModelState
from mlxpool.broker.models.registry import Registry
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
