"""Attention over the blocks of slabs, which the readers of all kinds of passes share.

Each block is attended to by itself, so that only the last block of a row is padded; then the blocks
of a row are combined by their softmax weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.attention.dot_product import softmax_terms
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
