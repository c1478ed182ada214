"""Runs the settings and arguments of deploy/ as processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from support.pool import PATIENCE

PORTS = ("7200", "7201", "11434", "9464")
MLXPOOL = (sys.executable, "-m", "mlxpool.cli.main")


def free_ports() -> dict[str, str]:
    """A free port for each port of the deployments."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        return {port: str(s.getsockname()[1]) for port, s in zip(PORTS, held, strict=True)}


@contextmanager
def running(words: Sequence[str], log: Path) -> Iterator[None]:
    """Run `mlxpool` with these arguments meanwhile, with a run directory of its own."""
    with TemporaryDirectory(prefix="mlxpool-") as folder, log.open("wb") as out:
        environment = {**os.environ, "MLXPOOL_RUN_DIR": f"{folder}/pool"}
        process = subprocess.Popen([*MLXPOOL, *words], stdout=out, stderr=out, env=environment)
        try:
            yield
        finally:
            process.terminate()
            try:
                assert process.wait(PATIENCE) == 0, log.read_text()
            finally:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    """Whether the path is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
