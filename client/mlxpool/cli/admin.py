"""Questions to the broker's admin socket, and the errors where nobody answers."""

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
RELOAD_TIMEOUT = 30.0  # seconds; settings and models folders are read before the answer


def check_socket(run_dir: Path, endpoint: str) -> None:
    """Raises BrokerLost if nobody can answer at an endpoint now."""
    if why := _absence(run_dir, endpoint):
        raise BrokerLost(why)


def no_answer(run_dir: Path, endpoint: str) -> str:
    """The error message for a broker that does not answer; the lock file tells if it runs."""
    if endpoint.startswith("tcp:"):
        return f"no broker answers at {endpoint}; is it its admin endpoint?"
    if why := _absence(run_dir, endpoint):
        return why
    pid = lock_pid(run_dir)
    if pid is None or not alive(pid):
        return f"no broker answers at {endpoint}; {ADVICE}"
    return f"the broker (pid {pid}) of {run_dir} does not answer: it is frozen, or very busy"


def _absence(run_dir: Path, endpoint: str) -> str:
    """Why nobody can answer at an ipc endpoint; "" if somebody may.

    There is no socket, or it is that of the run directory and the broker that made it has ended.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return ""
    pid = lock_pid(run_dir) if path.startswith(f"{run_dir}/") else None
    if os.path.exists(path):
        if pid is None or alive(pid) or not _refused(path):
            return ""  # the ids of another container's processes are not known here
        what = f"the broker of {run_dir} (pid {pid}) has ended without removing {path}"
    elif pid is not None and alive(pid):
        return (
            f"the broker (pid {pid}) of {run_dir} is starting or ending: there is no socket {path}"
        )
    else:
        what = f"there is no socket {path}"
    advice = _fault(run_dir) if path.startswith(f"{run_dir}/") else ""
    return f"no broker runs here: {what}; {advice or ADVICE}"


def _fault(run_dir: Path) -> str:
    """Why a broker would not start in this run directory; "" where nothing is wrong with it."""
    # Here and not above: only this error needs the code of settings.
    from mlxpool.common.config.loading import access_fault

    try:
        return access_fault(run_dir, run_dir.stat())
    except OSError:
        return ""  # there is none, or it cannot be seen


def explained(run_dir: Path, error: BrokerLost) -> BrokerLost:
    """The error of a client; if the broker of the run directory lives, with what `ps` would say."""
    pid = lock_pid(run_dir)
    local = error.message.startswith(f"no broker answers at ipc://{run_dir}/")
    if not local or pid is None or not alive(pid):
        return error
    return BrokerLost(no_answer(run_dir, f"ipc://{run_dir}/front.ipc"))


def _refused(path: str) -> bool:
    """Whether nobody listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def lock_pid(run_dir: Path) -> int | None:
    """The process that the lock file of a run directory names; it need not live."""
    try:
        return int((run_dir / "lock").read_text())
    except (OSError, ValueError):
        return None


def alive(pid: int) -> bool:
    """Whether there is a process with this id, of whatever user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def ask(
    where: Path | Target,
    kind: str,
    body: Mapping[str, Any] | None = None,
    ident: bytes | None = None,
    *,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Send one admin message; returns the body of the answer.

    `where` is the run directory of a local broker, or a target. Raises BrokerLost naming the
    endpoint without an answer in time, which a broker that is starting may still give, Unauthorized
    naming a key that the broker refuses, and the error that the broker answers with.
    """
    target = Target(where) if isinstance(where, Path) else where
    endpoint, credentials = target.endpoint_of("admin"), target.credentials()
    answer = question.ask(endpoint, credentials, kind, body or {}, ident, timeout)
    if answer is None:
        raise BrokerLost(no_answer(target.run_dir, endpoint))
    return answer


def reload(target: Target) -> dict[str, Any]:
    """Have the broker read its settings again; returns what has changed. Raises as `ask` does."""
    ask(target, "stats")  # says within ANSWER_TIMEOUT that a broker is frozen
    return ask(target, "reload", timeout=RELOAD_TIMEOUT)
