"""What the ranks of a group compute together: sums and concatenations over all of them."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx

from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.kernels import device

LOOPBACK = "127.0.0.1"


class Collectives:
    """The operations of a group; each rank calls the same ones in the same order."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group
        self.rank, self.ranks = group.rank(), group.size()

    @classmethod
    def join(cls, meeting: Meeting) -> Collectives:
        """Waits without end for all ranks: NCCL between GPUs, else a ring of connections.

        Raises RuntimeError where the back end cannot begin.
        """
        os.environ["MLX_RANK"] = str(meeting.rank)
        os.environ["MLX_WORLD_SIZE"] = str(meeting.ranks)
        os.environ["MLX_HOSTFILE"] = meeting.hosts
        os.environ["NCCL_HOST_IP"] = LOOPBACK
        os.environ["NCCL_PORT"] = str(meeting.port)
        backend = "nccl" if device.on_gpu() else "ring"
        found = cls(mx.distributed.init(strict=True, backend=backend))
        mx.eval(found.all_sum(mx.zeros((1,))))  # connections are made before the first is needed
        return found

    def all_sum(self, x: mx.array) -> mx.array:
        """The sum of the ranks' arrays, the same bits on every rank."""
        return mx.distributed.all_sum(x, group=self._group)

    def least(self, number: int) -> int:
        """The least of the ranks' numbers, at once."""
        own = mx.array([number], dtype=mx.int64)
        found: Any = mx.distributed.all_min(own, group=self._group).item()
        return int(found)

    def joined(self, x: mx.array) -> mx.array:
        """x [T, n] of each rank -> [T, ranks * n]: the columns of rank 0, of rank 1, and so on."""
        lines, columns = x.shape
        every = mx.distributed.all_gather(x, group=self._group)
        every = every.reshape(self.ranks, lines, columns)
        return every.swapaxes(0, 1).reshape(lines, self.ranks * columns)

    def from_first(self, x: mx.array) -> mx.array:
        """The array of rank 0; the others give one of the same shape, whose numbers do not count.

        Their zeros are added to it, which changes no bit.
        """
        return self.all_sum(x if self.rank == 0 else mx.zeros(x.shape, x.dtype))
