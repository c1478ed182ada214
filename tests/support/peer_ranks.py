"""Ranks of a group on simulated GPUs: all in this process, or each in its own process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import pytest

from mlxpool.worker.groups.collectives import NCCL, Collectives
from mlxpool.worker.groups.peer_memory import HANDLE_BYTES, IDENTITY_BYTES, PeerMemoryError
from mlxpool.worker.groups.peer_sums import LINE_BYTES, BufferShape, Launch, Limits, PeerSums
from support import simt

FEW = Limits(small=2**12, large=2**17)  # bytes; small, so that a slow machine reaches both kernels
# A block with two chunks, and two blocks with together up to five chunks of another size.
FEW_LAUNCHES = (Launch(10_000, 1, 1), Launch(2**17, 2, 2))
# A block whose warps have up to two portions, and two blocks with up to five portions of another
# size.
FEW_LINE_LAUNCHES = (Launch(10_000, 2, 1), Launch(2**17, 4, 2))
BOUND = 240.0  # seconds
NVLINK = "SIMULATED_NVLINK"  # environment variable: "yes" if NVLink connects the processes


class FakePeerMemory:
    """Implements PeerMemory in this process. A handle is the memory's address."""

    def __init__(
        self, *, exports: bool = True, opens: bool = True, identity: int = 1, nvlink: bool = False
    ) -> None:
        """`exports`, `opens`: whether the methods `export` and `open` succeed.

        If `identity` is 0, the method `identity` raises PeerMemoryError.
        """
        self.exports, self.opens, self.number, self.nvlink = exports, opens, identity, nvlink
        self.allocated: dict[int, np.ndarray] = {}
        self.opened: list[int] = []

    def identity(self) -> bytes:
        """Returns the bytes of the simulated GPU's number. Raises PeerMemoryError if it is 0."""
        if not self.number:
            raise PeerMemoryError("cuDeviceGetUuid_v2 failed: CUDA_ERROR_NOT_SUPPORTED")
        return self.number.to_bytes(IDENTITY_BYTES, "little")

    def over_nvlink(self, identity: bytes) -> bool:
        """Returns whether the simulation has NVLink and the identity is another GPU's."""
        return self.nvlink and identity != self.identity()

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes of zeros, aligned to LINE_BYTES; returns their address."""
        whole = np.zeros(size + LINE_BYTES, dtype=np.uint8)
        address = -(-whole.ctypes.data // LINE_BYTES) * LINE_BYTES
        self.allocated[address] = whole
        return address

    def export(self, address: int) -> bytes:
        """Returns a handle that contains the address.

        Raises PeerMemoryError if `exports` is False.
        """
        if not self.exports:
            raise PeerMemoryError("cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED")
        return address.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        """Returns the address in a handle. Raises PeerMemoryError if `opens` is False."""
        if not self.opens:
            raise PeerMemoryError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_HANDLE")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, address: int) -> None:
        """Closes the mapping at an address that `open` has returned."""
        self.opened.remove(address)

    def free(self, address: int) -> None:
        """Frees memory that `allocate` returned."""
        del self.allocated[address]


class SimulatedRanks:
    """The all-reduce objects (PeerSums) of a group's simulated ranks, with their buffers."""

    def __init__(
        self, ranks: int, limits: Limits, bound: float = BOUND, *, lines: bool = False
    ) -> None:
        self.memory = FakePeerMemory()
        shape = BufferShape(ranks, limits, FEW_LINE_LAUNCHES if lines else FEW_LAUNCHES, lines)
        addresses = [self.memory.allocate(shape.size) for _ in range(ranks)]
        self.sums: Sequence[PeerSums] = [PeerSums(shape, rank, addresses) for rank in range(ranks)]
        self._addresses = addresses
        for rank_sums in self.sums:
            rank_sums.set_bound(bound)

    def begin_at(self, epoch: int) -> None:
        """Sets, in every rank's buffer, the number of all-reduces so far."""
        for address in self._addresses:
            ctypes.c_int64.from_address(address).value = epoch


class MappedPeerMemory:
    """Implements PeerMemory between processes on memfd files, which have no name in a folder.

    A handle is the path of the file in /proc.
    """

    _kept: ClassVar[list[tuple[int, mmap.mmap]]] = []  # open until the process ends

    def identity(self) -> bytes:
        """Returns the process id as the identity of a simulated GPU."""
        return os.getpid().to_bytes(IDENTITY_BYTES, "little")

    def over_nvlink(self, identity: bytes) -> bool:
        """Returns whether the environment variable SIMULATED_NVLINK is "yes", for any `identity`.

        Then kernels for NVLink run. They work, because the simulation (simt.h) writes each memory
        line as a whole, as NVLink does.
        """
        return os.environ.get(NVLINK) == "yes"

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes of zeros that processes can share; returns their address."""
        descriptor = os.memfd_create("buffer")
        os.ftruncate(descriptor, size)
        return self._map(descriptor)

    def export(self, address: int) -> bytes:
        """Returns a handle for other processes: the path of the memory's file in /proc."""
        descriptor = next(fd for fd, memory in self._kept if _address(memory) == address)
        return f"/proc/{os.getpid()}/fd/{descriptor}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        """Maps the file that another process exported; returns the address."""
        return self._map(os.open(handle.rstrip(b"\0"), os.O_RDWR))

    def close(self, address: int) -> None:
        """Does nothing: the mapping stays until the process ends."""

    def free(self, address: int) -> None:
        """Does nothing: the memory stays until the process ends."""

    def _map(self, descriptor: int) -> int:
        self._kept.append((descriptor, mmap.mmap(descriptor, 0)))
        return _address(self._kept[-1][1])


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@contextmanager
def peer_sums(collectives: Collectives) -> Iterator[set[str]]:
    """Makes this process's rank compute all-reduces by simulated kernels, inside the context.

    Yields the names of the kernels that ran. Other tests compile the same kernels with NVIDIA's
    compiler.
    """
    with simt.simulated() as called, pytest.MonkeyPatch.context() as patch:
        patch.setattr(simt, "compiled", lambda *given: 0)
        collectives.connect_gpus(BOUND, open_memory=MappedPeerMemory, limits=FEW)
        assert collectives.nbytes, "see the log"
        yield called
        collectives.connect_gpus(BOUND, NCCL)
