"""How a step reads the cache: the only place that knows rows and positions of the token axis.

A model sees x [T, d]: the new tokens of all rows of the step, one row after the other, nothing
padded. On the CPU and on Metal the rows are attended to one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.cache import Row
from mlxpool.worker.models.base import Rope


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new tokens of `row`, in their order on the token axis."""

    row: Row
    count: int


class Step:
    """One pass of a model over new tokens of some rows."""

    def __init__(self, spans: Sequence[Span], *, logits: bool) -> None:
        self.spans = tuple(spans)
        self.logits = logits  # whether the last token of each row wants logits
        self._single = all(span.count == 1 for span in self.spans)
        self._freqs: dict[Rope, mx.array | None] = {}
        self._positions = mx.array(
            [span.row.offset + index for span in self.spans for index in range(span.count)],
            dtype=mx.int32,
        )

    def wanted(self, x: mx.array) -> mx.array:
        """The lines of x [T, d] that want logits: [R, d], the last of each row."""
        if self._single:
            return x
        ends, end = [], 0
        for span in self.spans:
            end += span.count
            ends.append(end - 1)
        return x[mx.array(ends, dtype=mx.int32)]

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """x [T, H, D] rotated by each token's own position."""
        freqs = self._freqs_of(rope)
        rotated = mx.fast.rope(
            x[:, :, None, :],
            rope.dims,
            traditional=rope.traditional,
            base=None if freqs is not None else rope.base,
            scale=rope.scale,
            offset=self._positions,
            freqs=freqs,
        )
        return rotated[:, :, 0, :]

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """q [T, H, D], k and v [T, KV, D] -> [T, H, D]; k and v go into each row's cache."""
        parts, start = [], 0
        for span in self.spans:
            end = start + span.count
            parts.append(
                _attend_row(span.row, layer, q[start:end], k[start:end], v[start:end], scale)
            )
            start = end
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def done(self) -> None:
        """Every layer has written: the rows are longer now."""
        for span in self.spans:
            span.row.advance(span.count)

    def _freqs_of(self, rope: Rope) -> mx.array | None:
        if rope not in self._freqs:
            self._freqs[rope] = None if rope.freqs is None else mx.array(rope.freqs)
        return self._freqs[rope]


def _attend_row(
    row: Row, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
) -> mx.array:
    keys, values = row.write(layer, _heads_first(k), _heads_first(v))
    mask = "causal" if q.shape[0] > 1 else None
    out = mx.fast.scaled_dot_product_attention(
        _heads_first(q), keys, values, scale=scale, mask=mask
    )
    return out[0].transpose(1, 0, 2)


def _heads_first(x: mx.array) -> mx.array:
    """[n, H, D] -> [1, H, n, D]"""
    return x.transpose(1, 0, 2)[None]
