"""Passes over rows in slabs, in any mixture of single tokens, checks of drafts and chunks.

They are not compiled, as each has other lengths; those over single tokens alone are, see
decode_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.attention.dot_product import causal_attention, heads_first
from mlxpool.worker.attention.in_slabs.slab_reader import SlabReader
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.row_batch import Queries, RowAttention, RowBatch, line_selector
from mlxpool.worker.attention.row_shape import Arrays
from mlxpool.worker.attention.row_spans import RowSpan, is_check, leading_singles
from mlxpool.worker.kernels.score_params import ScoreParams


class Together(Struct, frozen=True):
    """Spans whose rows attend together, and what takes their tokens `lines` of all of a pass."""

    reader: SlabReader
    lines: Sequence[int]
    select: Callable[[mx.array], mx.array]


class SlabRowBatch(RowBatch):
    """A RowBatch of rows in slabs: all tokens of a layer are written before any attends.

    MLX copies a slab that is written while somebody is still to read it. Leading spans of one
    token attend together, and so do those that check drafts, unless another attention is asked for.
    """

    def __init__(
        self,
        spans: Sequence[RowSpan],
        wanted: Sequence[int] | None,
        attention: RowAttention = causal_attention,
        *,
        every: bool = False,
    ) -> None:
        """See RowBatch."""
        super().__init__(spans, wanted, attention, every=every)
        self._rows = [cast(SlabRow, span.row) for span in spans]
        for row, span in zip(self._rows, spans, strict=True):
            row.reserve(row.offset + span.count)
        plain = attention is causal_attention
        singles = leading_singles(spans) if plain else 0
        checks = [one for one in self._queries if plain and is_check(spans[one.span])]
        groups = [one for one in (self._queries[:singles], checks) if one]
        self._together = list(map(self._joined, groups))
        joined = {one.span for group in groups for one in group}
        self._apart = [one for one in self._queries if one.span not in joined]
        # Lines are made in another order than the pass has them.
        self._order = self._order_of(self._apart, range(self._queries[-1].end))
        self._last_apart = [one for one in self._wanted if one.span not in joined]
        self._last_order = self._order_of(self._last_apart, self._lines)

    def _joined(self, group: Sequence[Queries]) -> Together:
        """Returns what these spans need to attend together."""
        rows = [self._rows[one.span] for one in group]
        lines = [line for one in group for line in range(one.first, one.end)]
        select = line_selector(lines, self._queries[-1].end)
        return Together(SlabReader.of(rows, [one.end - one.first for one in group]), lines, select)

    def _order_of(
        self, apart: Sequence[Queries], lines: Sequence[int]
    ) -> Callable[[mx.array], mx.array]:
        """Returns what selects `lines` of those that `attend` makes, with these spans apart."""
        made = [line for group in self._together for line in group.lines]
        made += [line for one in apart for line in range(one.first, one.end)]
        places = {line: place for place, line in enumerate(made)}
        return line_selector([places[line] for line in lines], len(made))

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
        if not self._together:
            return super().attend(layer, q, k, v, scores)
        seen = self._write(layer, (k, v))
        parts: list[mx.array] = []
        for group in self._together:
            before = parts[-1] if parts else None
            parts.append(group.reader.read(layer, group.select(q), scores, before))
        last = layer == self._last_layer
        for one in self._last_apart if last else self._apart:
            asked = q[one.first : one.end]
            parts.append(self._attend(one, asked, self._read(seen[one.span], parts), scores, 0))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return self._last_order(out) if last else self._order(out)

    def _write(self, layer: int, new: Sequence[mx.array]) -> Mapping[int, Arrays]:
        """See RowBatch. Returns nothing for the rows that attend together."""
        for group in self._together:
            keys, values = map(group.select, new)
            group.reader.write(layer, keys, values)
        for one in self._apart:
            row = self._rows[one.span]
            row.place(layer, *(heads_first(x[one.first : one.end]) for x in new))
        return {
            one.span: self._rows[one.span].part(
                layer, 0, self._rows[one.span].offset + one.end - one.first
            )
            for one in self._apart
        }
