"""Reloads by SIGHUP and `mlxpool reload`: new models, limits and keys while streams continue.

A thread reads the file, because a disk may be slow. The broker's thread compares the settings and
applies the changes. A file with an error changes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.admin.service_notifier import ServiceNotifier
from mlxpool.broker.catalogue import all_locations, all_weights_bytes
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.broker.host import memory_limit_bytes
from mlxpool.broker.metrics import Counters
from mlxpool.broker.notices.sender import read_secrets
from mlxpool.broker.security.keyring import KEY
from mlxpool.common import http_access
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.errors import BadRequest
from mlxpool.common.gpus import GpusUnavailable, check_enough, chosen_gpus, visible_gpus
from mlxpool.common.transport.waker import Waker

log = logging.getLogger("mlxpool.broker")

NO_KEY = (
    "the settings have no secret_key any more, which this broker cannot be without: was the file"
    " read while it was written? Write another one and mv it into its place"
)

NOTHING_TO_READ = "this broker was not started from settings that can be read again"
UNEXPECTED = "not reloaded as a whole: the broker's log says why"

FIXED = (  # Only a restart applies these: sockets, folders and threads depend on them.
    "run_dir",
    "front",
    "back",
    "admin",
    "secret_key",
    "local_workers",
    "metrics",
    "metrics_admin_token",
    "http",
    "http_keys",
    "http_per_key",
    "http_max_body",
    "http_idle_time",
    "http_stream_keep",
    "http_drain_timeout",
    "http_cors_origins",
    "http_trusted_proxies",
    "http_access_log",
    "traces",
    "models_dir",
    "state_dir",
    "state_bytes",
    "job_key_life",
    "log_format",
    "log_level",
)


class CurrentSettings:
    """The present settings of the broker, which a reload replaces."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config


def without_local_workers(config: PoolConfig) -> PoolConfig:
    """Returns the settings for a broker that starts no worker and scans no models folder.

    Workers of other supervisors serve the models of such a broker.
    """
    models = {name: replace(model, replicas=0) for name, model in config.models.items()}
    return replace(config, models=models, models_dir=None)


def require_gpus(old: PoolConfig, new: PoolConfig, visible: Sequence[str]) -> None:
    """Raises ConfigError if there are too few GPUs for workers of new or changed models.

    Unchanged models are not checked, because they keep their workers. Models of other supervisors'
    workers are not checked either.
    """
    problems = []
    for name, model in new.models.items():
        if model.replicas and model != old.models.get(name):
            try:
                check_enough(chosen_gpus(visible, model.gpu_ids), model.devices)
            except GpusUnavailable as error:
                problems.append(f"models.{name}: {error}")
    if problems:
        raise ConfigError(*problems)


class Change(Struct, frozen=True):
    """The effect of new settings on a running broker. `config` has the new settings."""

    config: PoolConfig
    fixed: tuple[str, ...]  # changed settings that need a restart
    limits: tuple[str, ...]  # changed settings of the section [pool]
    added: tuple[str, ...]  # models
    gone: tuple[str, ...]
    changed: tuple[str, ...]
    pinned: tuple[str, ...]  # models whose workers must start because of a new `pin`
    keys: tuple[str, ...]  # names of added, removed or changed keys

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer to the operator's command."""
        names = ("limits", "added", "gone", "changed", "keys")
        changes = {name: list(getattr(self, name)) for name in names}
        return {"state": "reloaded", **changes, "restart_needed": list(self.fixed)}


def compare(old: PoolConfig, new: PoolConfig) -> Change:
    """Returns the changes between two settings. Pure function."""
    differing = [
        name
        for name in PoolConfig.__struct_fields__
        if name not in ("models", "keys") and getattr(old, name) != getattr(new, name)
    ]
    kept = {name: getattr(old, name) for name in FIXED}
    both = old.models.keys() & new.models.keys()
    return Change(
        replace(new, **kept),
        fixed=tuple(name for name in differing if name in FIXED),
        limits=tuple(name for name in differing if name not in FIXED),
        added=tuple(name for name in new.models if name not in old.models),
        gone=tuple(name for name in old.models if name not in new.models),
        changed=tuple(n for n in new.models if n in both and old.models[n] != new.models[n]),
        pinned=tuple(
            name
            for name, model in new.models.items()
            if model.pin and not (name in both and old.models[name].pin)
        ),
        keys=tuple(
            name
            for name in sorted(old.keys.keys() | new.keys.keys())
            if old.keys.get(name) != new.keys.get(name)
        ),
    )


class NewSettings(Struct, frozen=True):
    """New settings, with the sizes and locations of the models' weights on the disk."""

    config: PoolConfig
    weights: Mapping[str, int]  # bytes
    locations: Mapping[str, str]


class Target(Protocol):
    """The parts of the broker that a reload changes besides the core."""

    def model_of(self, name: str) -> str:
        """Returns the name under which the pool runs the model `name`, which may be an alias."""

    def use(self, config: PoolConfig) -> dict[str, str]:
        """Applies limits and keys. Returns a map of the revoked keys: public key -> name."""

    def use_models(self, models: Mapping[str, ModelConfig]) -> None:
        """Replaces the settings of all models, and scans the models' files again."""

    def disconnect_user(self, user: str, now: float) -> None:
        """Ends every connection whose handshake had this user id."""


