"""A forward pass over spans of tokens, for the CPU and Metal.

A model sees x [T, d]: the new tokens of all rows, one row after the other, without padding. Only
the batch knows the row and the position of an element of the token axis. After the mixer of the
last layer, only the tokens that get logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.attention.dot_product import (
    causal_attention,
    group_mask,
    heads_first,
    masked_attention,
)
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_shape import Arrays
from mlxpool.worker.attention.row_spans import ImageView, RowSpan, is_check, leading_singles
from mlxpool.worker.attention.row_states import PassStates, StateSpan
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan, SpanScan

# The attention of one sequence, see dot_product.causal_attention.
RowAttention: TypeAlias = Callable[[mx.array, mx.array, mx.array, ScoreParams, int], mx.array]


class Queries(Struct, frozen=True):
    """The tokens [first, end) of a pass that belong to one span and attend in a layer."""

    span: int
    first: int
    end: int


class RowBatch(RotateThenAttend):
    """The ForwardBatch of new tokens of some rows, in any mixture of single tokens and chunks."""

    def __init__(
        self,
        spans: Sequence[RowSpan],
        wanted: Sequence[int] | None,
        attention: RowAttention = causal_attention,
        *,
        every: bool = False,
    ) -> None:
        """`wanted`: the indices of the spans that get logits, in the order of the logits.

        Such a span gets logits for its last `RowSpan.lines` tokens. If `wanted` is None, all tokens
        get logits. `every`: the last layer computes all tokens, also those without logits;
        `logit_rows` then selects the tokens that get logits.
        """
        self.spans = tuple(spans)
        self._attention = attention
        self._shape = spans[0].row.shape
        layers = len(self._shape.caches)
        self._last_layer = layers if every else layers - 1
        ends = list(accumulate(span.count for span in spans))
        self._queries = [
            Queries(at, end - span.count, end)
            for at, (span, end) in enumerate(zip(spans, ends, strict=True))
        ]
        self._singles = leading_singles(spans)
        tokens = ends[-1]
        self.logits = wanted is None or len(wanted) > 0
        if wanted is None:
            self._wanted, self._lines = self._queries, list(range(tokens))
        else:
            # If no span is wanted, one token is computed: kernels take no arrays without elements.
            chosen = list(wanted) or [len(spans) - 1]
            self._wanted = [Queries(at, ends[at] - spans[at].lines, ends[at]) for at in chosen]
            self._lines = [
                line for queries in self._wanted for line in range(queries.first, queries.end)
            ]
        self._select = line_selector(self._lines, tokens)
        images = [image for span in spans for image in span.images]
        self._has_images = bool(images)
        self.image_layers = max((image.features.shape[0] - 1 for image in images), default=0)
        self.sees_images = self._lines_with_views(tokens)
        self._visible: dict[tuple[Queries, int, int], mx.array] = {}
        self._rotation = _rotation(spans, tokens)
        self._states: PassStates | None = None  # created by the first layer that needs it

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns the tokens of x [T, ...] that get logits, [E, ...]."""
        return self._select(x)

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x [T, ...] or, in the last layer, `logit_rows` of x [E, ...]."""
        return self._select(x) if layer == self._last_layer else x

    def with_images(self, x: mx.array) -> mx.array:
        """Returns x [T, d] with image features in the tokens that are inputs of images."""
        if not self._has_images:
            return x
        return self._over_images(x, lambda lines, features: features[0])

    def add_images(self, layer: int, x: mx.array) -> mx.array:
        """Returns a layer's output x [T, d] plus image features at inputs of images."""
        return self._over_images(x, lambda lines, features: lines + features[1 + layer])

    def _over_images(
        self, x: mx.array, change: Callable[[mx.array, mx.array], mx.array]
    ) -> mx.array:
        """Returns x [T, d] with `change` applied to each image's inputs."""
        parts, begin = [], 0
        for span, queries in zip(self.spans, self._queries, strict=True):
            for image in span.images:
                first, end = queries.first + image.begin, queries.first + image.end
                lines = change(x[first:end], image.features.astype(x.dtype))
                parts += [x[begin:first], lines]
                begin = end
        return mx.concatenate([*parts, x[begin:]])

    def _views(self) -> Iterator[tuple[int, int, ImageView]]:
        """Yields tokens [first, end) of the pass, and the images that these tokens see."""
        for span, queries in zip(self.spans, self._queries, strict=True):
            for view in span.views:
                yield queries.first + view.begin, queries.first + view.end, view

    def _lines_with_views(self, tokens: int) -> mx.array | None:
        """Returns the mask [T, 1] of tokens that attend to images by cross-attention.

        Returns None if no token does.
        """
        seen = np.zeros((tokens, 1), bool)
        for first, end, _ in self._views():
            seen[first:end] = True
        return mx.array(seen) if seen.any() else None

    def attend_images(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """Attends with q [T, H, D] to the images that each token sees.

        A token that sees no image gets zeros.
        """
        parts, begin = [], 0
        for first, end, view in self._views():
            if begin < first:
                parts.append(mx.zeros_like(q[begin:first]))
            keys, values = (array.astype(q.dtype) for array in view.keys_values(layer))
            parts.append(masked_attention(q[first:end], keys, values, scores, None))
            begin = end
        if begin < q.shape[0]:
            parts.append(mx.zeros_like(q[begin:]))
        return _joined(parts)

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D] rotated by the position of each token."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Writes k [T, KV, D] and v [T, KV, V] into the rows, and attends with q [T, H, D]."""
        seen = self._write(layer, (k, v))
        window = self._shape.window(layer)
        parts: list[mx.array] = []
        for queries in self._asked(layer):
            read = self._read(seen[queries.span], parts)
            parts.append(
                self._attend(queries, q[queries.first : queries.end], read, scores, window)
            )
        return _joined(parts)

    def _read(self, held: Arrays, parts: Sequence[mx.array]) -> Arrays:
        """Returns the keys and values, or latents, that a span's stored arrays represent.

        The arrays are read only after the last of the attention outputs `parts` is computed, to
        bound the memory.
        """
        return self._shape.read(self._shape.held_after(held, parts[-1]) if parts else held)

    def _attend(
        self, queries: Queries, q: mx.array, seen: Arrays, scores: ScoreParams, window: int
    ) -> mx.array:
        """Attends with the queries of one span to its keys and values."""
        keys, values = seen
        span = self.spans[queries.span]
        groups = [(image.begin, image.end) for image in span.images if image.group]
        if not groups:
            return self._attention(q, keys, values, scores, window)
        length = keys.shape[2]
        place = queries, length, window
        if place not in self._visible:
            before = length - span.count
            moved = [(before + begin, before + end) for begin, end in groups]
            self._visible[place] = group_mask(q.shape[0], length, window, moved)
        return masked_attention(q, keys, values, scores, self._visible[place])

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Writes latents [T, dim] into the rows, and attends with q [T, H, D].

        The queries of all spans with one query are projected together.
        """
        scores = ScoreParams(scale)
        seen = self._write(layer, (latent[:, None],))

        def read(queries: Queries, absorbed: mx.array) -> mx.array:
            (latents,) = seen[queries.span]
            # MLX would copy a column slice for each head; so one query multiplies all columns.
            single = absorbed.shape[0] == 1
            values = latents if single else mx.contiguous(latents[..., : heads.rank])
            return causal_attention(absorbed, latents, values, scores)[..., : heads.rank]

        def alone(queries: Queries) -> mx.array:
            (latents,), own_q = seen[queries.span], q[queries.first : queries.end]
            if not heads.decompresses(own_q.shape[0], latents.shape[2]):
                return heads.to_values(read(queries, heads.absorb(own_q)))
            keys, values = heads.decompress(latents[0, 0])
            return causal_attention(own_q, keys[None], values[None], scores)

        spans = self._asked(layer)
        together = next(
            (n for n, queries in enumerate(spans) if queries.end - queries.first > 1), len(spans)
        )
        parts = []
        if together:
            lines = line_selector([queries.first for queries in spans[:together]], q.shape[0])
            absorbed = heads.absorb(lines(q))
            reads = [
                read(queries, absorbed[n : n + 1]) for n, queries in enumerate(spans[:together])
            ]
            parts.append(heads.to_values(_joined(reads)))
        return _joined([*parts, *map(alone, spans[together:])])

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Scans inputs [T, ...] of each row, beginning with the row's recurrent state.

        The leading spans of one token are scanned together.
        """
        together = self._singles if self._singles > 1 else 0
        parts = []
        checks = [
            queries for queries in self._queries[together:] if is_check(self.spans[queries.span])
        ]
        checked = self._recur_checks(layer, inputs, scan, checks) if checks else {}
        if together:
            rows = [cast(RowCache, span.row) for span in self.spans[:together]]
            states = zip(*(row.state(layer) for row in rows), strict=True)
            before = tuple(mx.stack(list(each)) for each in states)
            out, after = scan(tuple(x[:together, None] for x in inputs), before)
            for number, row in enumerate(rows):
                row.put_state(layer, tuple(each[number] for each in after))
            parts.append(out[:, 0])
        for queries in self._queries[together:]:
            if queries.span in checked:
                parts.append(checked[queries.span])
                continue
            row = cast(RowCache, self.spans[queries.span].row)
            before = tuple(each[None] for each in row.state(layer))
            out, after = scan(tuple(x[None, queries.first : queries.end] for x in inputs), before)
            row.put_state(layer, tuple(each.squeeze(0) for each in after))
            parts.append(out.squeeze(0))
        return self.lines_after(layer, _joined(parts))

    def _recur_checks(
        self, layer: int, inputs: Sequence[mx.array], scan: Scan, checks: Sequence[Queries]
    ) -> dict[int, mx.array]:
        """Scans `checks`, the spans that check drafts, and stores the state after each token.

        Computes the first tokens of all these spans together, then the second tokens, and so on.
        Returns the outputs [n, ...] by span.
        """
        rows = {queries.span: cast(RowCache, self.spans[queries.span].row) for queries in checks}
        states = {span: [row.state(layer)] for span, row in rows.items()}
        outputs: dict[int, list[mx.array]] = {span: [] for span in rows}
        for number in range(max(queries.end - queries.first for queries in checks)):
            live = [queries for queries in checks if queries.first + number < queries.end]
            lines = mx.array([queries.first + number for queries in live], dtype=mx.int32)
            newest = zip(*(states[queries.span][-1] for queries in live), strict=True)
            before = tuple(mx.stack(list(each)) for each in newest)
            out, after = scan(tuple(x[lines][:, None] for x in inputs), before)
            for place, queries in enumerate(live):
                states[queries.span].append(tuple(each[place] for each in after))
                outputs[queries.span].append(out[place])
        for span, row in rows.items():
            row.put_states(layer, *states[span][1:])
        return {span: mx.concatenate(parts) for span, parts in outputs.items()}

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Scans lines [T, ...] of all spans in one call, from the rows' recurrent states."""
        if self._states is None:
            self._states = PassStates(
                [
                    StateSpan(cast(RowCache, span.row), span.count, is_check(span))
                    for span in self.spans
                ]
            )
        return self.lines_after(layer, self._states.recur(layer, lines, scan))

    def done(self) -> None:
        """Advances the rows; called after the last layer has written."""
        for span in self.spans:
            span.row.advance(span.count)

    def _asked(self, layer: int) -> Sequence[Queries]:
        """Returns the queries that attend in a layer, in the order of the layer's outputs."""
        return self._wanted if layer == self._last_layer else self._queries

    def _write(self, layer: int, new: Sequence[mx.array]) -> Mapping[int, Arrays]:
        """Writes new arrays [T, heads, size] into the rows.

        Returns the stored arrays [1, heads, L, size] of the tokens that each span sees, by span.
        """
        return {
            queries.span: self.spans[queries.span].row.write(
                layer, *(heads_first(x[queries.first : queries.end]) for x in new)
            )
            for queries in self._queries
        }


def _rotation(spans: Sequence[RowSpan], tokens: int) -> RotaryEmbedding:
    """Returns the rotation by the positions of all tokens of the spans."""
    starts = [span.row.offset for span in spans]
    ranges = [
        np.arange(start, start + span.count, dtype=np.int32)
        for start, span in zip(starts, spans, strict=True)
    ]
    if all(span.positions is None for span in spans):
        start = starts[0] if len(spans) == 1 and tokens > 1 else None
        return RotaryEmbedding(mx.array(np.concatenate(ranges)), start)
    positions = [
        np.repeat(numbers[:, None], 3, axis=1) if span.positions is None else span.positions
        for numbers, span in zip(ranges, spans, strict=True)
    ]
    return RotaryEmbedding(mx.array(np.concatenate(positions)))


def line_selector(lines: Sequence[int], tokens: int) -> Callable[[mx.array], mx.array]:
    """Returns a function that selects `lines` of x [tokens, ...], as a view if possible."""
    count, first = len(lines), lines[0]
    if list(lines) != list(range(first, first + count)):
        numbers = mx.array(list(lines), dtype=mx.int32)
        return lambda x: x[numbers]
    return (lambda x: x) if count == tokens else lambda x: x[first : first + count]


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)
