"""Starts the processes of a measurement, such as `mlxpool serve`, and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mlxpool.common.process.blas import preload
from mlxpool.common.transport import question, sockets

MODEL = "bench"  # the name of the model in pools of measurements
START_TIMEOUT = 600.0  # seconds
RESTARTED = "MLXPOOL_BENCH"  # environment variable that is set after the restart with OpenBLAS


def interrupt_at_signals() -> None:
    """Makes SIGTERM and SIGHUP interrupt this process as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def restart_with_openblas(command: Sequence[str]) -> None:
    """Restarts this process as `python COMMAND`, with the OpenBLAS of the broker's workers.

    Does nothing after the restart, or without OpenBLAS.
    """
    environment = preload()
    if environment and RESTARTED not in os.environ:
        environment = {**os.environ, **environment, RESTARTED: "1"}
        os.execve(sys.executable, [sys.executable, *command], environment)


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process inside the context, with its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
    """Raises SystemExit with the end of the log if the broker ends or does not start in time."""
    from mlxpool.client import Client

    end = time.monotonic() + START_TIMEOUT
    while not (run_dir / "front.ipc").exists():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"no broker started: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    with Client(run_dir, connect_timeout=START_TIMEOUT) as client:
        client.models()


def toml_of(model: Mapping[str, Any], pool: Mapping[str, Any] | None = None) -> str:
    """Returns the TOML of a pool with one model, MODEL."""
    sections = {"pool": pool or {}, f"models.{MODEL}": model}
    lines = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())])
        for name, values in sections.items()
    ]
    return "\n".join([*lines, ""])


@contextmanager
def temporary_run_dir() -> Iterator[Path]:
    """Yields a temporary folder with a short path, because socket paths have a length limit."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        yield Path(folder)


@contextmanager
def serving(
    run_dir: Path, settings: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a broker with these TOML settings for a `with` block; waits until the broker answers.

    The broker keeps no jobs unless the settings name a folder for jobs.
    """
    file = run_dir / "mlxpool.toml"
    file.write_text(settings, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), "serve"]
    if "state_dir" not in settings:
        command += ["--state-dir", ""]
    log = run_dir / "broker.log"
    with started([*command, "--config", str(file)], log, environment) as process:
        _wait_until_it_answers(process, run_dir, log)
        yield process


def workers(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the workers of a pool as `mlxpool ps` lists them.

    The list is empty if the broker does not answer.
    """
    answer = question.ask(sockets.ipc(run_dir, "admin"), None, "ps", {}) or {}
    return [dict(worker) for worker in answer.get("workers", ())]


def ready_workers(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """Waits for `count` ready workers, and returns them. Raises RuntimeError if a worker ends."""
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        all_workers = workers(run_dir)
        for worker in all_workers:
            if worker["restarts"]:
                raise RuntimeError(f"a worker ended: {worker['last_exit']}")
        ready = [worker for worker in all_workers if worker["state"] == "ready"]
        if len(ready) >= count:
            return ready
        time.sleep(0.1)
    raise RuntimeError(f"not all of {count} workers are ready after {START_TIMEOUT:.0f} s")
