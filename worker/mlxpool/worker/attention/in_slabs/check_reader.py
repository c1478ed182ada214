"""Attention of steps that check drafts, over rows in slabs: all rows together.

Each row has several queries; rows with fewer than the others are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.in_slabs.block_attention import MASKED_SCORE, SlabPart, stored_of
from mlxpool.worker.attention.in_slabs.padded_rows import PaddedRows
from mlxpool.worker.attention.in_slabs.slab_access import SlabAccess, slab_accesses
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.kernels.score_params import ScoreParams


class CheckReader:
    """Writes and reads `counts` new tokens of R rows, which have blocks for them."""

    def __init__(self, rows: Sequence[SlabRow], counts: Sequence[int]) -> None:
        self._shape, self._lines = rows[0].shape, max(counts)
        starts = [0, *accumulate(counts)]
        padded = [
            start + min(line, count - 1)
            for start, count in zip(starts, counts, strict=False)
            for line in range(self._lines)
        ]
        kept = [at * self._lines + line for at, n in enumerate(counts) for line in range(n)]
        alike = len(set(counts)) == 1
        inputs, places = (None if alike else mx.array(x, dtype=mx.int32) for x in (padded, kept))
        found = slab_accesses(rows, counts)
        self._parts = [(slab, self._part(access)) for slab, access in found]
        owners = np.array([owner for _, access in found for owner in access.owner])
        member = np.where(owners[None] == np.arange(len(rows))[:, None], 0.0, MASKED_SCORE)
        of_rows = mx.array(member.astype(np.float32))  # [R, B]
        self._padded = PaddedRows(self._shape, len(rows), self._lines, inputs, places, of_rows)

    def _part(self, access: SlabAccess) -> SlabPart:
        """The mask is [B, L, 1, width]: which tokens the L queries of the row see."""
        fills = np.array(access.fill)[:, None] + np.arange(self._lines)  # [B, L]
        mask = np.where(np.arange(access.width) < fills[:, :, None], 0.0, MASKED_SCORE)
        return SlabPart(
            access.first,
            access.last,
            access.width,
            mx.array(access.blocks, dtype=mx.int32) if access.listed else None,
            mx.array([max(owner, 0) for owner in access.owner], dtype=mx.int32),
            mx.array(mask[:, :, None].astype(np.float32)),
            mx.array(access.lines, dtype=mx.int32),
            mx.array(access.places, dtype=mx.int32) if access.places else None,
        )

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V], the new tokens of all rows, behind theirs."""
        stored = stored_of(self._shape, k, v)
        for slab, part in self._parts:
            part.write(slab.layers[layer], stored)

    def read(
        self, layer: int, q: mx.array, scores: ScoreParams, before: mx.array | None = None
    ) -> mx.array:
        """q [T, H, D] -> [T, H, V]; each query sees its row's tokens up to its own.

        `before`: see RowShape.held_after; None: q.
        """
        parts = [(part, slab.layers[layer]) for slab, part in self._parts]
        return self._padded.attend(parts, q, scores, before)
