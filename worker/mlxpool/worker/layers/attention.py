"""Grouped-query attention: groups of query heads share a key-value head. No MLX at import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.config_fields import Heads, flag, integer, number
from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    MixerFunction,
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LayerBuilder,
    LinearInput,
    PendingProduct,
    Rope,
)
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    import mlx.core as mx

ROTARY_FACTOR = 0.25  # the default part of a head's numbers that is rotated, with gated outputs


class GroupedQueryAttention(Struct, frozen=True):
    """A Mixer: grouped-query attention, with the options of different architectures."""

    hidden: int
    heads: Heads
    rope: Rope
    window: int = 0  # the number of tokens that a token sees, itself included; 0: all
    scale: float = 0.0  # the factor of the scores; 0: head_dim ** -0.5
    softcap: float = 0.0  # see ScoreParams
    biases: str = ""  # the projections of q, k, v and o that have a bias
    norm_eps: float = 0.0  # eps of each head's query and key norms; 0: no norms
    sinks: bool = False  # each query head has a sink, see ScoreParams

    @property
    def cache(self) -> KeyValueSpec:
        """The layer's cache: the keys and values of all key-value heads."""
        return KeyValueSpec(self.heads.kv, self.heads.dim, self.heads.dim, self.window)

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        q_size, kv_size = self.heads.query * self.heads.dim, self.heads.kv * self.heads.dim
        for projection, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield from linear_shapes(
                f"{name}.{projection}_proj", size, self.hidden, projection in self.biases
            )
        if self.norm_eps:
            yield f"{name}.q_norm.weight", (self.heads.dim,)
            yield f"{name}.k_norm.weight", (self.heads.dim,)
        if self.sinks:
            yield f"{name}.sinks", (self.heads.query,)
        yield from linear_shapes(f"{name}.o_proj", self.hidden, q_size, "o" in self.biases)

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """Builds the attention over the builder's weights, whose names begin with `name`."""
        return GroupedQueryAttentionLayer(self, builder, name, layer)


class GroupedQueryAttentionLayer(FusableSublayer):
    """The layer that a GroupedQueryAttention builds."""

    def __init__(
        self, spec: GroupedQueryAttention, builder: LayerBuilder, name: str, layer: int
    ) -> None:
        self.spec, self.layer = spec, layer
        self.qkv = builder.concatenated([f"{name}.{projection}_proj" for projection in "qkv"])
        self.norms = None
        if spec.norm_eps:
            q_norm = builder.rms_norm(f"{name}.q_norm", spec.norm_eps)
            self.norms = q_norm, builder.rms_norm(f"{name}.k_norm", spec.norm_eps)
        sinks = builder.tensor(f"{name}.sinks") if spec.sinks else None
        self.scores = ScoreParams(spec.scale or spec.heads.dim**-0.5, sinks, spec.softcap)
        self.o = builder.linear(f"{name}.o_proj")

    def pending(self, x: LinearInput, *batches: ForwardBatch) -> PendingProduct:
        """Returns the layer's output with the last product pending; see FusableSublayer."""
        (batch,), heads = batches, self.spec.heads
        lines = self.qkv(x)
        if self.norms is None:
            out = batch.attend_lines(self.layer, lines, heads, self.scores, self.spec.rope)
        else:
            q_norm, k_norm = self.norms
            qk, keys = heads.query + heads.kv, slice(heads.query, heads.query + heads.kv)
            vectors = lines.reshape(-1, qk + heads.kv, heads.dim)
            normed = q_norm(vectors[:, : heads.query]), k_norm(vectors[:, keys])
            out = batch.rotate_and_attend(
                self.layer, normed, vectors[:, qk:], self.scores, self.spec.rope
            )
        return PendingProduct(self.o, out.reshape(out.shape[0], -1))


class GatedAttention(Struct, frozen=True):
    """A Mixer: grouped-query attention with a gate of each query head's output."""

    hidden: int
    heads: Heads
    rope: Rope
    bias: bool
    eps: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GatedAttention:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        heads = Heads.from_config(config)
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        factor = number({**config, **scaling}, "partial_rotary_factor", ROTARY_FACTOR)
        return cls(
            hidden=integer(config, "hidden_size"),
            heads=heads,
            rope=parse_rope(config, int(heads.dim * factor)),
            bias=flag(config, "attention_bias"),
            eps=number(config, "rms_norm_eps"),
        )

    @property
    def cache(self) -> KeyValueSpec:
        """The layer's cache: the keys and values of all key-value heads."""
        return KeyValueSpec(self.heads.kv, self.heads.dim, self.heads.dim)

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        heads, queries = self.heads, self.heads.query * self.heads.dim
        yield from linear_shapes(f"{name}.q_proj", 2 * queries, self.hidden, self.bias)
        for projection in "kv":
            yield from linear_shapes(
                f"{name}.{projection}_proj", heads.kv * heads.dim, self.hidden, self.bias
            )
        yield f"{name}.q_norm.weight", (heads.dim,)
        yield f"{name}.k_norm.weight", (heads.dim,)
        yield from linear_shapes(f"{name}.o_proj", self.hidden, queries, self.bias)

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """Builds the attention over the builder's weights, whose names begin with `name`."""
        import mlx.core as mx

        size, queries = self.heads.dim, self.heads.query
        qkv = builder.concatenated([f"{name}.{projection}_proj" for projection in "qkv"])
        q_norm = builder.rms_norm(f"{name}.q_norm", self.eps)
        k_norm = builder.rms_norm(f"{name}.k_norm", self.eps)
        o = builder.linear(f"{name}.o_proj")

        scores = ScoreParams(size**-0.5)

        def mixer(x: mx.array, batch: ForwardBatch) -> mx.array:
            heads = qkv(x).reshape(x.shape[0], -1, size)
            q_gate = heads[:, : 2 * queries].reshape(x.shape[0], queries, 2 * size)
            k, v = mx.split(heads[:, 2 * queries :], 2, axis=1)
            q = batch.rope(q_norm(q_gate[..., :size]), self.rope)
            k = batch.rope(k_norm(k), self.rope)
            gates = batch.lines_after(layer, q_gate[..., size:])
            out = batch.attend(layer, q, k, v, scores) * mx.sigmoid(gates)
            return o(out.reshape(out.shape[0], -1))

        return mixer
