"""How a step reads the cache: the only place that knows rows and positions of the token axis.

A model sees x [T, d]: the new tokens of all rows of the step, one row after the other, nothing
padded. On the CPU and on Metal the rows are attended to one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.cache import Row
from mlxpool.worker.models.base import Rope
from mlxpool.worker.slabs import SlabRow

AnyRow = Row | SlabRow


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new tokens of `row`, in their order on the token axis."""

    row: AnyRow
    count: int


class Rotation:
    """Rotates tokens by their positions [T].

    A GPU has one kernel for it; on the CPU what does not depend on x is computed once a step.
    """

    def __init__(self, positions: mx.array) -> None:
        self._positions = positions
        self._tables: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._fused = mx.default_device().type == mx.DeviceType.gpu

    def __call__(self, x: mx.array, rope: Rope) -> mx.array:
        """x [T, H, D]; dimensions from `rope.dims` on stay as they are."""
        return self._by_kernel(x, rope) if self._fused else self._by_table(x, rope)

    def _by_kernel(self, x: mx.array, rope: Rope) -> mx.array:
        freqs = None if rope.freqs is None else mx.array(rope.freqs)
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

    def _by_table(self, x: mx.array, rope: Rope) -> mx.array:
        cos, sin = self._table(rope)
        turned = x[..., : rope.dims]
        if rope.traditional:
            a, b = turned[..., ::2], turned[..., 1::2]
        else:
            a, b = mx.split(turned, 2, axis=-1)
        one, other = a * cos - b * sin, b * cos + a * sin
        if rope.traditional:
            out = mx.stack([one, other], axis=-1).reshape(turned.shape)
        else:
            out = mx.concatenate([one, other], axis=-1)
        if rope.dims == x.shape[-1]:
            return out.astype(x.dtype)
        return mx.concatenate([out.astype(x.dtype), x[..., rope.dims :]], axis=-1)

    def _table(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """Cosines and sines [T, 1, dims / 2] in float32."""
        if rope not in self._tables:
            if rope.freqs is None:
                steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
                turns = mx.exp(-steps * math.log(rope.base))
            else:
                turns = 1 / mx.array(rope.freqs)
            angles = self._positions.astype(mx.float32)[:, None] * rope.scale * turns
            self._tables[rope] = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return self._tables[rope]


class Step:
    """One pass of a model over new tokens of some rows."""

    def __init__(self, spans: Sequence[Span], *, logits: bool) -> None:
        self.spans = tuple(spans)
        self.logits = logits  # whether the last token of each row wants logits
        self._single = all(span.count == 1 for span in self.spans)
        self._rotation = Rotation(
            mx.concatenate(
                [mx.arange(s.row.offset, s.row.offset + s.count, dtype=mx.int32) for s in spans]
            )
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
        return self._rotation(x, rope)

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """q [T, H, D], k and v [T, KV, D] -> [T, H, D]; k and v go into each row's cache."""
        parts, start = [], 0
        for span in self.spans:
            end = start + span.count
            new = (q[start:end], k[start:end], v[start:end])
            parts.append(self.attend_row(span.row, layer, *new, scale))
            start = end
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def attend_row(
        self, row: AnyRow, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array:
        """`attend` for one row: q [n, H, D], k and v [n, KV, D] -> [n, H, D]."""
        keys, values = row.write(layer, _heads_first(k), _heads_first(v))
        mask = "causal" if q.shape[0] > 1 else None
        out = mx.fast.scaled_dot_product_attention(
            _heads_first(q), keys, values, scale=scale, mask=mask
        )
        return out[0].transpose(1, 0, 2)

    def done(self) -> None:
        """Every layer has written: the rows are longer now."""
        for span in self.spans:
            span.row.advance(span.count)


def _heads_first(x: mx.array) -> mx.array:
    """[n, H, D] -> [1, H, n, D]"""
    return x.transpose(1, 0, 2)[None]
