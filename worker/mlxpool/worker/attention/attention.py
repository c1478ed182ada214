"""How a step reads the cache: the only place that knows rows and positions of the token axis.

A model sees x [T, d]: the new tokens of all rows of the step, one row after the other, nothing
padded. On the CPU and on Metal the rows are attended to one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxpool.worker.attention import softmax
from mlxpool.worker.attention.contiguous import SlabRow
from mlxpool.worker.attention.row_cache import Row, RowShape
from mlxpool.worker.kernels.paged_attention import Turns
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import LatentSpec
from mlxpool.worker.layers.interface import LatentProjections, Rope, Scan

AnyRow = Row | SlabRow
FUSED = (64, 80, 96, 112, 128)  # sizes of heads that a GPU's fused attention takes
LEAST_DIMS = 32  # with fewer, MLX's CUDA kernel asks for blocks that are too deep, past 64 tokens
SCORES = 2**25  # of a chunk's heads, queries and keys that may be there at once
PAIRS = 2**16  # of a query and a key for one head, the same on a CPU: its cache has room for them
FEWEST = 8  # queries; with fewer a CPU's products are slow
UNDER_WAY = 6  # parts of a chunk at most: MLX begins the next ones before the first has ended


@dataclass(frozen=True, slots=True)
class Span:
    """`count` new tokens of `row`, in their order on the token axis."""

    row: AnyRow
    count: int


class Rotation:
    """Rotates tokens by their positions [T]; `start` is the first of them where they are in a row.

    A GPU has one kernel for it; on the CPU what does not depend on x is computed once a step.
    """

    def __init__(self, positions: mx.array, start: int | None = None) -> None:
        self._positions, self._start = positions, start
        self._tables: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._wide: dict[Rope, tuple[mx.array, mx.array]] = {}
        self._fused = mx.default_device().type == mx.DeviceType.gpu

    def __call__(self, x: mx.array, rope: Rope) -> mx.array:
        """x [T, H, D]; dimensions from `rope.dims` on stay as they are."""
        fused = self._fused and rope.dims >= LEAST_DIMS
        return self._by_kernel(x, rope) if fused else self._by_table(x, rope)

    def turns(self, rope: Rope) -> Turns:
        """For a kernel that rotates by itself."""
        cosines, sines = self._table(rope)
        return Turns(cosines, sines, rope.traditional)

    def _by_kernel(self, x: mx.array, rope: Rope) -> mx.array:
        freqs = None if rope.freqs is None else mx.array(rope.freqs)
        if rope.gain != 1.0:
            gain = mx.where(mx.arange(x.shape[-1]) < rope.dims, rope.gain, 1.0)
            x = x * gain.astype(x.dtype)
        together = self._start is not None
        rotated = mx.fast.rope(
            x.swapaxes(0, 1)[None] if together else x[:, :, None, :],
            rope.dims,
            traditional=rope.traditional,
            base=None if freqs is not None else rope.base,
            scale=rope.scale,
            offset=self._positions if self._start is None else self._start,
            freqs=freqs,
        )
        return rotated.squeeze(0).swapaxes(0, 1) if together else rotated[:, :, 0, :]

    def _by_table(self, x: mx.array, rope: Rope) -> mx.array:
        turned = x[..., : rope.dims]
        if rope.traditional:
            cos, sin = self._table(rope)
            a, b = turned[..., ::2], turned[..., 1::2]
            pairs = [a * cos - b * sin, b * cos + a * sin]
            out = mx.stack(pairs, axis=-1).reshape(turned.shape)
        else:
            a, b = mx.split(turned, 2, axis=-1)
            cos, sin = self._halves(rope)
            out = turned * cos + mx.concatenate([b, a], axis=-1) * sin
        if rope.dims == x.shape[-1]:
            return out.astype(x.dtype)
        return mx.concatenate([out.astype(x.dtype), x[..., rope.dims :]], axis=-1)

    def _halves(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """What a number [T, 1, dims] is multiplied by, and its partner in the other half."""
        if rope not in self._wide:
            cos, sin = self._table(rope)
            self._wide[rope] = (
                mx.concatenate([cos, cos], axis=-1),
                mx.concatenate([-sin, sin], axis=-1),
            )
        return self._wide[rope]

    def _table(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """Cosines and sines [T, 1, dims / 2] in float32."""
        if rope not in self._tables:
            if rope.freqs is None:
                steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
                turns = mx.exp(-steps * math.log(rope.base))
            else:
                turns = 1 / mx.array(rope.freqs)
            angles = self._positions.astype(mx.float32)[:, None] * rope.scale * turns
            cos, sin = mx.cos(angles) * rope.gain, mx.sin(angles) * rope.gain
            self._tables[rope] = cos[:, None], sin[:, None]
        return self._tables[rope]


class Turning:
    """What steps that rotate and attend one after the other have in common."""

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See models.base.Step."""
        raise NotImplementedError

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See models.base.Step."""
        raise NotImplementedError

    def rotate_and_attend(
        self, layer: int, asked: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """See models.base.Step."""
        q, k = parted([self.rope(one, rope) for one in asked], v)
        return self.attend(layer, q, k, v, scores)


def parted(asked: Sequence[mx.array], v: mx.array) -> tuple[mx.array, mx.array]:
    """Queries and keys, see models.base.Step.rotate_and_attend."""
    if len(asked) == 1:
        queries = asked[0].shape[1] - v.shape[1]
        return asked[0][:, :queries], asked[0][:, queries:]
    q, k = asked
    return q, k


class Step(Turning):
    """One pass of a model over new tokens of some rows."""

    def __init__(self, spans: Sequence[Span], *, logits: bool) -> None:
        self.spans = tuple(spans)
        self.logits = logits  # whether the last token of each row wants logits
        self._single = all(span.count == 1 for span in self.spans)
        starts = [span.row.offset for span in self.spans]
        ends = [span.row.offset + span.count for span in self.spans]
        every = [mx.arange(a, b, dtype=mx.int32) for a, b in zip(starts, ends, strict=True)]
        self._rotation = Rotation(
            mx.concatenate(every), starts[0] if len(every) == 1 and not self._single else None
        )

    def logit_rows(self, x: mx.array) -> mx.array:
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

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See models.base.Step; k and v go into each row's cache."""

        def one(row: AnyRow, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return self.attend_row(row, layer, q, k, v, scores)

        return self._by_row(one, q, k, v)

    def attend_row(
        self, row: AnyRow, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """`attend` for one row: q [n, H, D], k [n, KV, D], v [n, KV, V] -> [n, H, V]."""
        keys, values = row.write(layer, _heads_first(k), _heads_first(v))
        return seen(q, keys, values, scores, row.shape.window(layer))

    def attend_latent(
        self, layer: int, q: mx.array, line: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See models.base.Step. Rows with one token each are absorbed and opened together."""
        scores = ScoreParams(scale)

        def read(row: AnyRow, q: mx.array, line: mx.array) -> mx.array:
            (lines,) = cast(Row, row).write(layer, line[None, None])
            # A product with some of the columns copies them for each head: one query takes all.
            values = lines if q.shape[0] == 1 else mx.contiguous(lines[..., : heads.rank])
            return seen(q, lines, values, scores)[..., : heads.rank]

        def one(row: AnyRow, q: mx.array, line: mx.array) -> mx.array:
            if not heads.decompresses(q.shape[0], row.offset + q.shape[0]):
                return heads.to_values(read(row, heads.absorb(q), line))
            (lines,) = cast(Row, row).write(layer, line[None, None])
            keys, values = heads.decompress(lines[0, 0])
            return seen(q, keys[None], values[None], scores)

        if self._single:
            return heads.to_values(self._by_row(read, heads.absorb(q), line))
        return self._by_row(one, q, line)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See models.base.Step. Rows with one token each go through `scan` together."""
        if self._single and len(self.spans) > 1:
            rows = [cast(Row, span.row) for span in self.spans]
            states = zip(*(row.state(layer) for row in rows), strict=True)
            together = tuple(mx.stack(list(each)) for each in states)
            out, after = scan(tuple(x[:, None] for x in inputs), together)
            for line, row in enumerate(rows):
                row.put_state(layer, tuple(each[line] for each in after))
            return out[:, 0]

        def one(row: AnyRow, *inputs: mx.array) -> mx.array:
            row = cast(Row, row)
            before = tuple(each[None] for each in row.state(layer))
            out, after = scan(tuple(x[None] for x in inputs), before)
            row.put_state(layer, tuple(each.squeeze(0) for each in after))
            return out.squeeze(0)

        return self._by_row(one, *inputs)

    def _by_row(self, one: Callable[..., mx.array], *inputs: mx.array) -> mx.array:
        """`one` for each row and its lines of the inputs [T, ...]."""
        parts, start = [], 0
        for span in self.spans:
            end = start + span.count
            parts.append(one(span.row, *(x[start:end] for x in inputs)))
            start = end
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def done(self) -> None:
        """Every layer has written: the rows are longer now."""
        for span in self.spans:
            span.row.advance(span.count)


def seen(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int = 0
) -> mx.array:
    """q [n, H, D], keys [1, KV, L, D], values [1, KV, L, V] -> [n, H, V].

    The last of the L tokens is the last query's own. Where no kernel does it in one, long chunks
    are taken in parts, one after the other, none of which reads the keys behind its own last query.
    """
    length, count = keys.shape[2], q.shape[0]
    most = count if _fused(q, values, scores) else _at_once(length, q.shape[1])
    parts: list[mx.array] = []
    for start in range(0, count, most):
        some = q[start : start + most]
        end = length - count + start + some.shape[0]
        if parts:
            some, *_ = mx.depends([some], [parts[-1]])
        visible = keys[:, :, :end], values[:, :, :end]
        parts.append(_attended(some, *visible, scores, window))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _at_once(length: int, heads: int) -> int:
    """Queries that are attended to together."""
    most = max(1, SCORES // (length * heads))
    return most if _on_gpu() else min(most, max(FEWEST, PAIRS // length))


def pairs_at_once(shape: RowShape, area: int) -> int:
    """Of `area` pairs of a query and a key, those whose scores a step holds at once."""
    if _on_gpu() or any(isinstance(one, LatentSpec) for one in shape.caches):
        return area  # what is made of a latent cache grows with the keys
    return min(area, UNDER_WAY * max(PAIRS, FEWEST * shape.capacity))


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _fused(q: mx.array, values: mx.array, scores: ScoreParams) -> bool:
    """Whether a GPU's kernel computes it without ever writing down the scores."""
    size = q.shape[-1]
    return _on_gpu() and not scores.softcap and size == values.shape[-1] and size in FUSED


def _attended(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int
) -> mx.array:
    queries = _heads_first(q)
    mask = _mask(q.shape[0], keys.shape[2], window)
    if scores.softcap or not _on_gpu():
        out = weighed(queries, keys, values, scores, _visible(mask, q.shape[0], keys.shape[2]))
    else:
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
        )
    return out.squeeze(0).transpose(1, 0, 2)  # `out[0]` would copy it all


def _mask(count: int, length: int, window: int) -> mx.array | str | None:
    """What the last `count` of `length` tokens see; a name where a kernel knows it by that."""
    if window and length > window:
        ends = mx.arange(length - count, length)[:, None]
        places = mx.arange(length)[None]
        return (places <= ends) & (places > ends - window)
    return "causal" if count > 1 else None


def _visible(mask: mx.array | str | None, count: int, length: int) -> mx.array | None:
    """The mask as numbers."""
    if isinstance(mask, str):
        return mx.arange(length)[None] <= mx.arange(length - count, length)[:, None]
    return mask


def weighed(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scores: ScoreParams,
    visible: mx.array | None,
) -> mx.array:
    """Attention in single steps, for what no kernel has.

    queries [B, H, n, D], keys [B, KV, L, D], values [B, KV, L, V] -> [B, H, n, V]. A query looks
    where `visible` [B or 1, 1, 1, n, L] is true; None: everywhere.
    """
    batch, heads, count, size = queries.shape
    pairs, length = keys.shape[1], keys.shape[2]
    grouped = (queries * scores.scale).reshape(batch, pairs, -1, size)
    found = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32)
    found = bent(found.reshape(batch, pairs, -1, count, length), scores.softcap)
    if visible is not None:
        found = found + mx.where(visible, 0.0, -mx.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.astype(mx.float32).reshape(1, pairs, -1, 1, 1)
        beside = mx.broadcast_to(sinks, (*found.shape[:-1], 1))
        found = mx.concatenate([found, beside], axis=-1)
    out = softmax.averaged(found.reshape(batch, pairs, -1, found.shape[-1]), values)
    return out.reshape(batch, heads, count, -1)


def bent(scores: mx.array, cap: float) -> mx.array:
    """Scores that stay below `cap`, see Step.attend; 0: as they are."""
    return mx.tanh(scores / cap) * cap if cap else scores


def _heads_first(x: mx.array) -> mx.array:
    """[n, H, D] -> [1, H, n, D]"""
    return x.transpose(1, 0, 2)[None]
