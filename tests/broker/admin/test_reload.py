"""Which settings a reload changes, and a file that must change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from select import select

import pytest

from mlxpool.broker.admin.reload import FIXED, CurrentSettings, Reloader, compare
from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.core import events as ev
from mlxpool.broker.metrics.counters import Counters
from mlxpool.common.config.schema import BUILTIN, KeyConfig, ModelConfig, PoolConfig

ALICE = "a" * 40
POOL = PoolConfig(
    models={name: BUILTIN[name] for name in ("demo", "counting")},
    keys={"alice": KeyConfig("client", ALICE)},
)


def test_the_same_settings_change_nothing() -> None:
    change = compare(POOL, POOL)
    assert change.config == POOL
    assert not any(
        (change.fixed, change.limits, change.added, change.gone, change.changed, change.keys)
    )


def test_compare_reports_every_kind_of_change() -> None:
    models = {"demo": replace(BUILTIN["demo"], replicas=2), "new": ModelConfig(path="builtin:demo")}
    new = replace(
        POOL, models=models, keys={}, queue_limit=7, front=("tcp://127.0.0.1:1",), metrics="h:1"
    )
    change = compare(POOL, new)
    assert change.fixed == ("front", "metrics")
    assert change.limits == ("queue_limit",)
    assert (change.added, change.gone, change.changed) == (("new",), ("counting",), ("demo",))
    assert change.keys == ("alice",)
    assert change.config == replace(new, front=(), metrics=""), "what cannot change stays"


def test_each_fixed_setting_is_a_field_of_the_settings() -> None:
    assert set(FIXED) <= set(PoolConfig.__dataclass_fields__)


class FakeTarget:
    """Records what is put in force."""

    def __init__(self) -> None:
        self.used: list[PoolConfig] = []
        self.models: Mapping[str, ModelConfig] = {}
        self.disconnected: list[str] = []

    def model_of(self, name: str) -> str:
        return name

    def use(self, config: PoolConfig) -> dict[str, str]:
        self.used.append(config)
        return {ALICE: "alice"} if "alice" not in config.keys else {}

    def use_models(self, models: Mapping[str, ModelConfig]) -> None:
        self.models = models

    def disconnect_user(self, user: str, now: float) -> None:
        self.disconnected.append(user)


class Reload:
    """A reload from `before` to `after`, read and applied."""

    def __init__(self, before: PoolConfig, after: PoolConfig) -> None:
        self.settings, self.target = CurrentSettings(before), FakeTarget()
        self.events: list[ev.Event] = []
        reloader = Reloader(
            self.settings,
            lambda: after,
            self.target,
            lambda event, now: self.events.append(event),
            ServiceNotifier(),
            Counters(),
        )
        assert reloader.begin()
        assert select([reloader.waker], [], [], 60)[0]
        reloader.apply(1.0)
        reloader.close()


def test_a_reload_is_applied() -> None:
    extra = ModelConfig(path="builtin:counting", pin=True)
    after = replace(POOL, models={**POOL.models, "extra": extra}, keys={}, queue_limit=7)
    reload = Reload(POOL, after)
    assert reload.settings.config == after and reload.target.used == [after]
    kinds = [type(event) for event in reload.events]
    assert kinds == [ev.Reload, ev.Revoked, ev.ModelFound, ev.LoadModel]
    assert reload.target.disconnected == [f"key:{ALICE}"]
    assert "extra" in reload.target.models


def test_settings_that_lose_the_brokers_key_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a file does that is read while somebody writes it."""
    before = PoolConfig(secret_key=tmp_path / "broker.key")
    reload = Reload(before, PoolConfig())
    assert reload.settings.config is before and not reload.events and not reload.target.used
    assert "not reloaded: nothing has changed" in caplog.text
