"""What rank 0 has of its group once the processes of the other ranks are started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mlxpool.worker.groups.pipes import Orders


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a group find each other, on this machine.

    `hosts` is the path of a file with an address for each rank, and `port` the one on which rank 0
    gives the others the identity of their group; which of them is used depends on the back end.
    """

    rank: int
    ranks: int
    hosts: str
    port: int

    @classmethod
    def of(cls, rank: int, ranks: int, hosts: int, port: int) -> Meeting:
        """The meeting whose file of addresses this process has open as descriptor `hosts`."""
        return cls(rank, ranks, f"/dev/fd/{hosts}", port)


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """Where the ranks meet, and the pipes to the others."""

    meeting: Meeting
    orders: Orders


StartGroup: TypeAlias = Callable[[], GroupLinks]  # raises ModelLoadFailed
