"""Runs a command that ends with its starter: `python -m mlxpool.cluster.tied_process COMMAND…`.

The starter is an actor, which Ray can kill by a signal that the actor cannot handle; its children
would continue to run. So the standard input of this process is a pipe whose other end the starter
holds: when the starter ends, the input ends, and this process ends the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

STDIN = 0
KILL = signal.SIGUSR1  # request to kill the command: a SIGKILL would end only this process
GRACE = 2.0  # seconds between SIGTERM and SIGKILL


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a `mlxpool` command that ends with this process; its output is appended to `log`.

    The command stays in this process group, which Ray kills with an actor.
    """
    python = (sys.executable, "-P", "-m")
    with log.open("ab") as out:
        return subprocess.Popen(
            [*python, "mlxpool.cluster.tied_process", *python, "mlxpool.cli.main", *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
        )


def wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
    """Waits for the end of a process that `start` has started; returns the exit code.

    Raises subprocess.TimeoutExpired.
    """
    code = process.wait(timeout)
    assert process.stdin is not None
    process.stdin.close()
    return code


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that `start` has started, and the process's command."""
    process.send_signal(KILL)


def main(command: Sequence[str]) -> int:
    """Runs the command until it or standard input ends; returns its exit code."""
    signal.signal(KILL, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(KILL, lambda number, frame: process.kill())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: process.send_signal(number))

    def end_with_starter() -> None:
        while os.read(STDIN, 4096):
            pass
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=end_with_starter, name="stdin", daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
