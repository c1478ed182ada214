"""Attention of decode steps over rows in slabs: one token of each of several rows.

Each block is attended to by itself, so that only the last block of a row is padded; then the blocks
of a row are combined by their softmax weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.attention.dot_product import apply_softcap, softmax_average, softmax_terms
from mlxpool.worker.attention.in_slabs.slab_access import NOBODY, SlabAccess, slab_accesses
from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

MASKED_SCORE = -1e30  # finite, so that fully masked blocks give no NaN


class SlabPart(Struct, frozen=True):
    """A SlabAccess as a pass uses it: B blocks of `width` tokens, W new tokens."""

    first: int
    last: int
    width: int
    listed: mx.array | None  # [B] the blocks that are read; None: those of [first, last)
    owner: mx.array  # [B] row of each block
    mask: mx.array  # what is added to scores [KV, B, …, width]: 0, or MASKED_SCORE
    lines: mx.array | None  # [W] numbers of the tokens that are written; None: all, in order
    places: mx.array | None  # [W] their token numbers in the slab; None: nothing is written

    def write(self, held: Arrays, new: Arrays) -> None:
        """Writes new [KV, T, size] into what a layer stores."""
        if self.places is None:
            return
        for array, some in zip(held, new, strict=True):
            array[:, self.places] = some if self.lines is None else some[:, self.lines]

    def blocks(self, held: Arrays) -> Arrays:
        """Returns the blocks [KV, B, width, size] of what a layer stores, as views if possible."""
        return tuple(self._blocks(array) for array in held)

    def _blocks(self, array: mx.array) -> mx.array:
        pairs, _, size = array.shape
        every = array.reshape(pairs, -1, KV_BLOCK_TOKENS, size)
        if self.listed is not None:
            return every[:, self.listed, : self.width]
        return every[:, self.first : self.last, : self.width]


def stored_of(shape: RowShape, k: mx.array, v: mx.array) -> Arrays:
    """Returns what is stored [KV, T, size] of new keys k [T, KV, D] and values v [T, KV, V]."""
    return shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))


def require_no_sinks(scores: ScoreParams) -> None:
    """Raises NotImplementedError for attention with sinks."""
    if scores.sinks is not None:
        raise NotImplementedError("no known model has sinks and no windows")


def attended(scores: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Attends to blocks: scores [KV, B, N, width] and values [KV, B, width, V].

    Returns [KV, B, N, V], and the logarithms [KV, B, N] of the sums of the weights.
    """
    weights, top, total = softmax_terms(scores)
    return (weights @ values) / total, (top + mx.log(total)).squeeze(-1)


def combined(parts: Sequence[tuple[mx.array, mx.array]], member: mx.array) -> mx.array:
    """Returns attention [KV, N, R, V] of R rows from that of blocks, as `attended` returns it.

    `member` [R, B]: 0 for blocks of the row, else MASKED_SCORE; the blocks are those of all parts.
    """
    outs, logs = zip(*parts, strict=True)
    out, log = (one[0] if len(one) == 1 else mx.concatenate([*one], axis=1) for one in (outs, logs))
    # [KV, N, 1, B] + [R, B]
    share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + member, axis=-1)
    return share @ out.swapaxes(1, 2)


# Of a slab: the first block that is read and the one behind the last, the tokens that are read of
# each, whether the blocks are listed, whether tokens are written, whether those of all rows are.
PartConstants: TypeAlias = tuple[int, int, int, bool, bool, bool]


class DecodeStep(Struct, frozen=True):
    """The slabs that a decode step over R rows reads and writes.

    A pass is compiled for the `constants` of each slab, and gets as `arrays` of each: owner, fill,
    lines, places and blocks of its SlabAccess. `simple`: row r has block r of the only slab.
    """

    rows: int
    slabs: list[Slab]
    simple: bool
    constants: list[PartConstants]
    arrays: list[list[mx.array]]

    @classmethod
    def of(cls, rows: Sequence[SlabRow]) -> DecodeStep:
        """Returns the step of rows that have a block for their next token."""
        found, count = slab_accesses(rows), len(rows)
        accesses = [access for _, access in found]
        return cls(
            count,
            [slab for slab, _ in found],
            len(found) == 1 and accesses[0].owner == list(range(count)),
            [_constants(access, count) for access in accesses],
            [_arrays(access) for access in accesses],
        )

    @property
    def kind(self) -> Hashable:
        """The constants and shapes for which a pass is compiled."""
        sizes = [tuple(one.size for one in arrays) for arrays in self.arrays]
        return self.rows, self.simple, *self.constants, *sizes


