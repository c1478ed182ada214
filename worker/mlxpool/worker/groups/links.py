"""Rank 0's connections to the other ranks of its group, after the start of their processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from msgspec import Struct, field

from mlxpool.common.config.schema import WAIT_LIMIT
from mlxpool.worker.groups.pipes import Orders
from mlxpool.worker.system.load_clock import LOAD

LOOPBACK = "127.0.0.1"


class Meeting(Struct, frozen=True):
    """The addresses by which the ranks of a group find each other, on this machine.

    `hosts` is the path of a file with an address for each rank, for a ring. `port` is the port on
    which rank 0 gives the other ranks the identity of the group, for NCCL. `wait_limit`: the
    seconds that a GPU waits in a sum for another rank, see WorkerConfig.
    """

    rank: int
    ranks: int
    hosts: str
    port: int
    wait_limit: float = WAIT_LIMIT

    @classmethod
    def of(
        cls, rank: int, ranks: int, hosts: int, port: int, wait_limit: float = WAIT_LIMIT
    ) -> Meeting:
        """Returns the Meeting of a rank; `hosts`: the file descriptor of the file of addresses."""
        return cls(rank, ranks, f"/dev/fd/{hosts}", port, wait_limit)

    @property
    def ring_places(self) -> str:
        """A text for errors: the addresses that this rank listens on and connects to, in a ring."""
        with open(self.hosts, encoding="ascii") as file:
            addresses = [address for (address,) in json.load(file)]
        following = (self.rank + 1) % self.ranks
        return f"it listens on {addresses[self.rank]} and connects to {addresses[following]}"

    @property
    def nccl_places(self) -> str:
        """A text for errors: the address on which this rank gives or gets the group's identity."""
        does = "listens on" if self.rank == 0 else "connects to"
        return f"it {does} {LOOPBACK}:{self.port}"


class GroupLinks(Struct, frozen=True):
    """The connections of rank 0 to the other ranks: their addresses, and the pipes to them.

    `ready` is the descriptor of a pipe; each other rank writes a byte into it before it joins.
    `ports`: the sockets that reserve the group's ports; they are closed when all ranks have joined.
    """

    meeting: Meeting
    orders: Orders
    ready: int
    ports: ExitStack = field(default_factory=ExitStack)

    def wait_until_ready(self, on_progress: Callable[[], None]) -> None:
        """Waits until all ranks are about to join. Raises RuntimeError if a rank ends.

        MLX holds the GIL while a rank joins. Without this wait, the main thread of rank 0 could
        send nothing to the broker until the last rank has joined.
        """
        LOAD.enter("ranks")
        waiting = self.meeting.ranks - 1
        while waiting:
            if not (ready := os.read(self.ready, waiting)):
                raise RuntimeError(f"{waiting} ranks of the group ended before they joined it")
            waiting -= len(ready)
            on_progress()


StartGroup: TypeAlias = Callable[[], GroupLinks]  # raises ModelLoadFailed
