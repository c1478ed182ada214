"""Qwen3-Next: gated delta nets, attention with gated outputs every few layers, and experts.

Released checkpoints store norm weights minus one and each expert by itself; conversions to MLX
store norm weights as applied, and experts stacked. Both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import KeyValueSpec
from mlxpool.worker.layers.config_fields import (
    FULL,
    Heads,
    flag,
    integer,
    layer_count,
    layer_types,
    number,
    require,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    MixerFunction,
    PreNormLayer,
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.delta_net import FLOAT32, GatedDeltaNet
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, mapped
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.interface import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope
from mlxpool.worker.layers.softmax_moe import SoftmaxMoE

if TYPE_CHECKING:
    import mlx.core as mx

LINEAR = "linear_attention"
FULL_INTERVAL = 4  # every 4th layer has attention, unless config.json says otherwise
ROTARY_FACTOR = 0.25  # rotated part of a head, unless config.json says otherwise
NORMS = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
PREDICTION = "mtp."  # tensors that predict further tokens (MTP); they are not used


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of the model; raises ModelLoadFailed naming the key that cannot be used."""
    sparse = partial(_sparse, config)
    return plan_of(config, GatedDeltaNet.from_config(config, fused=True), sparse, normed=False)


def plan_of(
    config: Mapping[str, Any],
    delta_net: GatedDeltaNet,
    sparse: Callable[[int], bool],
    *,
    normed: bool,
) -> ModelPlan:
    """The plan with these delta nets, and with experts in the layers for which `sparse` is true.

    `normed` is the default of norm_topk_prob.
    """
    require(config, "hidden_act", ["silu"])
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    attention = GatedAttention.from_config(config)

    def block(layer: int, kind: str) -> DecoderLayer:
        feed = _experts(config, normed) if sparse(layer) else _dense(config)
        if kind == LINEAR:
            return PreNormLayer(hidden, eps, delta_net, feed, mixer_name="linear_attn")
        return PreNormLayer(hidden, eps, attention, feed)

    blocks = tuple(block(layer, kind) for layer, kind in enumerate(_kinds(config)))
    plan = Decoder.from_config(config, blocks).plan(_is_prediction, partial(_derived, blocks))
    return replace(plan, float32=lambda name: name.endswith(FLOAT32))


def _is_prediction(name: str) -> bool:
    return name.startswith(PREDICTION)


def _dense(config: Mapping[str, Any]) -> GatedMLP:
    return GatedMLP(integer(config, "hidden_size"), integer(config, "intermediate_size"))


def _experts(config: Mapping[str, Any], normed: bool) -> SoftmaxMoE:
    return SoftmaxMoE.from_config(
        config, normed, integer(config, "shared_expert_intermediate_size")
    )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    layers = layer_count(config)
    every = integer(config, "full_attention_interval", FULL_INTERVAL)
    kinds = layer_types(config, layers, (FULL, LINEAR))
    return kinds or tuple(FULL if (at + 1) % every == 0 else LINEAR for at in range(layers))


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or ())
    every = integer(config, "decoder_sparse_step", 1)
    return bool(config.get("num_experts")) and not dense and (layer + 1) % every == 0


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


def _derived(blocks: tuple[DecoderLayer, ...], found: StoredTensors) -> Iterable[DerivedWeights]:
    if _as_released(found):
        for name in found:
            if name.endswith(NORMS) and not _is_prediction(name):
                yield mapped(found, name, _plus_one)
    for layer, block in enumerate(blocks):
        assert isinstance(block, PreNormLayer)
        name = f"model.layers.{layer}"
        if isinstance(block.mixer, GatedDeltaNet):
            yield from block.mixer.derived(found, f"{name}.{block.mixer_name}")
        if isinstance(block.feed, SoftmaxMoE):
            yield from block.feed.derived(found, f"{name}.mlp")


def _as_released(found: StoredTensors) -> bool:
    """Conversions to MLX move the convolutions' axes, which distinguishes them."""
    convolutions = [spec.shape for name, spec in found.items() if name.endswith("conv1d.weight")]
    return any(shape[-1] != 1 for shape in convolutions)


def _plus_one(weight: mx.array) -> mx.array:
    import mlx.core as mx

    return weight.astype(mx.float32) + 1
