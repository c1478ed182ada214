"""A broker in its own process, with a run directory that is removed at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import psutil

from mlxpool.cli import admin
from mlxpool.cli.admin import ask
from mlxpool.cli.main import UNREACHABLE
from mlxpool.client import AsyncClient, Client
from mlxpool.client.connection import Connection
from mlxpool.common.closing import Closing
from mlxpool.common.errors import BrokerLost
from support.commands import is_server, run_here

# Seconds. No test measures time, so this only bounds a failure; a busy machine is ten times slower.
PATIENCE = 200.0
# Admin commands that may be sent again. All others are sent once: the broker may have performed a
# command without an answer in time, and a second drain is an error.
QUESTIONS = frozenset({"batches", "job", "jobs", "models", "notices", "ps", "requests", "stats"})


def connection_of(client: Client | AsyncClient) -> Connection:
    """Returns the connection of a client that acts for itself, not for another owner."""
    connection = client._connection
    assert isinstance(connection, Connection)
    return connection


def reconnects(client: Client) -> int:
    """Returns how often a client has replaced its connection since it last heard the broker."""
    return connection_of(client).timer.reconnects


def until(check: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Waits for a true value of `check` and returns it; fails with `what` after `patience` s."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not reached in time: {what}")


def gone(process: psutil.Process) -> bool:
    """Returns whether a process has ended or is a zombie."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def with_path(folder: Path) -> str:
    """Returns a PYTHONPATH that begins with this folder, for its `sitecustomize.py`."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def patient_commands() -> Iterator[None]:
    """Makes commands in this process wait longer for a busy broker, inside the context.

    A command that gives up after 2 s may have been performed anyway, so a second run would fail.
    Commands in other processes use support/patient.
    """
    with (
        patch.dict(ask.__kwdefaults__, {"timeout": PATIENCE}),
        patch.object(admin, "ANSWER_TIMEOUT", PATIENCE),
    ):
        yield


class Pool(Closing):
    """`mlxpool serve` with a config, and a run directory whose path is short enough for sockets."""

    def __init__(
        self,
        tmp_path: Path,
        config: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        prefix: tuple[str, ...] = (),
        log_path: Path | None = None,
        verb: str = "serve",
        jobs_by_default: bool = False,
    ) -> None:
        """`prefix`: words before the broker's command, such as a shell that sets a limit.

        The pool keeps jobs if its config or the arguments have a state_dir, or with
        `jobs_by_default`.
        """
        self.tmp_path = tmp_path
        self._folder = tempfile.TemporaryDirectory(prefix="mlxpool-")
        self.run_dir = Path(self._folder.name)
        self.config = tmp_path / "mlxpool.toml"
        self.config.write_text(config)
        self.prefix = prefix
        self.verb = verb
        self.log_path = log_path or tmp_path / "broker.log"
        self.environment = {**os.environ, **(environment or {})}
        self.arguments = arguments
        self.jobs_by_default = jobs_by_default
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Starts the broker and waits until it answers."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.prefix,
                    *self.command(),
                    self.verb,
                    "--config",
                    str(self.config),
                    *self.arguments,
                    *self._without_jobs(),
                ],
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        until(self._answers, f"the broker answers; it said:\n{self.log()}")

    def _without_jobs(self) -> tuple[str, ...]:
        """Returns the flag that starts a pool without a store; () if the test needs a store.

        A store takes time to start.
        """
        has_store = "--state-dir" in self.arguments or "state_dir" in self.config.read_text()
        return () if has_store or self.jobs_by_default else ("--state-dir", "")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(self.run_dir)]

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the broker ended:\n{self.log()}"
        try:
            return bool(ask(self.run_dir, "ps"))
        except BrokerLost:
            return False

    def close(self) -> None:
        """Ends the broker and removes its folder."""
        try:
            self.stop()
        finally:
            self._folder.cleanup()

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit code. Kills a broker that does not end, and fails."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.terminate()
        try:
            return process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the broker did not end:\n{self.log()}") from None

    def kill(self) -> None:
        """Sends SIGKILL to the broker."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.is_file() else ""

    def client(self, **options: Any) -> Client:
        """Returns a client that by default waits for a busy broker."""
        return Client(self.run_dir, **{"connect_timeout": PATIENCE, **options})

    def async_client(self, **options: Any) -> AsyncClient:
        """Returns an AsyncClient that by default waits for a busy broker."""
        return AsyncClient(self.run_dir, **{"connect_timeout": PATIENCE, **options})

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        """Runs an admin command; also waits for a broker that gets no processor time."""
        end = time.monotonic() + PATIENCE
        timeout = admin.ANSWER_TIMEOUT if kind in QUESTIONS else PATIENCE
        while True:
            try:
                return ask(self.run_dir, kind, body, timeout=timeout)
            except BrokerLost:
                assert self.process is not None and time.monotonic() < end
                if self.process.poll() is not None:
                    raise

    def worker(self, slot: str) -> dict[str, Any]:
        """Returns a worker's row in `ps`; {} if it was never started."""
        rows = [w for w in self.ask("ps")["workers"] if w["slot"] == slot]
        return dict(rows[0]) if rows else {}

    def gateway(self, **wanted: Any) -> dict[str, Any]:
        """Waits until the row of the pool's gateway in `ps` has these values; returns the row."""

        def check() -> dict[str, Any] | None:
            row = self.ask("ps").get("gateway", {})
            return row if all(row.get(k) == v for k, v in wanted.items()) else None

        return dict(until(check, f"the gateway has {wanted}"))

    def in_state(self, slot: str, **wanted: Any) -> dict[str, Any]:
        """Waits until a worker's row has these values; returns the row."""

        def check() -> dict[str, Any] | None:
            row = self.worker(slot)
            return row if all(row.get(k) == v for k, v in wanted.items()) else None

        return dict(until(check, f"{slot} has {wanted}; is {self.worker(slot)}"))

    def kill_worker(
        self,
        slot: str,
        number: int = signal.SIGKILL,
        *,
        over: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Sends a signal to the worker of a slot as soon as it has a process; returns its pid.

        Returns None if `over` becomes true before: a broker without work starts no worker.
        """
        pids: list[int | None] = []

        def killed() -> bool:
            pid = int(self.worker(slot).get("pid") or 0)
            if pid:
                try:
                    os.kill(pid, number)
                    pids.append(pid)
                except ProcessLookupError:  # the worker has just ended; the next worker follows
                    return False
            elif over():
                pids.append(None)
            return bool(pids)

        until(killed, f"{slot} has a process")
        return pids[0]

    def cli(
        self, *arguments: str, stdin: str | None = None, process: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Runs the `mlxpool` command against this pool: here, or with `process` in a new process.

        A busy machine may give the broker no processor time. So the command waits longer for an
        answer than a user's command, and runs again if it gave up on a broker that still runs.
        """
        end = time.monotonic() + PATIENCE
        while True:
            asks_ours = self._runs() and self.is_asked(arguments)
            if process or is_server(arguments):
                done = self._cli_process(arguments, stdin)
            else:
                words = ("--run-dir", str(self.run_dir), *arguments)
                with patient_commands() if asks_ours else nullcontext():
                    done = run_here(words, self.environment, stdin)
            given_up = done.returncode == UNREACHABLE and "does not answer" in done.stderr
            if not (given_up and self._runs()) or time.monotonic() > end:
                return done

    def is_asked(self, arguments: Sequence[str]) -> bool:
        """Returns whether a command with these arguments contacts this pool's broker."""
        return {"--endpoint", "--run-dir"}.isdisjoint(arguments)

    def _runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _cli_process(
        self, arguments: Sequence[str], stdin: str | None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command(), *arguments],
            capture_output=True,
            text=True,
            input=stdin,
            timeout=PATIENCE,
            env=self.environment,
        )

    def cli_json(self, *arguments: str) -> Any:
        """Runs the command with --json; returns its parsed output."""
        done = self.cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
