"""Multi-head latent attention (MLA): the cache keeps one latent vector for each token. No MLX.

A latent has `rank` numbers, the compressed keys and values of all heads, and then one rotated key.
Attention has two forms with equal results. In the absorbed form the queries are projected, so that
the latents themselves are keys and values. This is cheaper for few queries. In the decompressed
form each head's keys and values are computed from the latents. This is cheaper for many queries,
because the products of attention are shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from mlxpool.worker.caches.specs import LatentSpec
from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    MixerFunction,
    WeightShapes,
    computed,
    linear_shapes,
)
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, from_dequantised
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    GainNorm,
    LatentParts,
    LatentToken,
    LayerBuilder,
    LinearInput,
    MultiLinear,
    PendingNorm,
    PendingProduct,
    Rope,
)

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxpool.worker.kernels.block_write import RopeTables

MAX_DECOMPRESSED = 2**26  # the most decompressed numbers of keys and values in memory


class LatentDims(Struct, frozen=True):
    """The sizes of one layer's heads: the number of heads, and numbers per token.

    A query has `plain` numbers, then `rotated` numbers. A latent has `rank` numbers, then `rotated`
    numbers. A head's value has `value` numbers.
    """

    heads: int
    rank: int
    rotated: int  # how many numbers at the end of a query and of a latent are rotated
    plain: int  # how many other numbers a query has
    value: int

    @property
    def latent(self) -> int:
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        return self.plain + self.rotated

    def decompresses(self, count: int, length: int) -> bool:
        """Returns True if decompressing needs fewer multiplications than the absorbed form.

        The queries are the last `count` of `length` tokens. Returns False if keys and values would
        have more than MAX_DECOMPRESSED numbers.
        """
        if length * self.heads * (self.query + self.value) > MAX_DECOMPRESSED:
            return False
        decompression = (length - count) * self.rank * (self.plain + self.value)
        saved = (self.latent + self.rank) - (self.query + self.value)
        return decompression < count * length * saved


class LatentAttention(Struct, frozen=True):
    """A Mixer: attention over latents; with a `query_rank` the layer compresses queries, too."""

    hidden: int
    sizes: LatentDims
    rope: Rope
    scale: float
    eps: float  # eps of the norms of compressed queries and latents
    query_rank: int = 0
    bias: bool = False

    @property
    def cache(self) -> LatentSpec:
        """The layer's cache: one latent vector for each token."""
        return LatentSpec(self.sizes.latent, self.sizes.rank)

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        sizes, d = self.sizes, self.hidden
        queries = sizes.heads * sizes.query
        if self.query_rank:
            yield from linear_shapes(f"{name}.q_a_proj", self.query_rank, d, self.bias)
            yield f"{name}.q_a_layernorm.weight", (self.query_rank,)
            yield from linear_shapes(f"{name}.q_b_proj", queries, self.query_rank)
        else:
            yield from linear_shapes(f"{name}.q_proj", queries, d)
        yield from linear_shapes(f"{name}.kv_a_proj_with_mqa", sizes.latent, d, self.bias)
        yield f"{name}.kv_a_layernorm.weight", (sizes.rank,)
        yield f"{name}.embed_q.weight", (sizes.heads, sizes.rank, sizes.plain)
        yield f"{name}.unembed_out.weight", (sizes.heads, sizes.value, sizes.rank)
        yield from linear_shapes(f"{name}.o_proj", d, sizes.heads * sizes.value, self.bias)

    def derived(self, found: StoredTensors, name: str) -> Iterable[DerivedWeights]:
        """Splits the weight `kv_b_proj`, in which released checkpoints store both projections."""
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

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """Builds the attention over the builder's weights, whose names begin with `name`."""
        return _Attention(self, builder, name, layer)


