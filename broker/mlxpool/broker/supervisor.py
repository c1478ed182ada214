"""Starts worker processes, notices their end, and ends them: SIGTERM, then SIGKILL."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxpool.broker.blas import preload
from mlxpool.common.config import (
    WORKER_VARIABLE,
    ModelConfig,
    PoolConfig,
    WorkerConfig,
)


@dataclass(eq=False, slots=True)
class Child:
    """A running worker. `watch` becomes readable when its process is gone."""

    slot: str
    token: str
    process: subprocess.Popen[bytes]
    watch: int
    kill_at: float = 0.0  # when SIGKILL follows; 0: not being stopped
    commanded: bool = False


AGAIN = 1.0  # seconds between two SIGKILLs to a process that the kernel has not let go of


class Supervisor:
    """Owns the child processes. Lives in the broker's one thread."""

    def __init__(self, config: PoolConfig, endpoint: str, *, portable: bool = False) -> None:
        self.config = config
        self.endpoint = endpoint
        self.portable = portable or not hasattr(os, "pidfd_open")
        self.children: dict[str, Child] = {}

    def start(self, slot: str, model: str) -> Child:
        """Start the worker of a slot. Raises OSError when the process or its log cannot be made."""
        spec = self.config.models[model]
        token = secrets.token_hex(16)
        log = self._log(slot)
        try:
            closed_at_exit, held_by_child = os.pipe()
        except OSError:
            os.close(log)
            raise
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxpool.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(slot, token, model, spec),
                pass_fds=(held_by_child,),
                start_new_session=True,
            )
        except OSError:
            os.close(closed_at_exit)
            raise
        finally:
            os.close(held_by_child)
            os.close(log)
        watch = closed_at_exit
        if not self.portable:
            os.close(closed_at_exit)
            watch = _pidfd(process)
        child = self.children[slot] = Child(slot, token, process, watch)
        return child

    def _environment(self, slot: str, token: str, model: str, spec: ModelConfig) -> dict[str, str]:
        settings = WorkerConfig(self.endpoint, slot, token, model, spec, self.config.log_format)
        return {
            **os.environ,
            **preload(),
            "PYTHONUNBUFFERED": "1",
            WORKER_VARIABLE: settings.to_environment(),
        }

    def _log(self, slot: str) -> int:
        path = self.log_path(slot)
        keep = b""
        if path.exists() and path.stat().st_size > self.config.worker_log_bytes:
            with path.open("rb") as file:
                file.seek(-self.config.worker_log_bytes // 2, os.SEEK_END)
                keep = file.read()
            path.write_bytes(keep)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def log_path(self, slot: str) -> Path:
        """Where a slot's workers write what they have to say."""
        return self.config.run_dir / "logs" / f"{slot.replace('/', '-')}.log"

    def stop(self, slot: str, now: float) -> None:
        """Ask the worker to end; `poll` kills it after `stop_grace`."""
        child = self.children.get(slot)
        if child is not None and not child.kill_at:
            child.commanded = True
            child.kill_at = now + self.config.stop_grace
            self._signal(child, signal.SIGTERM)

    def poll(self, now: float) -> None:
        """Kill what did not end in time."""
        for child in self.children.values():
            if child.kill_at and now >= child.kill_at:
                child.kill_at = now + AGAIN
                self._signal(child, signal.SIGKILL)

    def next_wake(self) -> float:
        return min((c.kill_at for c in self.children.values() if c.kill_at), default=float("inf"))

    def _signal(self, child: Child, number: int) -> None:
        # Popen refuses to signal a process it has reaped, so no other process can be hit.
        if child.process.poll() is None:
            os.killpg(child.process.pid, number)

    def reap(self, slot: str) -> str:
        """Collect an ended worker; returns its cause of death in words."""
        child = self.children.pop(slot)
        code = child.process.wait()
        os.close(child.watch)
        if child.process.stdin is not None:
            child.process.stdin.close()
        return cause_of(code, child.commanded)

    def close(self) -> None:
        """End every worker, at once and for good."""
        for child in self.children.values():
            self._signal(child, signal.SIGKILL)
        for slot in list(self.children):
            self.reap(slot)


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # a process that nobody watches must not live
        process.kill()
        process.wait()
        raise


def cause_of(code: int, commanded: bool) -> str:
    """An exit code in words: `stopped`, `exit code 3`, `killed by SIGSEGV`."""
    if commanded:
        return "stopped"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
