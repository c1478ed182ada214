"""Operations that the ranks of a group compute together: sums and concatenations over all ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import mlx.core as mx
import numpy as np

from mlxpool.worker.groups import peer_exchange
from mlxpool.worker.groups.links import LOOPBACK, Meeting
from mlxpool.worker.groups.peer_memory import CudaPeerMemory, PeerMemory, PeerMemoryError
from mlxpool.worker.groups.peer_sums import BufferShape, Limits, PeerSums
from mlxpool.worker.kernels import device

log = logging.getLogger("mlxpool.worker")

AUTO, NCCL = "auto", "nccl"  # values of device_sums


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets environment variables that MLX reads when it joins a group, and restores them.

    A process that is started later would otherwise read them as variables of its own group.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class RankLost(RuntimeError):
    """Another rank did not reach a sum in time, so the group has to end."""


class Collectives:
    """The operations of a group; each rank calls the same operations in the same order.

    Within one evaluation, each operation must depend on the result of the operation before it, see
    peer_sums.py.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.ranks = group.rank(), group.size()
        self._peers: PeerSums | None = None
        self._wait_limit = 0.0

    @classmethod
    def join(cls, meeting: Meeting, sums: str = NCCL) -> Self:
        """Joins the group by NCCL between GPUs, else by a ring of connections; waits without limit.

        `sums`: the method of sums between CUDA GPUs, a value of device_sums. Raises RuntimeError
        with the addresses if the group cannot be joined.
        """
        backend = "nccl" if device.on_gpu() else "ring"
        with _environment(
            MLX_RANK=str(meeting.rank),
            MLX_WORLD_SIZE=str(meeting.ranks),
            MLX_HOSTFILE=meeting.hosts,
            NCCL_HOST_IP=LOOPBACK,
            NCCL_PORT=str(meeting.port),
        ):
            try:
                collectives = cls(mx.distributed.init(strict=True, backend=backend))
                # Connections are made before the first sum needs them.
                mx.eval(collectives.all_sum(mx.zeros((1,))))
            except RuntimeError as error:
                places = meeting.nccl_places if backend == "nccl" else meeting.ring_places
                raise RuntimeError(
                    f"rank {meeting.rank} of {meeting.ranks} cannot join its group: {error};"
                    f" {places}. If another program uses one of these ports, start the worker"
                    " again, with other ports"
                ) from error
        if backend == "nccl":
            collectives.connect_gpus(meeting.wait_limit, sums)
        return collectives

    def connect_gpus(
        self,
        wait_limit: float,
        sums: str = AUTO,
        *,
        open_memory: Callable[[], PeerMemory] = CudaPeerMemory,
        limits: Limits | None = None,
    ) -> None:
        """Connects the GPUs, so that from now on kernels over peer memory compute the sums.

        If a rank cannot use these kernels, or if `sums` is NCCL, NCCL still computes all sums. In a
        sum, a GPU waits `wait_limit` seconds for a peer. `limits`: the largest arrays that the
        kernels add up; None: `limits_of` chooses them.
        """
        self._peers = None
        if sums == NCCL:
            log.info("NCCL computes the sums between the GPUs", extra={"device_sums": NCCL})
            return

        def shape_of(lines: bool) -> BufferShape:
            return BufferShape.of(self.ranks, limits, lines=lines)

        try:
            peers = peer_exchange.connect(self, open_memory, shape_of)
        except PeerMemoryError as error:
            log.warning(
                "NCCL computes the sums between the GPUs, because they cannot use the memory of"
                " each other; small sums take several times as long",
                extra={"why": str(error)},
            )
            return
        peers.set_bound(wait_limit)
        self._peers, self._wait_limit = peers, wait_limit
        log.info(
            "sums between the GPUs of the group are computed over the memory of each other",
            extra={
                "bytes": peers.shape.size,
                "to": max(peers.shape.limits.large, peers.shape.limits.small),
                "nvlink": peers.shape.lines,
            },
        )

    @property
    def nbytes(self) -> int:
        """The bytes of GPU memory for sums, besides MLX's memory."""
        return 0 if self._peers is None else self._peers.shape.size

    def check(self) -> None:
        """Raises RankLost if a sum stopped waiting for a peer: later results are invalid."""
        lost = None if self._peers is None else self._peers.lost
        if lost is not None:
            raise RankLost(
                f"rank {lost} did not join a sum of rank {self.rank} within"
                f" {self._wait_limit:.0f} s: its process or its GPU hangs, or the ranks"
                " have computed different passes"
            )

    def all_sum(self, x: mx.array) -> mx.array:
        """Returns the sum of the ranks' arrays, the same bits on every rank."""
        total = None if self._peers is None else self._peers.sum(x)
        return mx.distributed.all_sum(x, group=self._group) if total is None else total

    def adds(self, size: int, dtype: mx.Dtype) -> bool:
        """Returns whether one kernel computes a sum of `size` bytes and adds it to a residual."""
        return self._peers is not None and self._peers.takes(size, dtype)

    def sum_onto(self, residual: mx.array, x: mx.array) -> mx.array:
        """Returns `residual` plus the sum of the ranks' x, rounded once if `adds` returns True."""
        total = None if self._peers is None else self._peers.sum(x, residual)
        return residual + self.all_sum(x) if total is None else total

    def gathered(self, own: bytes) -> list[bytes]:
        """Waits for the bytes of every rank and returns them, by rank.

        All ranks give the same number of bytes, a multiple of 4.
        """
        mine = mx.array(np.frombuffer(own, dtype=np.int32))
        parts = mx.distributed.all_gather(mine, group=self._group)
        return [bytes(part) for part in np.array(parts).reshape(self.ranks, -1)]

    def least(self, number: int) -> int:
        """Waits for the ranks' numbers and returns the least."""
        own = mx.array([number], dtype=mx.int64)
        least: Any = mx.distributed.all_min(own, group=self._group).item()
        return int(least)

    def joined(self, x: mx.array) -> mx.array:
        """Returns x [T, n] of all ranks as one array [T, ranks * n], in the order of ranks."""
        joined = None if self._peers is None else self._peers.joined(x)
        if joined is not None:
            return joined
        lines, columns = x.shape
        parts = mx.distributed.all_gather(x, group=self._group)
        parts = parts.reshape(self.ranks, lines, columns)
        return parts.swapaxes(0, 1).reshape(lines, self.ranks * columns)

    def from_first(self, x: mx.array) -> mx.array:
        """Returns the array of rank 0; the numbers of the other ranks' arrays are ignored.

        All arrays have the same shape. The arrays are summed, but ranks other than 0 add zeros,
        which change no bit.
        """
        return self.all_sum(x if self.rank == 0 else mx.zeros(x.shape, x.dtype))
