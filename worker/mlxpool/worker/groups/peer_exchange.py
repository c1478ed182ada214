"""Connects the GPUs of a group: each rank maps the other ranks' buffers, and all try the sums.

The shape of the buffers depends on whether NVLink connects all GPUs.

Every rank takes part in every step, even after a failure of its own, so that all ranks decide
alike. If some ranks used kernels and others NCCL, they would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxpool.worker.groups.peer_memory import (
    HANDLE_BYTES,
    IDENTITY_BYTES,
    PeerMemory,
    PeerMemoryError,
)
from mlxpool.worker.groups.peer_sums import BufferShape, PeerSums
from mlxpool.worker.kernels.kernel_cache import compiling
from mlxpool.worker.transfers.shared_array import Numbers

TRIAL_BOUND = 20.0  # seconds that the first sums wait for a peer, which may still compile kernels
TRIAL_WIDTH = 64  # numbers of a line of the arrays that are added up for a trial
TRIAL_BYTES = 2**16  # bytes of a large trial array, if one kernel adds up small arrays, too
NO_HANDLE, NO_IDENTITY = bytes(HANDLE_BYTES), bytes(IDENTITY_BYTES)


class Agreement(Protocol):
    """The operations by which ranks agree before their GPUs are connected."""

    rank: int
    ranks: int

    def gathered(self, own: bytes) -> list[bytes]:
        """Returns the bytes of every rank; all have the same length."""

    def least(self, number: int) -> int:
        """Returns the least of the ranks' numbers."""


def connect(
    agreement: Agreement,
    open_memory: Callable[[], PeerMemory],
    shape_of: Callable[[bool], BufferShape],
    tries: Callable[[PeerSums], bool] | None = None,
) -> PeerSums:
    """Connects this rank with the other ranks; returns its PeerSums.

    Before that, all ranks map all buffers, and a trial sum has to be right on each rank.
    `shape_of` returns the shape of buffers; its argument is True if NVLink connects all GPUs.
    `tries` replaces the function of the trial sum. Raises PeerMemoryError on all ranks if any rank
    fails. The text of the exception is the error of this rank, or says that another rank failed.
    """
    memory, identity, own, handle, why = None, NO_IDENTITY, 0, NO_HANDLE, ""
    try:
        memory = open_memory()
        identity = memory.identity()
    except PeerMemoryError as error:
        why = str(error)
    shape = shape_of(_over_nvlink(agreement, memory, identity))
    if identity != NO_IDENTITY and memory is not None:
        try:
            own = memory.allocate(shape.size)
            handle = memory.export(own)
        except PeerMemoryError as error:
            why = str(error)
    addresses: list[int] = []
    try:
        handles = agreement.gathered(handle)
        without = [rank for rank, handle in enumerate(handles) if handle == NO_HANDLE]
        if memory is None or without:
            raise PeerMemoryError(why or f"rank {without[0]} cannot share the memory of its GPU")
        try:
            for rank, handle in enumerate(handles):
                addresses.append(own if rank == agreement.rank else memory.open(handle))
        except PeerMemoryError as error:
            why = str(error)
        _require_all(agreement, not why, why, "map the memory of the other GPUs")
        sums, why = _tried(shape, agreement.rank, addresses, tries or _trial)
        _require_all(agreement, sums is not None, why, "add up over the memory of the other GPUs")
    except PeerMemoryError:
        _give_up(agreement, memory, own, [address for address in addresses if address != own])
        raise
    assert sums is not None, "required of all ranks"
    return sums


def _over_nvlink(agreement: Agreement, memory: PeerMemory | None, own: bytes) -> bool:
    """Returns whether NVLink connects each GPU with all others; every rank takes part."""
    identities = agreement.gathered(own)
    others = [identity for rank, identity in enumerate(identities) if rank != agreement.rank]
    linked = False
    if memory is not None and NO_IDENTITY not in identities:
        with suppress(PeerMemoryError):
            linked = all(map(memory.over_nvlink, others))
    return bool(agreement.least(int(linked)))


def _require_all(agreement: Agreement, succeeded: bool, why: str, what: str) -> None:
    """Raises PeerMemoryError on every rank unless all ranks have succeeded."""
    if not agreement.least(int(succeeded)):
        raise PeerMemoryError(why or f"another rank cannot {what}")


def _tried(
    shape: BufferShape, rank: int, addresses: Sequence[int], trial: Callable[[PeerSums], bool]
) -> tuple[PeerSums | None, str]:
    """Tries the sum kernels over these buffers. Returns the sums and "", or None and the error."""
    try:
        sums = PeerSums(shape, rank, addresses)
        sums.set_bound(TRIAL_BOUND)
        with compiling():
            right = trial(sums)
    except (RuntimeError, ValueError) as error:
        return None, f"the kernels do not work here: {error}"
    if sums.lost is not None:
        late = f"rank {sums.lost} did not join the first sums within {TRIAL_BOUND:.0f} s"
        return None, late
    return (sums, "") if right else (None, "the kernels give wrong numbers here")


def _trial(sums: PeerSums) -> bool:
    """Computes sums of known numbers with each kernel; returns whether all sums are right."""
    limits, right = sums.shape.limits, True
    for size in (8 * TRIAL_WIDTH, 2 * limits.small or TRIAL_BYTES):
        if not 0 < size <= max(limits.small, limits.large):
            continue
        numbers = [_numbers(rank, size // (2 * TRIAL_WIDTH)) for rank in range(sums.shape.ranks)]
        own = mx.array(numbers[sums.rank]).astype(mx.bfloat16)
        for _ in range(2):  # twice, so that each operation uses both halves of the buffers
            for result, expected in (
                (sums.sum(own), np.sum(numbers, axis=0)),
                (sums.joined(own), np.concatenate(numbers, axis=1)),
                (sums.sum(own, own), np.sum(numbers, axis=0) + numbers[sums.rank]),
            ):
                assert result is not None, f"arrays of {size} bytes are within the limits"
                right &= bool((np.array(result.astype(mx.float32)) == expected).all())
    return right


def _numbers(rank: int, lines: int) -> Numbers:
    """Returns small whole numbers [lines, TRIAL_WIDTH], whose sums are exact."""
    count = np.arange(lines * TRIAL_WIDTH, dtype=np.int64)
    return ((count * (rank + 3) + rank) % 16).astype(np.float32).reshape(lines, TRIAL_WIDTH)


def _give_up(
    agreement: Agreement, memory: PeerMemory | None, own: int, opened: Sequence[int]
) -> None:
    """Unmaps peers' memory and, when all ranks have unmapped it, frees the allocated memory.

    To free memory that another process still maps is undefined behaviour. So every rank takes part,
    also a rank without memory.
    """
    for address in opened:
        if memory is not None:
            with suppress(PeerMemoryError):
                memory.close(address)
    agreement.least(1)
    if memory is not None and own:
        with suppress(PeerMemoryError):
            memory.free(own)
