"""Attention over slabs, arrays with KV blocks of several rows: all rows attend together.

Each row has one or a few new tokens. Queries attend to each block by itself, so that only the last
block of a row is padded. After that, the blocks of a row are combined by their softmax weights.
Rows with fewer new tokens than others are padded.
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
    """The blocks that a pass reads in one slab, and the new tokens that it writes there.

    The pass reads the first `width` tokens of B blocks. Each row has at most L new tokens; W of the
    new tokens of all rows are written to this slab.
    """

    first: int
    last: int
    width: int
    listed: mx.array | None  # [B] the read blocks; None: the blocks [first, last)
    owner: mx.array  # [B] the row of each block
    mask: mx.array  # [B, L, width]: 0, or MASKED_SCORE if a new token does not see a key
    lines: mx.array | None  # [W] the numbers of the written new tokens; None: all, in order
    places: mx.array | None  # [W] token numbers in the slab of written tokens; None: no write

    def write(self, held: Arrays, new: Arrays) -> None:
        """Writes new arrays [KV, T, size] into a layer's stored arrays."""
        if self.places is None:
            return
        for array, some in zip(held, new, strict=True):
            array[:, self.places] = some if self.lines is None else some[:, self.lines]

    def blocks(self, held: Arrays) -> Arrays:
        """Returns the blocks [KV, B, width, size] of a layer's arrays, as views if possible."""
        return tuple(self._blocks(array) for array in held)

    def _blocks(self, array: mx.array) -> mx.array:
        pairs, _, size = array.shape
        blocks = array.reshape(pairs, -1, KV_BLOCK_TOKENS, size)
        if self.listed is not None:
            return blocks[:, self.listed, : self.width]
        return blocks[:, self.first : self.last, : self.width]


