"""Ports of the loopback interface for servers that start later."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000  # Ray gives its workers 10,002 to 19,999; browsers refuse some lower ports
USUAL_LIMIT = 32_768  # the begin of the kernel's own range, if it is unknown
MIN_CHOICE = 2_000  # the fewest ports to choose from
given: set[int] = set()  # ports given in this process


def free_port() -> int:
    """Returns a port without a listener, chosen as `free_ports` chooses ports."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Returns `count` ports without a listener; a process gets each port once.

    Until the server starts, no other socket gets the ports: they are outside the range from which
    the kernel assigns ports, and each test process of the run has its own ports. If too few ports
    are below the kernel's range, the ports are from that range.
    """
    limit = highest_port()
    if limit - LOWEST < MIN_CHOICE:
        return _of_the_kernel(count)
    first, step = _share(os.environ)
    candidates = [port for port in range(LOWEST + first, limit, step) if port not in given]
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    while len(ports) < count:
        port = candidates.pop()
        if _is_free(port):
            ports.append(port)
    given.update(ports)
    return ports


def _share(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the index of this process in a run of the tests, and the number of processes."""
    name = environment.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def highest_port() -> int:
    """Returns the exclusive upper bound of the ports that tests may use.

    The bound is the lowest port that the kernel assigns to a socket that requests any port.
    """
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
        return [int(socket_.getsockname()[1]) for socket_ in held]
