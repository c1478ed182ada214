"""Attention over rows in slabs that have one new token or few each: all rows together.

Each block is attended to by itself, so that only the last block of a row is padded; then the blocks
of a row are combined by their softmax weights. Rows with fewer new tokens than others are padded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
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
    mask: mx.array  # [B, L, width]: 0, or MASKED_SCORE where a new token does not see a key
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


class SlabStep(Struct, frozen=True):
    """The slabs that a pass over R rows reads and writes.

    A pass is compiled for the `constants` of each slab, and gets as `arrays` of each: owner, fill,
    lines, places and blocks of its SlabAccess. `simple`: row r has block r of the only slab.
    """

    rows: int
    slabs: list[Slab]
    simple: bool
    constants: list[PartConstants]
    arrays: list[list[mx.array]]

    @classmethod
    def of(cls, rows: Sequence[SlabRow], counts: Sequence[int] | None = None) -> SlabStep:
        """Returns the step of rows with so many new tokens, for which they have blocks; None: 1."""
        each = [1] * len(rows) if counts is None else counts
        found, total = slab_accesses(rows, each), sum(each)
        accesses = [access for _, access in found]
        return cls(
            len(rows),
            [slab for slab, _ in found],
            len(found) == 1 and accesses[0].owner == list(range(len(rows))),
            [_constants(access, total) for access in accesses],
            [_arrays(access) for access in accesses],
        )

    @property
    def kind(self) -> Hashable:
        """The constants and shapes for which a pass is compiled."""
        sizes = [tuple(one.size for one in arrays) for arrays in self.arrays]
        return self.rows, self.simple, *self.constants, *sizes


def _constants(access: SlabAccess, tokens: int) -> PartConstants:
    first, last = (0, 0) if access.listed else (access.first, access.last)
    every = access.lines == list(range(tokens))
    return first, last, access.width, access.listed, bool(access.lines), every


def _arrays(access: SlabAccess) -> list[mx.array]:
    owner = [max(one, 0) for one in access.owner]
    numbers = owner, access.fill, access.lines, access.places, access.blocks
    return [mx.array(one, dtype=mx.int32) for one in numbers]


class SlabReader:
    """Writes and reads T new tokens of R rows, at most L of each."""

    def __init__(
        self,
        shape: RowShape,
        counts: Sequence[int],
        simple: bool,
        constants: Sequence[PartConstants],
        arrays: Sequence[Sequence[mx.array]],
        slabs: Sequence[list[Arrays]],
    ) -> None:
        """`counts`: the new tokens of each row. For the others see SlabStep; `slabs`: what each
        layer stores, for each slab.
        """
        self._shape, self._slabs = shape, slabs
        self._rows, self._lines = len(counts), max(counts)
        lines = self._lines
        every = zip(constants, arrays, strict=True)
        self._parts = [_part(some, each, lines) for some, each in every]
        self._padded: mx.array | None = None  # [R * L]: the new token in each place
        self._kept: mx.array | None = None  # [T]: the place of each new token
        if len(set(counts)) > 1:
            starts = [0, *accumulate(counts)]
            padded = [
                start + min(line, count - 1)
                for start, count in zip(starts, counts, strict=False)
                for line in range(lines)
            ]
            kept = [row * lines + line for row, n in enumerate(counts) for line in range(n)]
            self._padded, self._kept = (mx.array(one, dtype=mx.int32) for one in (padded, kept))
        self._member: mx.array | None = None  # [R, B]: 0 for blocks of the row, else MASKED_SCORE
        if not simple:
            owners = [mx.where(fill > 1 - lines, owner, NOBODY) for owner, fill, *_ in arrays]
            of_blocks = mx.concatenate(owners)[None]
            numbers = mx.arange(self._rows)[:, None]
            self._member = mx.where(of_blocks == numbers, 0.0, MASKED_SCORE)

    @classmethod
    def of(cls, rows: Sequence[SlabRow], counts: Sequence[int]) -> SlabReader:
        """Returns the reader of rows outside of compiled passes."""
        step = SlabStep.of(rows, counts)
        layers = [slab.layers for slab in step.slabs]
        return cls(rows[0].shape, counts, step.simple, step.constants, step.arrays, layers)

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V] behind the tokens of the rows."""
        stored = self._shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        for part, layers in zip(self._parts, self._slabs, strict=True):
            part.write(layers[layer], stored)

    def read(
        self, layer: int, q: mx.array, scores: ScoreParams, before: mx.array | None = None
    ) -> mx.array:
        """q [T, H, D] -> [T, H, V]; each query sees its row's tokens up to its own.

        `before`: see RowShape.held_after; None: q. Raises NotImplementedError for sinks.
        """
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        rows, lines = self._rows, self._lines
        pairs = self._slabs[0][layer][0].shape[0]
        _, heads, size = q.shape
        group = heads // pairs
        newest = q if before is None else before
        q = (q if self._padded is None else q[self._padded]) * scores.scale
        if lines == 1:  # a view, where several lines of a head are copied
            q = q.reshape(rows, pairs, group, size).swapaxes(0, 1)
        else:
            q = q.reshape(rows, lines, pairs, group, size).transpose(2, 0, 1, 3, 4)
            q = q.reshape(pairs, rows, lines * group, size)
        parts: list[tuple[mx.array, mx.array]] = []
        for part, layers in zip(self._parts, self._slabs, strict=True):
            held = self._shape.held_after(layers[layer], parts[-1][0] if parts else newest)
            keys, values = self._shape.read(part.blocks(held))
            asked = q if self._member is None else q[:, part.owner]
            mask = part.mask if lines == 1 else mx.repeat(part.mask, group, axis=1)
            found = apply_softcap(asked @ keys.swapaxes(-1, -2), scores.softcap) + mask
            if self._member is None:
                return self._of_tokens(softmax_average(found, values).swapaxes(0, 1))
            parts.append(attended(found, values))
        assert self._member is not None, "the step is not simple"
        return self._of_tokens(combined(parts, self._member).transpose(2, 0, 1, 3))

    def _of_tokens(self, out: mx.array) -> mx.array:
        """Returns [T, H, V] of attention [R, KV, L * H / KV, V]."""
        rows, pairs, queries, size = out.shape
        group = queries // self._lines
        if self._lines > 1:
            out = out.reshape(rows, pairs, self._lines, group, size).transpose(0, 2, 1, 3, 4)
        out = out.reshape(rows * self._lines, pairs * group, size)
        return out if self._kept is None else out[self._kept]


def _part(constants: PartConstants, arrays: Sequence[mx.array], tokens: int) -> SlabPart:
    first, last, width, listed, writes, every = constants
    owner, fill, lines, places, blocks = arrays
    seen = fill[:, None, None]  # [B, L, 1]
    if tokens > 1:
        seen = seen + mx.arange(tokens)[:, None]
    return SlabPart(
        first,
        last,
        width,
        blocks if listed else None,
        owner,
        mx.where(mx.arange(width) < seen, 0.0, MASKED_SCORE),
        None if every else lines,
        places if writes else None,
    )
