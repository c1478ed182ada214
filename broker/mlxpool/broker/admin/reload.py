"""SIGHUP and `mlxpool reload`: models, limits and keys are read anew while streams go on.

The file is read on a thread of its own, for a disk may be slow; what it says is compared with what
holds and applied on the broker's thread. A file with a fault changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxpool.broker.edge.startup import footprints, memory, places, without_workers
from mlxpool.broker.interface import events as ev
from mlxpool.broker.security.keyring import KEY
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.schema import ModelConfig, PoolConfig

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

log = logging.getLogger("mlxpool.broker")

NO_KEY = (
    "the settings have no secret_key any more, which this broker cannot be without: was the file"
    " read while it was written? Write another one and mv it into its place"
)

FIXED = (  # what sockets, folders and threads were made with: a restart is needed to change it
    "run_dir",
    "front",
    "back",
    "admin",
    "secret_key",
    "local_workers",
    "metrics",
    "models_dir",
    "log_format",
)


@dataclass(frozen=True, slots=True)
class Change:
    """What new settings mean for a broker that runs. `config` is what holds from now on."""

    config: PoolConfig
    fixed: tuple[str, ...]  # settings that changed in vain
    limits: tuple[str, ...]  # settings of [pool] that changed
    added: tuple[str, ...]  # models
    gone: tuple[str, ...]
    changed: tuple[str, ...]
    keys: tuple[str, ...]  # names of keys that came, went or changed


def compare(old: PoolConfig, new: PoolConfig) -> Change:
    """Pure."""
    differ = [
        name
        for name in PoolConfig.__dataclass_fields__
        if name not in ("models", "keys") and getattr(old, name) != getattr(new, name)
    ]
    kept = {name: getattr(old, name) for name in FIXED}
    both = old.models.keys() & new.models.keys()
    return Change(
        replace(new, **kept),
        fixed=tuple(name for name in differ if name in FIXED),
        limits=tuple(name for name in differ if name not in FIXED),
        added=tuple(name for name in new.models if name not in old.models),
        gone=tuple(name for name in old.models if name not in new.models),
        changed=tuple(n for n in new.models if n in both and old.models[n] != new.models[n]),
        keys=tuple(
            name
            for name in sorted(old.keys.keys() | new.keys.keys())
            if old.keys.get(name) != new.keys.get(name)
        ),
    )


@dataclass(frozen=True, slots=True)
class Reread:
    """New settings, and what the disk says of their models."""

    config: PoolConfig
    needs: Mapping[str, int]
    places: Mapping[str, str]


class Reloader:
    """All but `_read` belongs to the broker's thread."""

    def __init__(
        self,
        broker: Broker,
        reread: Callable[[], PoolConfig] | None,
        ring: Callable[[], object],
    ) -> None:
        """`ring` has the broker call `take`."""
        self.broker = broker
        self._reread = reread
        self._ring = ring
        self._found: Reread | None = None
        self._thread: threading.Thread | None = None
        self._again = False  # somebody asked while the file was being read

    def begin(self) -> bool:
        """Read the settings; False when there is nothing to read them from."""
        if self._reread is None:
            log.warning("nothing to reload: the broker was not started from settings")
            return False
        if self._thread is not None:
            self._again = True
            return True
        self.broker.notify.reloading()
        self._thread = threading.Thread(
            target=self._read, args=(self._reread,), name="reload", daemon=True
        )
        self._thread.start()
        return True

    def _read(self, reread: Callable[[], PoolConfig]) -> None:
        try:
            config = reread()
            if self.broker.config.secret_key and not config.secret_key:
                raise ConfigError(NO_KEY)
            if not self.broker.config.local_workers:
                config = without_workers(config)
            self._found = Reread(config, footprints(config), places(config))
        except (ValueError, OSError) as error:  # ConfigError among them
            log.error("not reloaded: nothing has changed", extra={"why": str(error)})
        except Exception:
            log.exception("not reloaded: nothing has changed")
        try:
            self._ring()
        except OSError:  # the broker has ended meanwhile
            pass

    def take(self, now: float) -> None:
        """The file was read: apply what it says."""
        if self._thread is not None:
            self._thread.join()
        found, self._found, self._thread = self._found, None, None
        try:
            if found is not None:
                self._apply(found, now)
        except Exception:  # a bug of ours costs one reload, never the pool
            self.broker.core.state.counters.internal_errors += 1
            log.exception("not reloaded as a whole")
        self.broker.notify.ready()
        if self._again:
            self._again = False
            self.begin()

    def _apply(self, found: Reread, now: float) -> None:
        broker, change = self.broker, compare(self.broker.config, found.config)
        if change.fixed:
            log.warning("a restart is needed for some settings", extra={"settings": change.fixed})
        self._use(change.config, now)
        for name in change.gone:
            broker.perform(ev.ModelGone(name, broker.config.drain_grace), now)
        for name in (*change.added, *change.changed):
            config, place = change.config.models[name], found.places[name]
            broker.perform(self._event(name, config, place, found.needs[name], change), now)
        if broker.config.local_workers:
            broker.library.reload(change.config.models)
        for name in change.added:
            if change.config.models[name].pin:
                broker.perform(ev.Load(broker.core.state.registry.model(name).name), now)
        shown = {k: getattr(change, k) for k in ("limits", "added", "gone", "changed", "keys")}
        log.info("reloaded", extra={k: v for k, v in shown.items() if v})

    def _use(self, config: PoolConfig, now: float) -> None:
        """All but the models; keys that are no more are cut off."""
        broker = self.broker
        broker.config = broker.supervisor.config = config
        broker.perform(ev.Reload(config, memory(config)), now)
        for public, name in broker.entrance.keyring.replace(config.keys).items():
            self._revoke(public, name, now)

    def _revoke(self, public: str, name: str, now: float) -> None:
        broker = self.broker
        log.warning("key revoked", extra={"key": name, "public": public})
        broker.perform(ev.Revoked(f"{KEY}{name}"), now)
        broker.dial_in.revoked(public, now)
        for peers in (broker.front, broker.back, broker.admin.peers):
            for peer in list(peers.by_number.values()):
                if peer.user == f"{KEY}{public}":
                    broker.turn_out(peers, peer)

    def _event(
        self, name: str, config: ModelConfig, place: str, need: int, change: Change
    ) -> ev.Event:
        if name in change.changed:
            return ev.ModelChanged(name, config, place, need, self.broker.config.drain_grace)
        return ev.ModelFound(name, config, place, need)

    def close(self) -> None:
        """What is still being read is of no interest."""
        self._again, self._reread = False, None
