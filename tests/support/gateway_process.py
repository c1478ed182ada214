"""A gateway in its own process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxpool.common.closing import Closing
from support.pool import PATIENCE, Pool, until


class GatewayProcess(Closing):
    """`mlxpool gateway` on a port that does not change when the process is killed and restarted."""

    def __init__(self, run_dir: Path, port: int, log: Path, *flags: str) -> None:
        self.port = port
        self.log_path = log
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [
            *(sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), "gateway"),
            *("--port", str(port), "--no-access-log", *flags),
        ]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the gateway if it does not run, and waits until it accepts connections."""
        if self.process is None:
            with self.log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        until(self._listens, f"the gateway listens:\n{self.log_path.read_text()[-2000:]}")

    def _listens(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log_path.read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), PATIENCE).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Sends SIGKILL to the gateway."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)
            self.process = None

    def close(self) -> None:
        """Sends SIGTERM to the gateway; fails if the process does not end."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the gateway did not end:\n{self.log_path.read_text()}") from None


@contextmanager
def serving(pool: Pool, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs `mlxpool gateway` for a pool, on a free port.

    Yields the process and its URL.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*pool.command(), "gateway", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()