class _Attention(FusableSublayer):
    def __init__(self, spec: LatentAttention, builder: LayerBuilder, name: str, layer: int) -> None:
        self.spec, self.layer = spec, layer
        latent = f"{name}.kv_a_proj_with_mqa"
        if spec.query_rank:
            self.down = builder.concatenated([f"{name}.q_a_proj", latent])
            self.query_norm = builder.rms_norm(f"{name}.q_a_layernorm", spec.eps)
            self.up = builder.linear(f"{name}.q_b_proj")
        else:
            self.down, self.up = builder.linear(latent), builder.linear(f"{name}.q_proj")
        self.latent_norm = builder.rms_norm(f"{name}.kv_a_layernorm", spec.eps)
        keys = builder.multi_linear(f"{name}.embed_q")
        values = builder.multi_linear(f"{name}.unembed_out")
        self.heads = LatentAttentionProjections(spec.sizes, keys, values)
        self.o = builder.linear(f"{name}.o_proj")
        self.token: LatentToken | None = None
        if spec.query_rank:
            parts = LatentParts(self.down, *self.norms, self.up, keys, values, self.o)
            self.token = builder.latent_token(parts)

    def pending(self, x: LinearInput, *batches: ForwardBatch) -> PendingProduct:
        """Returns the layer's output; its last product, the output projection, is pending.

        One kernel can compute this product together with the residual addition after it.
        """
        (batch,) = batches
        if self.token is not None and isinstance(x, PendingNorm):
            read = batch.attend_latent_token(self.layer, x, self.token, self)
            if read is not None:
                return PendingProduct(self.token, read)
        if self.spec.query_rank:
            out = batch.attend_latent_lines(self.layer, self.down(x), self)
        else:
            x = computed(x)
            q, latent = self._rotated(self.queries(x), self.down(x), batch)
            out = batch.attend_latent(self.layer, q, latent, self.scale, self.heads)
        return PendingProduct(self.o, out.reshape(out.shape[0], -1))

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.spec.scale

    @property
    def rope(self) -> Rope:
        """The rotation of queries and keys."""
        return self.spec.rope

    @property
    def norms(self) -> tuple[GainNorm, GainNorm]:
        """The norms of compressed queries and of latents; see LatentLayer."""
        return self.query_norm, self.latent_norm

    def queries(self, compressed: mx.array) -> mx.array:
        """Returns queries [T, H, D] of compressed queries, not rotated.

        If the layer does not compress queries, `compressed` is x [T, d].
        """
        return self.up(compressed).reshape(-1, self.spec.sizes.heads, self.spec.sizes.query)

    def rotated_queries(self, q: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the queries with their last numbers rotated; see LatentLayer."""
        import mlx.core as mx

        plain, end = q[..., : self.spec.sizes.plain], q[..., self.spec.sizes.plain :]
        return mx.concatenate([plain, batch.rope(end, self.rope)], axis=-1)

    def split(self, lines: mx.array, batch: ForwardBatch) -> tuple[mx.array, mx.array]:
        """Splits the lines [T, C + dim] of the first product into queries and latents.

        Returns queries [T, H, D] and latents [T, dim], normed and rotated. C: the size of a
        compressed query.
        """
        rank = self.spec.query_rank
        q = self.queries(self.query_norm(lines[:, :rank]))
        return self._rotated(q, lines[:, rank:], batch)

    def _rotated(
        self, q: mx.array, latent: mx.array, batch: ForwardBatch
    ) -> tuple[mx.array, mx.array]:
        import mlx.core as mx

        sizes = self.spec.sizes
        ends = [q[..., sizes.plain :], latent[:, None, sizes.rank :]]
        rotated = batch.rope(mx.concatenate(ends, axis=1), self.spec.rope)
        compressed = self.latent_norm(latent[:, : sizes.rank])
        return (
            mx.concatenate([q[..., : sizes.plain], rotated[:, : sizes.heads]], axis=-1),
            mx.concatenate([compressed, rotated[:, sizes.heads]], axis=-1),
        )


class LatentAttentionProjections(Struct, frozen=True):
    """Implements LatentProjections. Weights: keys [H, rank, plain], values [H, value, rank]."""

    sizes: LatentDims
    keys: MultiLinear
    values: MultiLinear

    @property
    def rank(self) -> int:
        return self.sizes.rank

    def decompresses(self, count: int, length: int) -> bool:
        """Returns True if decompressing is cheaper for the last `count` of `length` tokens."""
        return self.sizes.decompresses(count, length)

    def absorb(self, q: mx.array) -> mx.array:
        """Returns queries [T, H, latent] with latents as their keys, made from q [T, H, query]."""
        import mlx.core as mx

        plain, rotated = q[..., : self.sizes.plain], q[..., self.sizes.plain :]
        return mx.concatenate([self.keys.of_lines(plain), rotated], axis=-1)

    def absorb_and_rotate(self, q: mx.array, turns: RopeTables) -> mx.array | None:
        """Rotates the last numbers of queries by `turns`, and absorbs the queries.

        Returns None if no kernel does both.
        """
        return self.keys.of_rotated_lines(q, turns)

    def to_values(self, read: mx.array) -> mx.array:
        """Returns the values [T, H, value] of the attention output `read` [T, H, rank]."""
        return self.values.of_lines(read)

    def decompress(self, latents: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the keys [H, L, query] and values [H, L, value] of latents [L, latent]."""
        import mlx.core as mx

        compressed, rotated = latents[None, :, : self.rank], latents[None, :, self.rank :]
        plain = self.keys.transposed(compressed)
        rotated = mx.broadcast_to(rotated, (*plain.shape[:2], self.sizes.rotated))
        return mx.concatenate([plain, rotated], axis=-1), self.values(compressed)
