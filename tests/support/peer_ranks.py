"""Ranks of a group on simulated GPUs, whose buffers are in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxpool.worker.groups.peer_memory import HANDLE_BYTES, PeerMemoryError
from mlxpool.worker.groups.peer_sums import BufferShape, Limits, PeerSums

UNREACHABLE = bytes(HANDLE_BYTES)


class FakePeerMemory:
    """Implements PeerMemory in this process; a handle is the address."""

    def __init__(self, *, exports: bool = True, opens: bool = True) -> None:
        """`exports`, `opens`: whether these calls work."""
        self.exports, self.opens = exports, opens
        self.allocated: dict[int, np.ndarray] = {}
        self.opened: list[int] = []

    def allocate(self, size: int) -> int:
        """See PeerMemory."""
        whole = np.zeros(size + 64, dtype=np.uint8)
        address = -(-whole.ctypes.data // 64) * 64
        self.allocated[address] = whole
        return address

    def export(self, address: int) -> bytes:
        """See PeerMemory."""
        if not self.exports:
            raise PeerMemoryError("cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED")
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        """See PeerMemory."""
        if not self.opens:
            raise PeerMemoryError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_HANDLE")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address: int) -> None:
        """See PeerMemory."""
        self.opened.remove(address)

    def free(self, address: int) -> None:
        """See PeerMemory."""
        del self.allocated[address]


class SimulatedRanks:
    """The sums of all ranks of a group; `memory` keeps their buffers."""

    def __init__(self, ranks: int, limits: Limits, bound: float = 600.0) -> None:
        self.memory = FakePeerMemory()
        shape = BufferShape(ranks, limits)
        addresses = [self.memory.allocate(shape.size) for _ in range(ranks)]
        self.sums: Sequence[PeerSums] = [PeerSums(shape, rank, addresses) for rank in range(ranks)]
        for one in self.sums:
            one.set_bound(bound)
