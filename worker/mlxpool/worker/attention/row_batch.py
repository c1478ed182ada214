"""A forward pass that attends row by row, for the CPU and Metal.

A model sees x [T, d]: the new tokens of all rows, one row after the other, without padding. Only
the batch knows which row and position an element of the token axis has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import mlx.core as mx

from mlxpool.worker.attention.dot_product import causal_attention, heads_first
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.slabs import SlabRow
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan

CacheRow = RowCache | SlabRow


@dataclass(frozen=True, slots=True)
class RowSpan:
    """`count` new tokens of `row`."""

    row: CacheRow
    count: int


class RowBatch(RotateThenAttend):
    """The ForwardBatch of new tokens of some rows."""

    def __init__(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> None:
        """The last token of each span in `wanted` gets logits."""
        self.spans = tuple(spans)
        self.logits = bool(wanted)
        self._wanted = list(wanted)
        self._single = all(span.count == 1 for span in self.spans)
        starts = [span.row.offset for span in self.spans]
        ends = [span.row.offset + span.count for span in self.spans]
        every = [mx.arange(a, b, dtype=mx.int32) for a, b in zip(starts, ends, strict=True)]
        self._rotation = RotaryEmbedding(
            mx.concatenate(every), starts[0] if len(every) == 1 and not self._single else None
        )

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns the last token of each wanted span of x [T, d] as [E, d]."""
        if self._wanted == list(range(x.shape[0])):
            return x
        ends = list(accumulate(span.count for span in self.spans))
        return x[mx.array([ends[number] - 1 for number in self._wanted], dtype=mx.int32)]

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D] rotated by the position of each token."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch. Writes k and v into the rows."""

        def one(row: CacheRow, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return self.attend_row(row, layer, q, k, v, scores)

        return self._by_row(one, q, k, v)

    def attend_row(
        self, row: CacheRow, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """`attend` for one row: q [n, H, D], k [n, KV, D], v [n, KV, V] -> [n, H, V]."""
        keys, values = row.write(layer, heads_first(k), heads_first(v))
        return causal_attention(q, keys, values, scores, row.shape.window(layer))

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See ForwardBatch. Projects rows of one token each together."""
        scores = ScoreParams(scale)

        def read(row: CacheRow, q: mx.array, latent: mx.array) -> mx.array:
            (latents,) = cast(RowCache, row).write(layer, latent[None, None])
            # A product of a column slice would copy it for each head: one query multiplies all.
            values = latents if q.shape[0] == 1 else mx.contiguous(latents[..., : heads.rank])
            return causal_attention(q, latents, values, scores)[..., : heads.rank]

        def one(row: CacheRow, q: mx.array, latent: mx.array) -> mx.array:
            if not heads.decompresses(q.shape[0], row.offset + q.shape[0]):
                return heads.to_values(read(row, heads.absorb(q), latent))
            (latents,) = cast(RowCache, row).write(layer, latent[None, None])
            keys, values = heads.decompress(latents[0, 0])
            return causal_attention(q, keys[None], values[None], scores)

        if self._single:
            return heads.to_values(self._by_row(read, heads.absorb(q), latent))
        return self._by_row(one, q, latent)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See ForwardBatch. Scans rows of one token each together."""
        if self._single and len(self.spans) > 1:
            rows = [cast(RowCache, span.row) for span in self.spans]
            states = zip(*(row.state(layer) for row in rows), strict=True)
            together = tuple(mx.stack(list(each)) for each in states)
            out, after = scan(tuple(x[:, None] for x in inputs), together)
            for number, row in enumerate(rows):
                row.put_state(layer, tuple(each[number] for each in after))
            return out[:, 0]

        def one(row: CacheRow, *inputs: mx.array) -> mx.array:
            row = cast(RowCache, row)
            before = tuple(each[None] for each in row.state(layer))
            out, after = scan(tuple(x[None] for x in inputs), before)
            row.put_state(layer, tuple(each.squeeze(0) for each in after))
            return out.squeeze(0)

        return self._by_row(one, *inputs)

    def _by_row(self, one: Callable[..., mx.array], *inputs: mx.array) -> mx.array:
        """Calls `one` for each row with its tokens of the inputs [T, ...]; joins the results."""
        parts, start = [], 0
        for span in self.spans:
            end = start + span.count
            parts.append(one(span.row, *(x[start:end] for x in inputs)))
            start = end
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def done(self) -> None:
        """Advances the rows after the last layer has written."""
        for span in self.spans:
            span.row.advance(span.count)