def _constants(access: SlabAccess, rows: int) -> PartConstants:
    first, last = (0, 0) if access.listed else (access.first, access.last)
    every = access.lines == list(range(rows))
    return first, last, access.width, access.listed, bool(access.lines), every


def _arrays(access: SlabAccess) -> list[mx.array]:
    owner = [max(one, 0) for one in access.owner]
    numbers = owner, access.fill, access.lines, access.places, access.blocks
    return [mx.array(one, dtype=mx.int32) for one in numbers]


class DecodeReader:
    """Writes and reads one token of each of R rows."""

    def __init__(
        self,
        shape: RowShape,
        rows: int,
        simple: bool,
        constants: Sequence[PartConstants],
        arrays: Sequence[Sequence[mx.array]],
        slabs: Sequence[list[Arrays]],
    ) -> None:
        """See DecodeStep. `slabs`: what each layer stores, for each slab."""
        self._shape, self._slabs = shape, slabs
        self._parts = [_part(*one) for one in zip(constants, arrays, strict=True)]
        self._member: mx.array | None = None  # [R, B]: 0 for blocks of the row, else MASKED_SCORE
        if not simple:
            owners = [mx.where(fill > 0, owner, NOBODY) for owner, fill, *_ in arrays]
            every = mx.concatenate(owners)[None]
            self._member = mx.where(every == mx.arange(rows)[:, None], 0.0, MASKED_SCORE)

    @classmethod
    def of(cls, rows: Sequence[SlabRow]) -> DecodeReader:
        """Returns the reader of rows outside of compiled passes."""
        step = DecodeStep.of(rows)
        layers = [slab.layers for slab in step.slabs]
        return cls(rows[0].shape, step.rows, step.simple, step.constants, step.arrays, layers)

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [R, KV, D] and v [R, KV, V] behind the tokens of the rows."""
        stored = stored_of(self._shape, k, v)
        for part, layers in zip(self._parts, self._slabs, strict=True):
            part.write(layers[layer], stored)

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [R, H, D] -> [R, H, V]."""
        require_no_sinks(scores)
        rows, heads, size = q.shape
        pairs = self._slabs[0][layer][0].shape[0]
        q = (q * scores.scale).reshape(rows, pairs, heads // pairs, size).swapaxes(0, 1)
        parts: list[tuple[mx.array, mx.array]] = []
        for part, layers in zip(self._parts, self._slabs, strict=True):
            held = self._shape.held_after(layers[layer], parts[-1][0] if parts else q)
            keys, values = self._shape.read(part.blocks(held))
            asked = q if self._member is None else q[:, part.owner]
            found = apply_softcap(asked @ keys.swapaxes(-1, -2), scores.softcap) + part.mask
            if self._member is None:
                out = softmax_average(found, values).swapaxes(0, 1)
                return out.reshape(rows, heads, -1)
            parts.append(attended(found, values))
        assert self._member is not None, "the step is not simple"
        return combined(parts, self._member).transpose(2, 0, 1, 3).reshape(rows, heads, -1)


def _part(constants: PartConstants, arrays: Sequence[mx.array]) -> SlabPart:
    """The mask is [B, 1, width]: which tokens the query of the row sees."""
    first, last, width, listed, writes, every = constants
    owner, fill, lines, places, blocks = arrays
    mask = mx.where(mx.arange(width) < fill[:, None], 0.0, MASKED_SCORE)[:, None]
    return SlabPart(
        first,
        last,
        width,
        blocks if listed else None,
        owner,
        mask,
        None if every else lines,
        places if writes else None,
    )
