"""Attention of rows in slabs with several inputs each, in compiled passes and outside of them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.attention.dot_product import apply_softcap
from mlxpool.worker.attention.in_slabs.block_attention import (
    SlabPart,
    attended,
    combined,
    require_no_sinks,
)
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.kernels.score_params import ScoreParams


class PaddedRows(Struct, frozen=True):
    """R rows whose T inputs are padded to L of each row.

    `padded` [R * L]: the number of the input in each place; `kept` [T]: the place of each input.
    None: every row has L inputs. `member` [R, B]: see `combined`.
    """

    shape: RowShape
    rows: int
    lines: int
    padded: mx.array | None
    kept: mx.array | None
    member: mx.array

    def attend(
        self,
        parts: Sequence[tuple[SlabPart, Arrays]],
        q: mx.array,
        scores: ScoreParams,
        before: mx.array | None = None,
    ) -> mx.array:
        """q [T, H, D] -> [T, H, V]; each query sees its row's tokens up to its own.

        `parts`: of each slab what is read and what a layer stores there; masks [B, L, 1, width].
        `before`: see RowShape.held_after; None: q. Raises NotImplementedError for sinks.
        """
        require_no_sinks(scores)
        _, heads, size = q.shape
        rows, lines = self.rows, self.lines
        pairs = parts[0][1][0].shape[0]
        each = heads // pairs
        q = (q if self.padded is None else q[self.padded]) * scores.scale
        q = q.reshape(rows, lines, pairs, each, size).transpose(2, 0, 1, 3, 4)
        q = q.reshape(pairs, rows, lines * each, size)
        newest = q if before is None else before
        outs: list[tuple[mx.array, mx.array]] = []
        for part, stored in parts:
            held = self.shape.held_after(stored, outs[-1][0] if outs else newest)
            keys, values = self.shape.read(part.blocks(held))
            found = apply_softcap(q[:, part.owner] @ keys.swapaxes(-1, -2), scores.softcap)
            found = found.reshape(pairs, -1, lines, each, part.width) + part.mask
            outs.append(attended(found.reshape(pairs, -1, lines * each, part.width), values))
        out = combined(outs, self.member).reshape(pairs, lines, each, rows, -1)
        out = out.transpose(3, 1, 0, 2, 4).reshape(rows * lines, heads, -1)
        return out if self.kept is None else out[self.kept]
