"""Latent attention (MLA): the cache keeps one line of a token, which all heads read. No MLX.

A line is `rank` numbers that all heads share and one rotated key behind them. A query can come to
the lines, through the weights of the keys, and what it reads be made a value; or keys and values
can be made of the lines first. The first is cheaper for few queries; the second for many, since
its products are shorter, but every line has to be opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxpool.worker.layers.cache_specs import LatentSpec
from mlxpool.worker.layers.decoder_layer import MixerFunction, WeightShapes, linear_shapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, from_dequantised
from mlxpool.worker.layers.interface import ForwardBatch, LayerBuilder, MultiLinear, Rope

if TYPE_CHECKING:
    import mlx.core as mx

MAX_DECOMPRESSED = 2**26  # numbers of opened keys and values that may be there at once


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Of one layer's heads, in numbers."""

    heads: int
    rank: int
    rotated: int  # the end of a query and of a line
    plain: int  # the rest of a query
    value: int

    @property
    def line(self) -> int:
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        return self.plain + self.rotated

    def expands(self, count: int, length: int) -> bool:
        """Whether `count` queries, the last of `length` tokens, multiply less over opened lines."""
        if length * self.heads * (self.query + self.value) > MAX_DECOMPRESSED:
            return False
        opened = (length - count) * self.rank * (self.plain + self.value)
        shorter = (self.line + self.rank) - (self.query + self.value)
        return opened < count * length * shorter


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over lines; queries are made in two steps where `query_rank` is not 0."""

    hidden: int
    sizes: LatentDims
    rope: Rope
    scale: float
    eps: float  # of the norms between the steps
    query_rank: int = 0
    bias: bool = False

    @property
    def cache(self) -> LatentSpec:
        """One line of each token."""
        return LatentSpec(self.sizes.line, self.sizes.rank)

    def shapes(self, name: str) -> WeightShapes:
        """See blocks.Mixer."""
        sizes, d = self.sizes, self.hidden
        queries = sizes.heads * sizes.query
        if self.query_rank:
            yield from linear_shapes(f"{name}.q_a_proj", self.query_rank, d, self.bias)
            yield f"{name}.q_a_layernorm.weight", (self.query_rank,)
            yield from linear_shapes(f"{name}.q_b_proj", queries, self.query_rank)
        else:
            yield from linear_shapes(f"{name}.q_proj", queries, d)
        yield from linear_shapes(f"{name}.kv_a_proj_with_mqa", sizes.line, d, self.bias)
        yield f"{name}.kv_a_layernorm.weight", (sizes.rank,)
        yield f"{name}.embed_q.weight", (sizes.heads, sizes.rank, sizes.plain)
        yield f"{name}.unembed_out.weight", (sizes.heads, sizes.value, sizes.rank)
        yield from linear_shapes(f"{name}.o_proj", d, sizes.heads * sizes.value, self.bias)

    def derived(self, found: StoredTensors, name: str) -> Iterable[DerivedWeights]:
        """As released, what makes keys and what makes values of a line are one weight."""
        if f"{name}.kv_b_proj.weight" not in found:
            return
        sizes = self.sizes
        shapes = {
            f"{name}.embed_q.weight": (sizes.heads, sizes.rank, sizes.plain),
            f"{name}.unembed_out.weight": (sizes.heads, sizes.value, sizes.rank),
        }
        yield from_dequantised(found, f"{name}.kv_b_proj", sizes.rank, shapes, self._split)

    def _split(self, weight: mx.array) -> Sequence[mx.array]:
        import mlx.core as mx

        heads = weight.reshape(self.sizes.heads, -1, self.sizes.rank)
        keys, values = heads[:, : self.sizes.plain], heads[:, self.sizes.plain :]
        return [mx.contiguous(keys.swapaxes(-1, -2)), mx.contiguous(values)]

    def build(self, parts: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """See blocks.Mixer."""
        return _Attention(self, parts, name, layer)


class _Attention:
    def __init__(self, spec: LatentAttention, parts: LayerBuilder, name: str, layer: int) -> None:
        self.spec, self.layer = spec, layer
        line = f"{name}.kv_a_proj_with_mqa"
        if spec.query_rank:
            self.down = parts.joined([f"{name}.q_a_proj", line])
            self.query_norm = parts.norm(f"{name}.q_a_layernorm", spec.eps)
            self.up = parts.linear(f"{name}.q_b_proj")
        else:
            self.down, self.up = parts.linear(line), parts.linear(f"{name}.q_proj")
        self.line_norm = parts.norm(f"{name}.kv_a_layernorm", spec.eps)
        keys, values = parts.heads(f"{name}.embed_q"), parts.heads(f"{name}.unembed_out")
        self.heads = LatentAttentionProjections(spec.sizes, keys, values)
        self.o = parts.linear(f"{name}.o_proj")

    def __call__(self, x: mx.array, step: ForwardBatch) -> mx.array:
        q, line = self._rotated(*self._made(x), step)
        out = step.attend_latent(self.layer, q, line, self.spec.scale, self.heads)
        return self.o(out.reshape(x.shape[0], -1))

    def _made(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Queries [T, H, query] and lines [T, line]."""
        sizes, rank = self.spec.sizes, self.spec.query_rank
        made = self.down(x)
        asked = self.query_norm(made[:, :rank]) if rank else x
        return self.up(asked).reshape(-1, sizes.heads, sizes.query), made[:, rank:]

    def _rotated(
        self, q: mx.array, line: mx.array, step: ForwardBatch
    ) -> tuple[mx.array, mx.array]:
        import mlx.core as mx

        sizes = self.spec.sizes
        ends = [q[..., sizes.plain :], line[:, None, sizes.rank :]]
        turned = step.rope(mx.concatenate(ends, axis=1), self.spec.rope)
        shared = self.line_norm(line[:, : sizes.rank])
        return (
            mx.concatenate([q[..., : sizes.plain], turned[:, : sizes.heads]], axis=-1),
            mx.concatenate([shared, turned[:, sizes.heads]], axis=-1),
        )


@dataclass(frozen=True, slots=True)
class LatentAttentionProjections:
    """See base.LatentHeads; `keys` has weight [H, rank, plain], `values` [H, value, rank]."""

    sizes: LatentDims
    keys: MultiLinear
    values: MultiLinear

    @property
    def rank(self) -> int:
        return self.sizes.rank

    def expands(self, count: int, length: int) -> bool:
        """See Sizes.expands."""
        return self.sizes.expands(count, length)

    def absorbed(self, q: mx.array) -> mx.array:
        """q [T, H, query] -> [T, H, line]."""
        import mlx.core as mx

        plain, rotated = q[..., : self.sizes.plain], q[..., self.sizes.plain :]
        moved = self.keys(plain.swapaxes(0, 1)).swapaxes(0, 1)
        return mx.concatenate([moved, rotated], axis=-1)

    def opened(self, read: mx.array) -> mx.array:
        """read [T, H, rank] -> [T, H, value]."""
        return self.values(read.swapaxes(0, 1)).swapaxes(0, 1)

    def expanded(self, lines: mx.array) -> tuple[mx.array, mx.array]:
        """lines [L, line] -> keys [H, L, query], values [H, L, value]."""
        import mlx.core as mx

        shared, rotated = lines[None, :, : self.rank], lines[None, :, self.rank :]
        plain = self.keys.back(shared)
        rotated = mx.broadcast_to(rotated, (*plain.shape[:2], self.sizes.rotated))
        return mx.concatenate([plain, rotated], axis=-1), self.values(shared)
