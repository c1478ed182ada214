"""A decoder layer of cross-attention to images, for use beside self-attention layers. No MLX.

The layer's keys and values come only from images. They are computed once for each image, outside
the KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.config_fields import Heads
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayerFunction,
    FeedForward,
    Residual,
    WeightShapes,
    add_and_norm,
    linear_shapes,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder

if TYPE_CHECKING:
    import mlx.core as mx


class CrossAttentionLayer(Struct, frozen=True):
    """A DecoderLayer: x + gate * attention(norm(x)), then likewise with the feed-forward.

    The layer does not change a token that attends to no image.
    """

    hidden: int
    heads: Heads
    eps: float
    feed: FeedForward

    @property
    def cache(self) -> None:
        """None: the layer has no KV cache; its keys and values come from images."""

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        inner, heads = f"{name}.cross_attn", self.heads
        yield from linear_shapes(f"{inner}.q_proj", heads.query * heads.dim, self.hidden)
        for part in "kv":
            yield from linear_shapes(f"{inner}.{part}_proj", heads.kv * heads.dim, self.hidden)
        for part in "qk":
            yield f"{inner}.{part}_norm.weight", (heads.dim,)
        yield from linear_shapes(f"{inner}.o_proj", self.hidden, heads.query * heads.dim)
        yield f"{name}.cross_attn_attn_gate", (1,)
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")
        yield f"{name}.cross_attn_mlp_gate", (1,)

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """Builds the layer over the builder's weights, whose names begin with `name`."""
        return _CrossAttention(self, builder, name, layer)


class _CrossAttention:
    def __init__(
        self, spec: CrossAttentionLayer, builder: LayerBuilder, name: str, layer: int
    ) -> None:
        import mlx.core as mx

        self.layer, self.heads = layer, spec.heads
        self.scores = ScoreParams(spec.heads.dim**-0.5)
        self.before_attention = builder.rms_norm(f"{name}.input_layernorm", spec.eps)
        self.q = builder.linear(f"{name}.cross_attn.q_proj")
        self.q_norm = builder.rms_norm(f"{name}.cross_attn.q_norm", spec.eps)
        self.o = builder.linear(f"{name}.cross_attn.o_proj")
        self.attention_gate = mx.tanh(builder.tensor(f"{name}.cross_attn_attn_gate"))
        self.before_feed = builder.rms_norm(f"{name}.post_attention_layernorm", spec.eps)
        self.feed = spec.feed.build(builder, f"{name}.mlp")
        self.feed_gate = mx.tanh(builder.tensor(f"{name}.cross_attn_mlp_gate"))

    def __call__(self, x: Residual, batch: ForwardBatch) -> Residual:
        import mlx.core as mx

        seen = batch.sees_images
        if seen is None:
            return x
        x, normed = add_and_norm(self.before_attention, x)
        q = self.q_norm(self.q(normed).reshape(-1, self.heads.query, self.heads.dim))
        read = batch.attend_images(self.layer, q, self.scores)
        x = x + self.attention_gate * self.o(read.reshape(x.shape[0], -1))
        fed = self.feed_gate * self.feed(self.before_feed(x))
        return mx.where(seen, x + fed, x)


class ImageKeysValues:
    """Computes the keys and values [KV, n, D] of one layer from an image's states [n, d]."""

    def __init__(self, spec: CrossAttentionLayer, builder: LayerBuilder, name: str) -> None:
        self.heads = spec.heads
        self.k = builder.linear(f"{name}.cross_attn.k_proj")
        self.k_norm = builder.rms_norm(f"{name}.cross_attn.k_norm", spec.eps)
        self.v = builder.linear(f"{name}.cross_attn.v_proj")

    def __call__(self, states: mx.array) -> tuple[mx.array, mx.array]:
        shape = states.shape[0], self.heads.kv, self.heads.dim
        keys = self.k_norm(self.k(states).reshape(shape))
        return keys.swapaxes(0, 1), self.v(states).reshape(shape).swapaxes(0, 1)