def attended(scores: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Attends to blocks: scores [KV, B, N, width] and values [KV, B, width, V].

    Returns outputs [KV, B, N, V], and the logarithms [KV, B, N] of the sums of the weights.
    """
    weights, top, total = softmax_terms(scores)
    return (weights @ values) / total, (top + mx.log(total)).squeeze(-1)


def combined(parts: Sequence[tuple[mx.array, mx.array]], member: mx.array) -> mx.array:
    """Returns the outputs [KV, N, R, V] of R rows, combined from results of `attended`.

    `member` [R, B], for the B blocks of all `parts`: 0 if the block belongs to the row, else
    MASKED_SCORE.
    """
    outs, logs = zip(*parts, strict=True)
    out, log = (
        arrays[0] if len(arrays) == 1 else mx.concatenate([*arrays], axis=1)
        for arrays in (outs, logs)
    )
    # shapes [KV, N, 1, B] + [R, B]
    share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + member, axis=-1)
    return share @ out.swapaxes(1, 2)


# The constants of a slab: the range [first, end) of blocks that are read, the tokens that are read
# of each block, and three flags: blocks are listed, tokens are written, all tokens are written.
PartConstants: TypeAlias = tuple[int, int, int, bool, bool, bool]


class SlabStep(Struct, frozen=True):
    """The slabs that a pass over R rows reads and writes.

    A pass is compiled for the `constants` of each slab. `arrays`: the fields owner, fill, lines,
    places and blocks of each slab's SlabAccess. `simple`: row r has block r of the only slab.
    """

    rows: int
    slabs: list[Slab]
    simple: bool
    constants: list[PartConstants]
    arrays: list[list[mx.array]]

    @classmethod
    def of(cls, rows: Sequence[SlabRow], counts: Sequence[int] | None = None) -> SlabStep:
        """Returns the step of rows with `counts` new tokens; None: one token for each row.

        The rows must have blocks for the new tokens.
        """
        each = [1] * len(rows) if counts is None else counts
        by_slab, total = slab_accesses(rows, each), sum(each)
        accesses = [access for _, access in by_slab]
        return cls(
            len(rows),
            [slab for slab, _ in by_slab],
            len(by_slab) == 1 and accesses[0].owner == list(range(len(rows))),
            [_constants(access, total) for access in accesses],
            [_arrays(access) for access in accesses],
        )

    @property
    def kind(self) -> Hashable:
        """The constants and shapes for which a pass is compiled."""
        sizes = [tuple(array.size for array in arrays) for arrays in self.arrays]
        return self.rows, self.simple, *self.constants, *sizes


def _constants(access: SlabAccess, tokens: int) -> PartConstants:
    first, last = (0, 0) if access.listed else (access.first, access.last)
    all_lines = access.lines == list(range(tokens))
    return first, last, access.width, access.listed, bool(access.lines), all_lines


def _arrays(access: SlabAccess) -> list[mx.array]:
    owner = [max(row, 0) for row in access.owner]
    numbers = owner, access.fill, access.lines, access.places, access.blocks
    return [mx.array(values, dtype=mx.int32) for values in numbers]


class SlabReader:
    """Writes T new tokens of R rows, at most L of each row, and attends with these tokens."""

    def __init__(
        self,
        shape: RowShape,
        counts: Sequence[int],
        simple: bool,
        constants: Sequence[PartConstants],
        arrays: Sequence[Sequence[mx.array]],
        slabs: Sequence[list[Arrays]],
    ) -> None:
        """`counts`: the number of new tokens of each row.

        `simple`, `constants` and `arrays`: the fields of the pass's SlabStep. `slabs`: for each
        slab, the stored arrays of each layer.
        """
        self._shape, self._slabs = shape, slabs
        self._rows, self._lines = len(counts), max(counts)
        lines = self._lines
        slab_arrays = zip(constants, arrays, strict=True)
        self._parts = [_part(some, each, lines) for some, each in slab_arrays]
        self._padded: mx.array | None = None  # [R * L]: the new token's index, by padded position
        self._kept: mx.array | None = None  # [T]: the padded position of each new token
        if len(set(counts)) > 1:
            starts = [0, *accumulate(counts)]
            padded = [
                start + min(line, count - 1)
                for start, count in zip(starts, counts, strict=False)
                for line in range(lines)
            ]
            kept = [row * lines + line for row, n in enumerate(counts) for line in range(n)]
            self._padded, self._kept = (
                mx.array(places, dtype=mx.int32) for places in (padded, kept)
            )
        self._member: mx.array | None = None  # [R, B]: 0 for blocks of the row, else MASKED_SCORE
        if not simple:
            owners = [mx.where(fill > 1 - lines, owner, NOBODY) for owner, fill, *_ in arrays]
            of_blocks = mx.concatenate(owners)[None]
            numbers = mx.arange(self._rows)[:, None]
            self._member = mx.where(of_blocks == numbers, 0.0, MASKED_SCORE)

    @classmethod
    def of(cls, rows: Sequence[SlabRow], counts: Sequence[int]) -> SlabReader:
        """Returns the reader for a pass that is not compiled."""
        step = SlabStep.of(rows, counts)
        layers = [slab.layers for slab in step.slabs]
        return cls(rows[0].shape, counts, step.simple, step.constants, step.arrays, layers)

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V] after the tokens of the rows."""
        stored = self._shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        for part, layers in zip(self._parts, self._slabs, strict=True):
            part.write(layers[layer], stored)

    def read(
        self, layer: int, q: mx.array, scores: ScoreParams, before: mx.array | None = None
    ) -> mx.array:
        """Returns the outputs [T, H, V] of queries q [T, H, D].

        Each query sees its row's tokens up to its own token. The stored arrays are read after
        `before` (None: after q) is computed, see RowShape.held_after. Raises NotImplementedError
        for sinks.
        """
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        rows, lines = self._rows, self._lines
        pairs = self._slabs[0][layer][0].shape[0]
        _, heads, size = q.shape
        group = heads // pairs
        newest = q if before is None else before
        q = (q if self._padded is None else q[self._padded]) * scores.scale
        if lines == 1:  # a view; with several lines, the queries are copied
            q = q.reshape(rows, pairs, group, size).swapaxes(0, 1)
        else:
            q = q.reshape(rows, lines, pairs, group, size).transpose(2, 0, 1, 3, 4)
            q = q.reshape(pairs, rows, lines * group, size)
        parts: list[tuple[mx.array, mx.array]] = []
        for part, layers in zip(self._parts, self._slabs, strict=True):
            held = self._shape.held_after(layers[layer], parts[-1][0] if parts else newest)
            keys, values = self._shape.read(part.blocks(held))
            queries = q if self._member is None else q[:, part.owner]
            mask = part.mask if lines == 1 else mx.repeat(part.mask, group, axis=1)
            logits = apply_softcap(queries @ keys.swapaxes(-1, -2), scores.softcap) + mask
            if self._member is None:
                return self._of_tokens(softmax_average(logits, values).swapaxes(0, 1))
            parts.append(attended(logits, values))
        assert self._member is not None, "the step is not simple"
        return self._of_tokens(combined(parts, self._member).transpose(2, 0, 1, 3))

    def _of_tokens(self, out: mx.array) -> mx.array:
        """Returns outputs [R, KV, L * H / KV, V] as outputs of tokens [T, H, V]."""
        rows, pairs, queries, size = out.shape
        group = queries // self._lines
        if self._lines > 1:
            out = out.reshape(rows, pairs, self._lines, group, size).transpose(0, 2, 1, 3, 4)
        out = out.reshape(rows * self._lines, pairs * group, size)
        return out if self._kept is None else out[self._kept]


def _part(constants: PartConstants, arrays: Sequence[mx.array], tokens: int) -> SlabPart:
    first, last, width, listed, writes, all_lines = constants
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
        None if all_lines else lines,
        places if writes else None,
    )
