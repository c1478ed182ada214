"""Attention of decode steps that check drafts, over rows in slabs: all rows together.

As in slab_batch, each block is attended to by itself, and the parts of a row are combined by their
softmax weights. Here a row has several queries; rows with fewer than the others are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.dot_product import apply_softcap, softmax_terms
from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # tokens; the width that is read of each block is a multiple of it
MASKED_SCORE = -1e30  # finite, so that fully masked blocks give no NaN


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read and written in one slab: B blocks of `width` tokens, W new tokens.

    It reads the blocks [first, last), of which some may be of no row, or with `listed` [B] those.
    """

    slab: Slab
    first: int
    last: int
    width: int
    listed: mx.array | None
    owner: mx.array  # [B] row of each block
    mask: mx.array  # [B, L, 1, width] which tokens the L queries of the row see
    lines: mx.array  # [W] numbers of the tokens that are written
    places: mx.array  # [W] token numbers in the slab


class CheckReader:
    """Writes and reads `counts` new tokens of R rows, which have blocks for them."""

    def __init__(self, rows: Sequence[SlabRow], counts: Sequence[int]) -> None:
        self._shape, self._rows, self._lines = rows[0].shape, len(rows), max(counts)
        starts = [0, *accumulate(counts)]
        padded = [
            start + min(line, count - 1)
            for start, count in zip(starts, counts, strict=False)
            for line in range(self._lines)
        ]
        kept = [at * self._lines + line for at, n in enumerate(counts) for line in range(n)]
        alike = len(set(counts)) == 1
        self._padded, self._kept = (
            None if alike else mx.array(one, dtype=mx.int32) for one in (padded, kept)
        )
        self._parts = self._parts_of(rows, counts, starts)
        owners = np.concatenate([np.array(part.owner) for part in self._parts])
        member = np.where(owners[None] == np.arange(len(rows))[:, None], 0.0, MASKED_SCORE)
        self._member = mx.array(member.astype(np.float32))  # [R, B]

    def _parts_of(
        self, rows: Sequence[SlabRow], counts: Sequence[int], starts: Sequence[int]
    ) -> list[_Part]:
        seen: dict[Slab, dict[int, tuple[int, int, int]]] = {}
        writes: dict[Slab, list[tuple[int, int]]] = {}
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            end = row.offset + count
            for at in range(blocks_for(end)):
                slab, block = row.table[at]
                begin = at * KV_BLOCK_TOKENS
                used = min(end - begin, KV_BLOCK_TOKENS)
                # The first query sees so many tokens of the block; 0 and below: none.
                seen.setdefault(slab, {})[block] = (number, row.offset + 1 - begin, used)
            for line in range(count):
                at, inside = divmod(row.offset + line, KV_BLOCK_TOKENS)
                slab, block = row.table[at]
                place = block * KV_BLOCK_TOKENS + inside
                writes.setdefault(slab, []).append((starts[number] + line, place))
        return [self._part(slab, found, writes.get(slab, [])) for slab, found in seen.items()]

    def _part(
        self, slab: Slab, found: dict[int, tuple[int, int, int]], writes: list[tuple[int, int]]
    ) -> _Part:
        first, last = min(found), max(found) + 1
        listed = 2 * len(found) < last - first
        blocks = sorted(found) if listed else [*range(first, last)]
        nobody = -1, -self._lines, 0
        owners = np.array([found.get(block, nobody) for block in blocks], dtype=np.int32)
        width = -(-int(owners[:, 2].max()) // WIDTH_STEP) * WIDTH_STEP
        fills = owners[:, 1, None] + np.arange(self._lines)  # [B, L]
        mask = np.where(np.arange(width) < fills[:, :, None], 0.0, MASKED_SCORE)
        return _Part(
            slab,
            first,
            last,
            width,
            mx.array(blocks, dtype=mx.int32) if listed else None,
            mx.array(owners[:, 0]),
            mx.array(mask[:, :, None].astype(np.float32)),
            mx.array([line for line, _ in writes], dtype=mx.int32),
            mx.array([place for _, place in writes], dtype=mx.int32),
        )

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V], the new tokens of all rows, behind theirs."""
        stored = self._shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        for part in self._parts:
            if part.lines.size:
                for array, new in zip(part.slab.layers[layer], stored, strict=True):
                    array[:, part.places] = new[:, part.lines]

    def read(
        self, layer: int, q: mx.array, scores: ScoreParams, before: mx.array | None = None
    ) -> mx.array:
        """q [T, H, D] -> [T, H, V]; each query sees its row's tokens up to its own.

        `before`: see RowShape.held_after; None: q.
        """
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        _, heads, size = q.shape
        pairs = self._parts[0].slab.layers[layer][0].shape[0]
        rows, lines, each = self._rows, self._lines, heads // pairs
        q = (q if self._padded is None else q[self._padded]) * scores.scale
        q = q.reshape(rows, lines, pairs, each, size).transpose(2, 0, 1, 3, 4)
        q = q.reshape(pairs, rows, lines * each, size)
        before = q if before is None else before
        outs: list[mx.array] = []
        logs: list[mx.array] = []
        for part in self._parts:
            held = self._shape.held_after(part.slab.layers[layer], outs[-1] if outs else before)
            keys, values = self._shape.read(tuple(_blocks(array, part) for array in held))
            found = q[:, mx.maximum(part.owner, 0)] @ keys.swapaxes(-1, -2)
            found = apply_softcap(found, scores.softcap)
            found = found.reshape(pairs, -1, lines, each, part.width) + part.mask
            weights, top, total = softmax_terms(found.reshape(pairs, -1, lines * each, part.width))
            outs.append((weights @ values) / total)
            logs.append((top + mx.log(total)).squeeze(-1))
        out, log = (
            one[0] if len(one) == 1 else mx.concatenate(one, axis=1) for one in (outs, logs)
        )
        # [KV, L * G, 1, B] + [R, B]
        share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + self._member, axis=-1)
        out = (share @ out.swapaxes(1, 2)).reshape(pairs, lines, each, rows, -1)
        out = out.transpose(3, 1, 0, 2, 4).reshape(rows * lines, heads, -1)
        return out if self._kept is None else out[self._kept]


def _blocks(array: mx.array, part: _Part) -> mx.array:
    """Returns blocks [KV, B, width, D], as a view where possible."""
    pairs, _, size = array.shape
    every = array.reshape(pairs, -1, KV_BLOCK_TOKENS, size)
    if part.listed is not None:
        return every[:, part.listed, : part.width]
    return every[:, part.first : part.last, : part.width]
