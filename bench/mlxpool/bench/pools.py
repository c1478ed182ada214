"""Starts the processes of a measurement, such as `mlxpool serve`, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

START_TIMEOUT = 600.0  # seconds


def interrupt_at_signals() -> None:
    """Make SIGTERM and SIGHUP interrupt this process as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process meanwhile, with its output in `log`."""
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


@contextmanager
def serving(
    run_dir: Path, settings: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a broker with this TOML meanwhile; entered when it answers."""
    from mlxpool.client import Client

    file = run_dir / "mlxpool.toml"
    file.write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), "serve"]
    log = run_dir / "broker.log"
    with started([*command, "--config", str(file)], log, environment) as process:
        with Client(run_dir, connect_timeout=START_TIMEOUT) as client:
            client.models()
        yield process
