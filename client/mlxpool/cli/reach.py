"""Whether a broker can be there at all, and the error message where none answers."""

from __future__ import annotations

import os
from pathlib import Path

from mlxpool.common.errors import BrokerLost


def check_socket(run_dir: Path, endpoint: str) -> None:
    """Raises BrokerLost if an ipc endpoint has no socket, so that nobody can answer there."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or os.path.exists(path):
        return
    pid = broker_pid(run_dir)
    if pid is not None and path.startswith(f"{run_dir}/"):
        raise BrokerLost(
            f"the broker (pid {pid}) of {run_dir} is starting or ending: there is no socket {path}"
        )
    raise BrokerLost(
        f"no broker runs here: there is no socket {path}; start one with `mlxpool serve`,"
        " or name its folder with --run-dir"
    )


def no_answer(run_dir: Path, endpoint: str) -> str:
    """The error message for a broker that does not answer; the lock file tells if it runs."""
    if endpoint.startswith("tcp:"):
        return f"no broker answers at {endpoint}; is it its admin endpoint?"
    pid = broker_pid(run_dir)
    if pid is None:
        return (
            f"no broker answers at {endpoint}; start one with `mlxpool serve`,"
            " or name its folder with --run-dir"
        )
    return f"the broker (pid {pid}) of {run_dir} does not answer: it is frozen, or very busy"


def broker_pid(run_dir: Path) -> int | None:
    """The process that the lock file of a run directory names, if it lives."""
    try:
        pid = int((run_dir / "lock").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid
