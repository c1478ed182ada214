"""Sums over the ranks of a group: one kernel for each sum, which writes into peers' memory.

Each rank has one buffer, allocated once, that its peers map and write. The kernel is
cuda/peer_sum_lines.cu if NVLink connects all GPUs of the group; otherwise it is cuda/peer_sum.cu
for few bytes, and cuda/peer_sum_large.cu for more. cuda/peer_memory.cuh explains how the ranks stay
in step. The epoch of a sum is the number of sums before it. The GPU counts epochs, so every rank
has to compute the same sums in the same order. MLX runs evaluations one after the other, but
independent kernels of one evaluation at the same time. So the sums of one evaluation must be a
chain: the numbers of each sum depend on the previous sum, as in a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels.device import evaluate_in_own_memory
from mlxpool.worker.kernels.kernel_builder import (
    FLOAT_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    include_line,
)
from mlxpool.worker.transfers.shared_array import LEAST_NUMBERS, SharedArray

PIECE_BYTES = 16  # bytes of x for a thread
SMALL_THREADS, LARGE_THREADS, LINE_THREADS = 128, 512, 256  # threads of a block, by kernel
WORD_BYTES = 32  # bytes of a piece with its tags
LINE_BYTES = 128  # bytes of a line, including a tag of 8 bytes
GROUPS = 4  # groups of eight lanes in a warp; each group has a line at a time
FLAG_BYTES = 8
HALVES = 2  # halves of a buffer; epochs alternate between them
STATE_BYTES = 256  # state in a buffer, before the halves that peers write; see peer_memory.cuh
PLACES = 512  # size of the array with the rank, the bound and the addresses of buffers
ALIGNMENT = 2 * 2**20  # unit of a buffer's size: the driver exports whole pages
LONGEST_BOUND = 10**9  # seconds
DTYPES = (*FLOAT_DTYPES, mx.int32)


class Limits(Struct, frozen=True):
    """The largest arrays, in bytes, that our kernels add up; NCCL adds up larger arrays.

    `small`: the limit of peer_sum.cu. `large`: the limit of peer_sum_large.cu or of
    peer_sum_lines.cu, which replaces both over NVLink.
    """

    small: int
    large: int


class Launch(Struct, frozen=True):
    """The launch parameters of the kernel for large arrays, for arrays of at most `size` bytes.

    `blocks`: the most thread blocks. `unroll`: how many pieces (of 16 bytes) each thread has in a
    chunk. In peer_sum_lines.cu: how many lines (of 128 bytes) each group of eight threads has, an
    even number.
    """

    size: int
    unroll: int
    blocks: int


# Microseconds of a sum on two H200 over NVLink:
#           NCCL  by words  by chunks  by lines
# 8 KiB       36        11         13         9
# 256 KiB     36        13         17        14
# 1 MiB       41        16         18        15
# 8 MiB       75        66         59        40
# 16 MiB     107       107         89        67
LIMITS: Mapping[int, Limits] = {2: Limits(2**18, 2**25)}
# With more ranks, each rank writes an array to each peer, but NCCL's rings write an array about
# twice. Only two ranks were measured, so these limits include only sums that are much faster than
# NCCL's.
OTHER_LIMITS = Limits(2**13, 2**20)
LAUNCHES = (Launch(2**21, 2, 64), Launch(2**25, 8, 64))
LINE_LAUNCHES = (Launch(2**25, 2, 256),)


def limits_of(ranks: int) -> Limits:
    """Returns the largest arrays for which `ranks` ranks use our kernels instead of NCCL."""
    return LIMITS.get(ranks, OTHER_LIMITS)


class BufferShape(Struct, frozen=True):
    """The sizes and offsets in a rank's buffer, with areas for small and for large arrays.

    `lines`: the kernel of peer_sum_lines.cu adds up all arrays. It relies on NVLink: 128 bytes that
    a warp writes together into another GPU's memory also arrive together.
    """

    ranks: int
    limits: Limits
    launches: tuple[Launch, ...] = LAUNCHES
    lines: bool = False

    @classmethod
    def of(cls, ranks: int, limits: Limits | None = None, *, lines: bool) -> BufferShape:
        """Returns the shape for this number of ranks; `limits` defaults to `limits_of(ranks)`."""
        limits = limits or limits_of(ranks)
        if lines:  # the kernel of lines also adds up few bytes
            return cls(ranks, Limits(0, max(limits.small, limits.large)), LINE_LAUNCHES, lines)
        return cls(ranks, limits, LAUNCHES, lines)

    @property
    def small_pieces(self) -> int:
        """The most pieces (of 16 bytes) of a small array."""
        return self.limits.small // PIECE_BYTES

    @property
    def large_pieces(self) -> int:
        """The most pieces (of 16 bytes) of a large array."""
        return self.limits.large // PIECE_BYTES

    @property
    def chunks(self) -> int:
        """The most chunks of a large array, with any launch parameters."""
        fewest = min(launch.unroll for launch in self.launches)
        return -(-self.large_pieces // (LARGE_THREADS * fewest))

    @property
    def large_offset(self) -> int:
        """The offset of the areas for large arrays, in bytes from the end of the buffer's state."""
        return HALVES * (self.ranks - 1) * self.small_pieces * WORD_BYTES

    @property
    def area(self) -> int:
        """The bytes of an area for large arrays: the part of the buffer that one peer writes."""
        if not self.lines:
            return self.large_pieces * PIECE_BYTES + self.chunks * FLAG_BYTES
        return max(
            -(-self.large_pieces // pieces_of_warp(launch.unroll))
            * GROUPS
            * launch.unroll
            * LINE_BYTES
            for launch in self.launches
        )

    @property
    def size(self) -> int:
        """The bytes of a buffer."""
        whole = STATE_BYTES + self.large_offset + HALVES * (self.ranks - 1) * self.area
        return -(-whole // ALIGNMENT) * ALIGNMENT

    def launch_of(self, size: int) -> Launch:
        """Returns the launch parameters for arrays of `size` bytes."""
        fitting = (launch for launch in self.launches if size <= launch.size)
        return next(fitting, self.launches[-1])


def pieces_of_warp(lines: int) -> int:
    """Returns the number of pieces (of 16 bytes) that a warp sends at a time.

    `lines`: how many lines of 128 bytes each group of eight lanes sends.
    """
    return GROUPS * (7 * lines + lines // 2)


class PeerSums:
    """Adds up arrays of all ranks by kernels over peer memory. Used by one thread."""

    def __init__(self, shape: BufferShape, rank: int, addresses: Sequence[int]) -> None:
        """`addresses`: the address of each rank's buffer in this process, by rank."""
        self.shape, self.rank, self._addresses = shape, rank, tuple(addresses)
        self._watch = SharedArray(LEAST_NUMBERS)  # smaller arrays share pages with MLX's arrays
        self.set_bound(LONGEST_BOUND)

    def set_bound(self, seconds: float) -> None:
        """Sets after how many seconds a sum regards a peer as lost.

        Applies to the sums that are built after this call.
        """
        # Every thread block reads the places, and the bound in each wait. Both have to be in the
        # device's own memory; only the new output of an operation is there, see
        # docs/notes/mlx-cuda-buffers.md.
        bound = int(1e9 * min(seconds, LONGEST_BOUND))
        places = mx.array([self.rank, bound, *self._addresses], dtype=mx.int64)
        spare = mx.zeros((PLACES - places.size,), dtype=mx.int64)
        mx.eval(places, spare)
        self._places = mx.concatenate([places, spare])
        evaluate_in_own_memory([self._places])

    @property
    def lost(self) -> int | None:
        """The rank that did not reach a sum within the bound, so that later sums are invalid.

        None: no rank is lost.
        """
        who = int(self._watch.numbers[0])
        return who - 1 if who else None

    def takes(self, size: int, dtype: mx.Dtype) -> bool:
        """Returns whether `sum` supports arrays of `size` bytes of this dtype."""
        return dtype in DTYPES and 0 < size <= max(self.shape.limits.small, self.shape.limits.large)

    def sum(self, x: mx.array, residual: mx.array | None = None) -> mx.array | None:
        """Returns the sum of all ranks' x, plus `residual` of the same shape; rounds only once.

        Returns None if these kernels do not support such arrays.
        """
        if not self.takes(x.nbytes, x.dtype):
            return None
        if residual is not None and residual.dtype != x.dtype:
            return None
        wide = x if x.ndim == 2 else x.reshape(-1, x.shape[-1] if x.ndim > 2 else 1)
        beside = None if residual is None else residual.reshape(wide.shape)
        total = self._launch(wide, beside, joins=False)
        return total if x.ndim == 2 else total.reshape(x.shape)

    def joined(self, x: mx.array) -> mx.array | None:
        """Returns x [T, n] of all ranks as one array [T, ranks * n], in the order of ranks.

        Returns None if these kernels do not support such arrays.
        """
        if not self.takes(x.nbytes, x.dtype) or x.shape[1] * x.dtype.size % PIECE_BYTES:
            return None
        return self._launch(x, None, joins=True)

    def _launch(self, x: mx.array, residual: mx.array | None, *, joins: bool) -> mx.array:
        shape, pieces, width = self.shape, -(-x.nbytes // PIECE_BYTES), x.shape[1]
        adds = residual is not None
        if x.nbytes <= shape.limits.small:
            kernel = _small_kernel(shape, width, x.dtype, adds=adds, joins=joins)
            threads, blocks = SMALL_THREADS, -(-pieces // SMALL_THREADS)
        elif shape.lines:
            launch = shape.launch_of(x.nbytes)
            kernel = _line_kernel(shape, launch.unroll, width, x.dtype, adds=adds, joins=joins)
            threads = LINE_THREADS
            each = threads // WARP_SIZE * pieces_of_warp(launch.unroll)
            blocks = min(launch.blocks, -(-pieces // each))
        else:
            launch = shape.launch_of(x.nbytes)
            kernel = _large_kernel(shape, launch.unroll, width, x.dtype, adds=adds, joins=joins)
            threads = LARGE_THREADS
            blocks = min(launch.blocks, -(-pieces // (threads * launch.unroll)))
        outputs: list[mx.array] = kernel(
            inputs=[x, x if residual is None else residual, self._places, self._watch.array],
            grid=(blocks * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(x.shape[0], width * (shape.ranks if joins else 1))],
            output_dtypes=[x.dtype],
        )
        return outputs[0]


@cache
def _small_kernel(
    shape: BufferShape, width: int, dtype: mx.Dtype, *, adds: bool, joins: bool
) -> Any:
    own = {"PIECES": shape.small_pieces, "THREADS": SMALL_THREADS}
    return _kernel("peer_sum", shape, own, width, dtype, adds=adds, joins=joins)


@cache
def _large_kernel(
    shape: BufferShape, unroll: int, width: int, dtype: mx.Dtype, *, adds: bool, joins: bool
) -> Any:
    own = {
        "PIECES": shape.large_pieces,
        "THREADS": LARGE_THREADS,
        "UNROLL": unroll,
        "MAX_CHUNKS": shape.chunks,
        "OFFSET": shape.large_offset,
    }
    return _kernel("peer_sum_large", shape, own, width, dtype, adds=adds, joins=joins)


@cache
def _line_kernel(
    shape: BufferShape, lines: int, width: int, dtype: mx.Dtype, *, adds: bool, joins: bool
) -> Any:
    own = {
        "AREA": shape.area,
        "THREADS": LINE_THREADS,
        "LINES": lines,
        "OFFSET": shape.large_offset,
    }
    return _kernel("peer_sum_lines", shape, own, width, dtype, adds=adds, joins=joins)


def _kernel(
    name: str,
    shape: BufferShape,
    own: Mapping[str, int],
    width: int,
    dtype: mx.Dtype,
    *,
    adds: bool,
    joins: bool,
) -> Any:
    common: dict[str, Constant] = {"N": dtype, "WIDTH": width, "RANKS": shape.ranks}
    return build_kernel(
        name,
        ["x", "residual", "places", "watch"],
        ["out"],
        {**common, **own, "ADDS": adds, "JOINS": joins},
        contiguous=True,
        header=include_line("peer_memory.cuh"),
        bounds=(own["THREADS"], 1),
    )
