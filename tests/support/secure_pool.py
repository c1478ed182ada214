"""A pool with CURVE on loopback, its keys, and remote workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpool.client import Client
from mlxpool.common.closing import Closing
from mlxpool.common.transport import keys
from mlxpool.common.transport.keys import KeyPair
from support.pool import PATIENCE, Pool, until

COUNTING_MODEL = (
    "[models.counting]\npath = 'builtin:counting'\n[models.counting.counting]\nstep_us = {}\n"
)


class Keys:
    """Key files in a folder, and the config sections that list them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs: dict[str, KeyPair] = {}

    def make(self, name: str, role: str) -> KeyPair:
        self.pairs[name] = keys.make(name, role)
        keys.write(self.pairs[name], self.folder)
        return self.pairs[name]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def section(self, *names: str) -> str:
        """Returns the sections `[keys.NAME]`."""
        return "".join(
            f'[keys.{name}]\nrole = "{self.pairs[name].role}"\n'
            f'public = "{self.pairs[name].public}"\n'
            for name in names
        )


class SecurePool(Pool):
    """A pool with tcp for clients, workers and operators.

    It has the keys alice and bob (clients), hand (worker) and chief (admin).
    """

    def __init__(
        self, tmp_path: Path, *, pool: str = "", models: str = "", verb: str = "serve"
    ) -> None:
        self.keys = Keys(tmp_path / "keys")
        self.keys.make("pool", "server")
        for name, role in (
            ("alice", "client"),
            ("bob", "client"),
            ("hand", "worker"),
            ("chief", "admin"),
        ):
            self.keys.make(name, role)
        self.pool, self.models = pool, models
        self._admin_endpoints: set[str] = set()  # endpoints that `flags` has returned
        super().__init__(tmp_path, verb=verb)
        self.write("alice", "bob", "hand", "chief")

    def write(self, *names: str, pool: str | None = None, models: str | None = None) -> None:
        """Writes the config with the keys `names` in its allow-list."""
        self.config.write_text(
            "[pool]\n"
            'front = ["tcp://127.0.0.1:*"]\n'
            'back = ["tcp://127.0.0.1:*"]\n'
            'admin = ["tcp://127.0.0.1:*"]\n'
            f'secret_key = "{self.keys.path("pool")}"\n'
            f"{self.pool if pool is None else pool}\n"
            f"{self.models if models is None else models}\n{self.keys.section(*names)}"
        )

    @property
    def server_key(self) -> str:
        return self.keys.pairs["pool"].public

    def endpoint(self, socket: str) -> str:
        return str(self.ask("ps")["broker"]["endpoints"][socket][0])

    def dial(
        self, name: str, server_key: str = "", socket: str = "front", **options: Any
    ) -> Client:
        """Returns a client with this key; `options` are those of Client."""
        return Client(
            endpoint=self.endpoint(socket),
            server_key=server_key or self.server_key,
            key=self.keys.path(name),
            **{"connect_timeout": PATIENCE, **options},
        )

    def flags(self, name: str, socket: str) -> tuple[str, ...]:
        """Returns the command-line flags to connect with this key."""
        endpoint = self.endpoint(socket)
        if socket == "admin":
            self._admin_endpoints.add(endpoint)
        return (
            *("--endpoint", endpoint),
            *("--server-key", self.server_key),
            *("--key", str(self.keys.path(name))),
        )

    def is_asked(self, arguments: Sequence[str]) -> bool:
        """Returns whether a command contacts this pool's broker, also at its admin tcp endpoint."""
        return super().is_asked(arguments) or not self._admin_endpoints.isdisjoint(arguments)

    def reload(self) -> None:
        """Reloads the settings, and waits until they are applied or refused."""
        before = self.reload_outcomes()
        self.ask("reload")
        until(lambda: self.ended() or self.reload_outcomes() > before, f"reloaded:\n{self.log()}")
        assert not self.ended(), f"the broker ended:\n{self.log()}"

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def reload_outcomes(self) -> int:
        """Returns the number of finished reloads in the log."""
        log = self.log()
        return sum(log.count(words) for words in ("event=reloaded", "not reloaded"))


class RemoteWorker(Closing):
    """A worker that is started by `mlxpool worker`, in its own process."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *flags: str,
        models: Sequence[str] = (),
        config: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.log_path = folder / "worker.log"
        path = folder / "worker.toml"
        path.write_text(config)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(folder / "run")),
                    *("worker", name, "--config", str(path), *flags),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )

    def log(self) -> str:
        return self.log_path.read_text()

    def wait(self) -> int:
        """Waits until the process ends by itself; returns its exit code."""
        return self.process.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the worker did not end:\n{self.log()}") from None
