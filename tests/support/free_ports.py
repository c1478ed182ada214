"""Ports of the loopback interface for servers that start later."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000  # Ray gives its workers 10,002 to 19,999, and browsers refuse some below
USUAL_LIMIT = 32_768  # where the kernel's own range begins, if it does not say
MIN_CHOICE = 2_000  # ports to choose from
_given: set[int] = set()  # in this process


def free_port() -> int:
    """See free_ports."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """So many ports on which nobody listens; each is given once in a process.

    The kernel gives none of them to a socket that asks for any port, and the other processes of a
    run of the tests give others, so they stay free until the server starts. Where the kernel's
    range leaves no room below it, they are of its range.
    """
    limit = _limit()
    if limit - LOWEST < MIN_CHOICE:
        return _of_the_kernel(count)
    first, step = _share(os.environ)
    candidates = [port for port in range(LOWEST + first, limit, step) if port not in _given]
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    while len(found) < count:
        port = candidates.pop()
        if _is_free(port):
            found.append(port)
    _given.update(found)
    return found


def _share(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which of the processes of a run of the tests this is, and how many there are."""
    name = environment.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def _limit() -> int:
    """The first port that the kernel gives to a socket that asks for any."""
    try:
        return int(RANGE.read_text().split()[0])
    except OSError:
        return USUAL_LIMIT


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _of_the_kernel(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in held]
