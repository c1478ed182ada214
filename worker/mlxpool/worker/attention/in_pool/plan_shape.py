"""The int32 numbers that describe a ragged pass, such as token ids, positions and slots.

On the host they are in one array, at fixed offsets; on the device they are several arrays.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.attention.in_pool.ragged_batch import RaggedArrays
from mlxpool.worker.kernels.ragged_attention import RaggedPlan
from mlxpool.worker.kernels.work_list import TileShape, capacity_of

ITEM = 8  # how many numbers an item of a work list has

Int32s = npt.NDArray[np.int32]


class PassMemory(Struct, frozen=True):
    """Arrays on the device that all passes use: block tables, and memory for partial sums."""

    tables: mx.array
    arrived: mx.array
    partial: mx.array


class PlanShape(Struct, frozen=True):
    """The sizes of the parts of a pass's int32 array, the only array sent to the device.

    A line is one token or padding. `wanted`: the number of lines that the array lists because they
    have results; 0: the array lists none, and every line has results. If `drawn` is None, the
    results are logits. Otherwise the results are the hidden states of the listed lines, and the
    logits of the first `drawn` of them. `tiles`: the shapes of tiles, each of which has a work
    list. `follow`: a row may have several lines, and one kernel computes the pass. `spans`: the
    most spans of the pass; 0: as many as lines.
    """

    lines: int
    wanted: int
    tiles: tuple[TileShape, ...]
    chunks: bool = False  # the pass may have chunks of prompts
    drawn: int | None = None
    follow: bool = False
    spans: int = 0

    @property
    def size(self) -> int:
        """The length of the array."""
        return 5 * self.lines + self.wanted + sum(map(self.capacity, self.tiles)) * ITEM

    def capacity(self, tiles: TileShape) -> int:
        """Returns the number of items in the work list for these tiles."""
        return capacity_of(tiles, self.lines, self.spans)

    @property
    def single(self) -> bool:
        """True if no row has more than one line, and every line gets logits."""
        return not self.wanted and self.drawn is None and not self.follow

    def of_lines(self, numbers: Int32s) -> Int32s:
        """Returns a view [5, lines] of the first part of `numbers`: five numbers of each line."""
        return numbers[: 5 * self.lines].reshape(5, -1)

    def arrays(self, plan: mx.array, memory: PassMemory) -> tuple[mx.array, RaggedArrays]:
        """Divides the int32 array `plan` into the token ids [T] and the other arrays of the pass.

        A negative id refers to a token in flight.
        """
        sizes = [self.lines] * 5 + [self.wanted]
        sizes += [self.capacity(tiles) * ITEM for tiles in self.tiles]
        ids, positions, slots, begins, ends, wanted, *items = mx.split(
            plan, np.cumsum(sizes)[:-1].tolist()
        )
        same = memory.arrived, memory.partial
        plans = {
            shape: RaggedPlan(begins, ends, memory.tables, each.reshape(-1, ITEM), *same)
            for shape, each in zip(self.tiles, items, strict=True)
        }
        named = wanted if self.wanted else None
        return ids, RaggedArrays(positions, slots, named, plans, self.chunks)
