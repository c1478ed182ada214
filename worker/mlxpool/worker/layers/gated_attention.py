"""Grouped-query attention with gated outputs, as in Qwen3-Next. No MLX at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import KeyValueSpec
from mlxpool.worker.layers.config_fields import Heads, flag, integer, number
from mlxpool.worker.layers.decoder_layer import MixerFunction, WeightShapes, linear_shapes
from mlxpool.worker.layers.interface import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    import mlx.core as mx

ROTARY_FACTOR = 0.25  # rotated part of a head, unless config.json says otherwise


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """A Mixer: grouped-query attention in which each query head has a gate of its output."""

    hidden: int
    heads: Heads
    rope: Rope
    bias: bool
    eps: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GatedAttention:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
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
        """Keys and values of all key-value heads."""
        return KeyValueSpec(self.heads.kv, self.heads.dim, self.heads.dim)

    def shapes(self, name: str) -> WeightShapes:
        """See Mixer."""
        heads, queries = self.heads, self.heads.query * self.heads.dim
        yield from linear_shapes(f"{name}.q_proj", 2 * queries, self.hidden, self.bias)
        for one in "kv":
            yield from linear_shapes(
                f"{name}.{one}_proj", heads.kv * heads.dim, self.hidden, self.bias
            )
        yield f"{name}.q_norm.weight", (heads.dim,)
        yield f"{name}.k_norm.weight", (heads.dim,)
        yield from linear_shapes(f"{name}.o_proj", self.hidden, queries, self.bias)

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """See Mixer."""
        import mlx.core as mx

        size, queries = self.heads.dim, self.heads.query
        qkv = builder.concatenated([f"{name}.{one}_proj" for one in "qkv"])
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
            out = batch.attend(layer, q, k, v, scores) * mx.sigmoid(q_gate[..., size:])
            return o(out.reshape(x.shape[0], -1))

        return mixer
