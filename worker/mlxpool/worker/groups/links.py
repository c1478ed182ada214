"""What rank 0 has of its group once the processes of the other ranks are started."""

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
    """Where the ranks of a group find each other, on this machine.

    `hosts` is the path of a file with an address for each rank, and `port` the one on which rank 0
    gives the others the identity of their group; which of them is used depends on the back end.
    `wait_limit`: seconds that a rank's GPU waits for another's part of a sum, see WorkerConfig.
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
        """The meeting whose file of addresses this process has open as descriptor `hosts`."""
        return cls(rank, ranks, f"/dev/fd/{hosts}", port, wait_limit)

    @property
    def ring_places(self) -> str:
        """Where this rank listens in a ring of connections, and to which address it connects."""
        with open(self.hosts, encoding="ascii") as file:
            addresses = [address for (address,) in json.load(file)]
        behind = (self.rank + 1) % self.ranks
        return f"it listens on {addresses[self.rank]} and connects to {addresses[behind]}"

    @property
    def nccl_places(self) -> str:
        """Where this rank gives the identity of the group to the others, or gets it."""
        does = "listens on" if self.rank == 0 else "connects to"
        return f"it {does} {LOOPBACK}:{self.port}"


class GroupLinks(Struct, frozen=True):
    """Where the ranks meet, and the pipes to the others.

    `ready` is the descriptor of a pipe into which each of them writes a byte before it joins.
    `ports` are kept for the group until they are listened on, and closed when all have joined.
    """

    meeting: Meeting
    orders: Orders
    ready: int
    ports: ExitStack = field(default_factory=ExitStack)

    def wait_until_ready(self, on_progress: Callable[[], None]) -> None:
        """Waits until all ranks are about to join; a rank that ends before ends this process.

        MLX holds the interpreter's lock while a rank joins, so that the main thread of rank 0
        could say nothing to the broker until the last rank has come.
        """
        LOAD.enter("ranks")
        waiting = self.meeting.ranks - 1
        while waiting:
            if not (ready := os.read(self.ready, waiting)):
                raise RuntimeError(f"{waiting} ranks of the group ended before they joined it")
            waiting -= len(ready)
            on_progress()


StartGroup: TypeAlias = Callable[[], GroupLinks]  # raises ModelLoadFailed
