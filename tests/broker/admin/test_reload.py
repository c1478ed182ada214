"""The settings that a reload changes, and faulty files that must change no setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from select import select

import pytest
from msgspec.structs import replace

from mlxpool.broker.admin.reload import FIXED, CurrentSettings, Reloader, compare
from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.core import events as ev
from mlxpool.broker.metrics import Counters
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.schema import BUILTIN, KeyConfig, ModelConfig, PoolConfig
from mlxpool.common.errors import BadRequest
from mlxpool.common.gpus import VISIBLE

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
    assert set(FIXED) <= set(PoolConfig.__struct_fields__)


class FakeTarget:
    """Records the settings that are applied."""

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
    """A reload that an operator requests, from the settings `before` to the settings `after`."""

    def __init__(self, before: PoolConfig, after: PoolConfig | Exception) -> None:
        self.settings, self.target = CurrentSettings(before), FakeTarget()
        self.events: list[ev.Event] = []
        self.answered_at: list[float] = []

        def reread() -> PoolConfig:
            if isinstance(after, Exception):
                raise after
            return after

        reloader = self.reloader = Reloader(
            self.settings,
            reread,
            self.target,
            lambda event, now: self.events.append(event),
            ServiceNotifier(),
            Counters(),
        )
        reloader.after_reload(self.answered_at.append, 0.5)
        self.apply(1.0)
        assert self.answered_at == [1.0]

    def apply(self, now: float) -> None:
        """Applies the settings that were read."""
        assert select([self.reloader.waker], [], [], 60)[0]
        self.reloader.apply(now)

    def outcome(self) -> Mapping[str, object] | str:
        """Returns the answer to the operator: a mapping, or the text of an error."""
        try:
            return self.reloader.outcome()
        except BadRequest as error:
            return error.message

    def close(self) -> None:
        self.reloader.close()


@pytest.fixture
def reload_of() -> Iterator[Callable[..., Reload]]:
    """Makes a reload, and closes it at the end of the test."""
    with ExitStack() as stack:
        yield lambda before, after: stack.enter_context(closing(Reload(before, after)))


def test_a_reload_is_applied(reload_of: Callable[..., Reload]) -> None:
    extra = ModelConfig(path="builtin:counting", pin=True)
    after = replace(POOL, models={**POOL.models, "extra": extra}, keys={}, queue_limit=7)
    reload = reload_of(POOL, after)
    assert reload.settings.config == after and reload.target.used == [after]
    kinds = [type(event) for event in reload.events]
    assert kinds == [ev.Reload, ev.Revoked, ev.ModelFound, ev.LoadModel]
    assert reload.target.disconnected == [f"key:{ALICE}"]
    assert "extra" in reload.target.models
    assert reload.outcome() == {
        "state": "reloaded", "limits": ["queue_limit"], "added": ["extra"], "gone": [],
        "changed": [], "keys": ["alice"], "restart_needed": [],
    }  # fmt: skip


def test_a_model_is_loaded_that_is_pinned_from_now_on(reload_of: Callable[..., Reload]) -> None:
    """A reload loads a model that it newly pins.

    A model that was pinned before is not loaded, because an operator may have unloaded it.
    """
    cold = ModelConfig(path="builtin:counting")
    pinned = replace(cold, pin=True)
    more = replace(pinned, replicas=2)
    before, after, later = (
        replace(POOL, models={**POOL.models, "extra": extra}) for extra in (cold, pinned, more)
    )
    kinds = [type(event) for event in reload_of(before, after).events]
    assert kinds == [ev.Reload, ev.ModelChanged, ev.LoadModel]
    assert [type(event) for event in reload_of(after, later).events] == kinds[:2]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            ConfigError("pool.a is 1", "pool.b is 2"),
            "nothing has changed: pool.a is 1; pool.b is 2",
        ),
        (OSError(13, "Permission denied", "f.toml"), "Permission denied: 'f.toml'"),
        (ZeroDivisionError("a bug"), "not reloaded as a whole: the broker's log says why"),
    ],
)
def test_the_operator_gets_the_reason_of_a_reload_that_failed(
    reload_of: Callable[..., Reload], fault: Exception, told: str
) -> None:
    outcome = reload_of(POOL, fault).outcome()
    assert isinstance(outcome, str) and told in outcome


def test_bearer_keys_that_cannot_be_used_change_nothing_and_their_line_is_named(
    reload_of: Callable[..., Reload],
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("# of programs\nshort\n")
    before = replace(POOL, http="127.0.0.1:0", http_keys=keys)
    reload = reload_of(before, replace(before, queue_limit=7))
    assert f"{keys}, line 2: a line is KEY or NAME KEY" in str(reload.outcome())
    assert reload.settings.config is before and not reload.target.used


def test_who_asks_while_settings_are_read_gets_the_result_of_the_next_reading(
    reload_of: Callable[..., Reload],
) -> None:
    reload = reload_of(POOL, POOL)
    for at in (2.0, 2.5):
        reload.reloader.after_reload(reload.answered_at.append, at)
    reload.apply(3.0)
    assert reload.answered_at == [1.0, 3.0]
    reload.apply(4.0)
    assert reload.answered_at == [1.0, 3.0, 4.0]


def test_there_may_be_nothing_to_read() -> None:
    reloader = Reloader(
        CurrentSettings(POOL), None, FakeTarget(), lambda event, now: None, ServiceNotifier(),
        Counters(),
    )  # fmt: skip
    answered: list[float] = []
    reloader.after_reload(answered.append, 1.0)
    assert answered == [1.0]
    with pytest.raises(BadRequest, match="not started from settings that can be read again"):
        reloader.outcome()
    reloader.close()


def test_settings_that_lose_the_brokers_key_change_nothing(
    reload_of: Callable[..., Reload], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New settings without the broker's key are refused: the file may be only half written."""
    before = PoolConfig(secret_key=tmp_path / "broker.key")
    reload = reload_of(before, PoolConfig())
    assert reload.settings.config is before and not reload.events and not reload.target.used
    assert "have no secret_key any more" in str(reload.outcome())
    assert "not reloaded: nothing has changed" in caplog.text


