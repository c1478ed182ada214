"""Passes over rows in slabs: any mixture of single tokens, checks of drafts and chunks.

These passes are not compiled, because their lengths differ. Passes that have only single tokens are
compiled, see decode_runner.py.
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
    """Spans that attend together.

    `lines`: the numbers of the spans' tokens in the pass. `select`: selects these tokens of an
    array of all tokens.
    """

    reader: SlabReader
    lines: Sequence[int]
    select: Callable[[mx.array], mx.array]


class SlabRowBatch(RowBatch):
    """A RowBatch of rows in slabs: writes all tokens of a layer before any token attends.

    MLX copies a slab that is written before all its readers have read it. The leading spans of one
    token attend together, and the spans that check drafts attend together. With an attention other
    than causal_attention every span attends alone.
    """

    def __init__(
        self,
        spans: Sequence[RowSpan],
        wanted: Sequence[int] | None,
        attention: RowAttention = causal_attention,
        *,
        every: bool = False,
    ) -> None:
        """Groups the spans that attend together. For the parameters see RowBatch."""
        super().__init__(spans, wanted, attention, every=every)
        self._rows = [cast(SlabRow, span.row) for span in spans]
        for row, span in zip(self._rows, spans, strict=True):
            row.reserve(row.offset + span.count)
        plain = attention is causal_attention
        singles = leading_singles(spans) if plain else 0
        checks = [queries for queries in self._queries if plain and is_check(spans[queries.span])]
        groups = [group for group in (self._queries[:singles], checks) if group]
        self._together = list(map(self._joined, groups))
        joined = {queries.span for group in groups for queries in group}
        self._apart = [queries for queries in self._queries if queries.span not in joined]
        # `attend` computes tokens in another order than the order of the pass.
        self._order = self._order_of(self._apart, range(self._queries[-1].end))
        self._last_apart = [queries for queries in self._wanted if queries.span not in joined]
        self._last_order = self._order_of(self._last_apart, self._lines)

    def _joined(self, group: Sequence[Queries]) -> Together:
        """Returns the reader and the selector with which these spans attend together."""
        rows = [self._rows[queries.span] for queries in group]
        lines = [line for queries in group for line in range(queries.first, queries.end)]
        select = line_selector(lines, self._queries[-1].end)
        return Together(
            SlabReader.of(rows, [queries.end - queries.first for queries in group]), lines, select
        )

    def _order_of(
        self, apart: Sequence[Queries], lines: Sequence[int]
    ) -> Callable[[mx.array], mx.array]:
        """Returns a function that puts the outputs of attention into the order of `lines`.

        The function's argument has first the outputs of the groups of spans that attend together,
        then the outputs of the spans `apart`, which attend alone.
        """
        lines_made = [line for group in self._together for line in group.lines]
        lines_made += [line for queries in apart for line in range(queries.first, queries.end)]
        places = {line: place for place, line in enumerate(lines_made)}
        return line_selector([places[line] for line in lines], len(lines_made))

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Writes k and v into the slabs and attends; see ForwardBatch.attend for the shapes."""
        if not self._together:
            return super().attend(layer, q, k, v, scores)
        seen = self._write(layer, (k, v))
        parts: list[mx.array] = []
        for group in self._together:
            before = parts[-1] if parts else None
            parts.append(group.reader.read(layer, group.select(q), scores, before))
        last = layer == self._last_layer
        for queries in self._last_apart if last else self._apart:
            own_q = q[queries.first : queries.end]
            parts.append(
                self._attend(queries, own_q, self._read(seen[queries.span], parts), scores, 0)
            )
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return self._last_order(out) if last else self._order(out)

    def _write(self, layer: int, new: Sequence[mx.array]) -> Mapping[int, Arrays]:
        """Writes new arrays [T, heads, size] into the rows; returns stored arrays by span.

        The result has only the spans that attend alone.
        """
        for group in self._together:
            keys, values = map(group.select, new)
            group.reader.write(layer, keys, values)
        for queries in self._apart:
            row = self._rows[queries.span]
            row.place(layer, *(heads_first(x[queries.first : queries.end]) for x in new))
        return {
            queries.span: self._rows[queries.span].part(
                layer, 0, self._rows[queries.span].offset + queries.end - queries.first
            )
            for queries in self._apart
        }
