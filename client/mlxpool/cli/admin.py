"""Requests to the broker's admin socket, and the errors if there is no answer."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.cli.target import Target
from mlxpool.common.errors import BrokerLost
from mlxpool.common.transport import question

ADVICE = "start one with `mlxpool serve`, or name its folder with --run-dir or $MLXPOOL_RUN_DIR"
ANSWER_TIMEOUT = 2.0  # seconds
RELOAD_TIMEOUT = 30.0  # in seconds; the broker reads settings and models folders before it answers


def check_socket(run_dir: Path, endpoint: str) -> None:
    """Raises BrokerLost if no process can answer at an endpoint now."""
    if why := _absence(run_dir, endpoint):
        raise BrokerLost(why)


def no_answer(run_dir: Path, endpoint: str) -> str:
    """Returns the error for a broker that does not answer, with the pid from its lock file."""
    if endpoint.startswith("tcp:"):
        return f"no broker answers at {endpoint}; is it its admin endpoint?"
    if why := _absence(run_dir, endpoint):
        return why
    pid = lock_pid(run_dir)
    if pid is None or not alive(pid):
        return f"no broker answers at {endpoint}; {ADVICE}"
    return f"the broker (pid {pid}) of {run_dir} does not answer: it is frozen, or very busy"


def _absence(run_dir: Path, endpoint: str) -> str:
    """Returns why no process can answer at an ipc endpoint; "" if one may answer.

    Either there is no socket, or the run directory has the socket of a broker that has ended.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return ""
    pid = lock_pid(run_dir) if path.startswith(f"{run_dir}/") else None
    if os.path.exists(path):
        if pid is None or alive(pid) or not _refused(path):
            return ""  # a broker may run; in another container its pid is unknown
        cause = f"the broker of {run_dir} (pid {pid}) has ended without removing {path}"
    elif pid is not None and alive(pid):
        return (
            f"the broker (pid {pid}) of {run_dir} is starting or ending: there is no socket {path}"
        )
    else:
        cause = f"there is no socket {path}"
    advice = _fault(run_dir) if path.startswith(f"{run_dir}/") else ""
    return f"no broker runs here: {cause}; {advice or ADVICE}"


def _fault(run_dir: Path) -> str:
    """Returns why a broker could not start in this run directory; "" if it could."""
    # Imported here, because only this error needs the settings code.
    from mlxpool.common.config.loading import access_fault

    try:
        return access_fault(run_dir, run_dir.stat())
    except OSError:
        return ""  # the directory does not exist, or cannot be read


def explained(run_dir: Path, error: BrokerLost) -> BrokerLost:
    """Returns the error, or a more exact error if the local broker is alive but silent."""
    pid = lock_pid(run_dir)
    local = error.message.startswith(f"no broker answers at ipc://{run_dir}/")
    if not local or pid is None or not alive(pid):
        return error
    return BrokerLost(no_answer(run_dir, f"ipc://{run_dir}/front.ipc"))


def _refused(path: str) -> bool:
    """Returns whether no process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def lock_pid(run_dir: Path) -> int | None:
    """Returns the pid in the lock file of a run directory; this process may have ended."""
    try:
        return int((run_dir / "lock").read_text())
    except (OSError, ValueError):
        return None


def alive(pid: int) -> bool:
    """Returns whether a process with this id runs, for any user.

    A zombie process does not count: it has ended, but its parent has not waited for it yet.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # without /proc a zombie is not recognised
    return state != "Z"


def ask(
    where: Path | Target,
    kind: str,
    body: Mapping[str, Any] | None = None,
    ident: bytes | None = None,
    *,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Sends one admin message. Returns the body of the answer.

    `where` is the run directory of a local broker, or a target. Raises BrokerLost naming the
    endpoint if no answer comes in time; a starting broker may still answer later. Raises
    Unauthorized naming the key if the broker refuses it. If the answer is an error, raises this
    error.
    """
    target = Target(where) if isinstance(where, Path) else where
    endpoint, credentials = target.endpoint_of("admin"), target.credentials()
    answer = question.ask(endpoint, credentials, kind, body or {}, ident, timeout)
    if answer is None:
        raise BrokerLost(no_answer(target.run_dir, endpoint))
    return answer


def reload(target: Target) -> dict[str, Any]:
    """Makes the broker read its settings again. Returns the changes. Raises the errors of `ask`."""
    ask(target, "stats")  # so that a broker that hangs is noticed within ANSWER_TIMEOUT
    return ask(target, "reload", timeout=RELOAD_TIMEOUT)