def test_gpus_that_a_changed_model_cannot_have_change_nothing(
    reload_of: Callable[..., Reload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")

    def with_gpus(*gpus: str, devices: int = 1, replicas: int = 1) -> PoolConfig:
        model = ModelConfig(path="m", gpu_ids=gpus, devices=devices, replicas=replicas)
        return replace(POOL, models={**POOL.models, "m": model})

    for after, message in (
        (with_gpus("1", "9"), "models.m: gpu_ids has 9, but the GPUs that this process may use"),
        (with_gpus("1", devices=2), "models.m: devices is 2"),
    ):
        reload = reload_of(POOL, after)
        assert reload.settings.config is POOL and not reload.events
        assert message in str(reload.outcome())
    unchanged = replace(with_gpus("9"), queue_limit=7)  # GPU 9 was set at the broker's start
    for before, after in ((with_gpus("9"), unchanged), (POOL, with_gpus("9", replicas=0))):
        assert reload_of(before, after).settings.config == after


def test_a_secret_of_notices_that_cannot_be_read_changes_nothing(
    reload_of: Callable[..., Reload], tmp_path: Path
) -> None:
    before = PoolConfig(state_dir=str(tmp_path))
    new = replace(before, job_notify_secret=tmp_path / "none", queue_limit=7)
    reload = reload_of(before, new)
    assert reload.settings.config is before and not reload.target.used
    assert "job_notify_secret: cannot read" in str(reload.outcome())
    off = reload_of(replace(before, state_dir=""), replace(new, state_dir=""))
    assert off.settings.config.queue_limit == 7  # without jobs there are no notices