class Reloader:
    """Performs reloads. `waker` becomes readable when `apply` is due.

    All methods but `_read` run on the broker's thread.
    """

    def __init__(
        self,
        settings: CurrentSettings,
        reread: Callable[[], PoolConfig] | None,
        target: Target,
        perform: Perform,
        notifier: ServiceNotifier,
        counters: Counters,
    ) -> None:
        """`reread` reads the settings on another thread; it is None without a file of settings."""
        self.waker = Waker()
        self._settings = settings
        self._reread = reread
        self._target = target
        self._perform = perform
        self._notifier = notifier
        self._counters = counters
        self._read_settings: NewSettings | None = None
        self._thread: threading.Thread | None = None
        self._again = False  # another reload was requested during a read of the file
        self._outcome: Change | str = NOTHING_TO_READ  # of the last reload; a text is an error
        self._answers: list[Callable[[float], None]] = []  # callbacks of the present reload
        self._later: list[Callable[[float], None]] = []  # callbacks of the next reload

    def outcome(self) -> Mapping[str, Any]:
        """Returns the changes of the last reload.

        Raises BadRequest with the reason of a failed reload.
        """
        if isinstance(self._outcome, Change):
            return self._outcome.body()
        raise BadRequest(self._outcome)

    def after_reload(self, answer: Callable[[float], None], now: float) -> None:
        """Reads the settings, and calls `answer` after they were applied or the reload failed."""
        (self._answers if self._thread is None else self._later).append(answer)
        if not self.begin():
            self._answer_all(now)

    def _answer_all(self, now: float) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer(now)

    def begin(self) -> bool:
        """Starts a reload; returns False if the broker has no file of settings."""
        if self._reread is None:
            log.warning("nothing to reload: the broker was not started from settings")
            return False
        if self._thread is not None:
            self._again = True
            return True
        self._outcome = UNEXPECTED
        self._notifier.reloading()
        self._thread = threading.Thread(
            target=self._read, args=(self._reread,), name="reload", daemon=True
        )
        self._thread.start()
        return True

    def _read(self, reread: Callable[[], PoolConfig]) -> None:
        before = self._settings.config
        try:
            config = reread()
            if before.secret_key and not config.secret_key:
                raise ConfigError(NO_KEY)
            if not before.local_workers:
                config = without_local_workers(config)
            require_gpus(before, config, visible_gpus(os.environ))
            if before.http and before.http_keys is not None:
                http_access.read_keys(before.http_keys)  # a check: the gateway reads the keys
            if before.state_dir and config.job_notify_secret is not None:
                read_secrets(config.job_notify_secret)  # a check: each notice reads the secrets
            self._read_settings = NewSettings(
                config, all_weights_bytes(config), all_locations(config)
            )
        except (ValueError, OSError) as error:  # ConfigError is a ValueError
            why = "; ".join(getattr(error, "problems", [str(error)]))
            self._outcome = f"not reloaded, nothing has changed: {why}"
            log.error("not reloaded: nothing has changed", extra={"why": why})
        except Exception:
            log.exception("not reloaded: nothing has changed")
        self.waker.wake()

    def apply(self, now: float) -> None:
        """Applies the settings that were read."""
        self.waker.drain()
        if self._thread is not None:
            self._thread.join()
        new, self._read_settings, self._thread = self._read_settings, None, None
        try:
            if new is not None:
                self._apply(new, now)
        except Exception:  # a bug affects one reload, never the pool
            self._counters.internal_errors += 1
            log.exception("not reloaded as a whole")
        self._notifier.ready()
        self._answer_all(now)
        if self._again:
            self._again = False
            self._answers, self._later = self._later, []
            self.begin()

    def _apply(self, new: NewSettings, now: float) -> None:
        change = compare(self._settings.config, new.config)
        if change.fixed:
            log.warning("a restart is needed for some settings", extra={"settings": change.fixed})
        config = self._settings.config = change.config
        self._apply_limits(config, now)
        for name in change.gone:
            self._perform(ev.ModelGone(name, config.drain_grace), now)
        for name in (*change.added, *change.changed):
            self._perform(self._model_event(name, new, change), now)
        if config.local_workers:
            self._target.use_models(config.models)
        for name in change.pinned:
            self._perform(ev.LoadModel(self._target.model_of(name)), now)
        fields = ("limits", "added", "gone", "changed", "pinned", "keys")
        shown = {name: getattr(change, name) for name in fields}
        log.info("reloaded", extra={k: v for k, v in shown.items() if v})
        self._outcome = change

    def _apply_limits(self, config: PoolConfig, now: float) -> None:
        """Applies all settings but models. Ends the streams and connections of revoked keys."""
        revoked = self._target.use(config)
        self._perform(ev.Reload(config, memory_limit_bytes(config)), now)
        for public, name in revoked.items():
            log.warning("key revoked", extra={"key": name, "public": public})
            self._perform(ev.Revoked(f"{KEY}{name}"), now)
            self._target.disconnect_user(f"{KEY}{public}", now)

    def _model_event(self, name: str, new: NewSettings, change: Change) -> ev.Event:
        model, location = change.config.models[name], new.locations[name]
        weights = new.weights[name]
        if name in change.changed:
            grace = change.config.drain_grace
            return ev.ModelChanged(name, model, location, weights, grace)
        return ev.ModelFound(name, model, location, weights)

    def close(self) -> None:
        """Stops reloads. If the settings are being read, the result is ignored."""
        self._again, self._reread = False, None
        self.waker.close()
