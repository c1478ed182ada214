"""Qwen3-Next: gated delta nets, attention with gated outputs every few layers, and experts.

Released checkpoints store norm weights minus one and each expert by itself; conversions to MLX
store norm weights as applied, and experts stacked. Both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.worker.layers.attention import GatedAttention
from mlxpool.worker.layers.config_fields import (
    FULL,
    integer,
    layer_count,
    layer_types,
    number,
    require,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    PreNormLayer,
)
from mlxpool.worker.layers.delta_net import FLOAT32, GatedDeltaNet
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, mapped, plus_one
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.moe import SoftmaxMoE

if TYPE_CHECKING:
    pass

LINEAR = "linear_attention"
FULL_INTERVAL = 4  # every 4th layer has attention, unless config.json says otherwise
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

    def layer(index: int, kind: str) -> DecoderLayer:
        feed = _experts(config, normed) if sparse(index) else _dense(config)
        if kind == LINEAR:
            return PreNormLayer(hidden, eps, delta_net, feed, mixer_name="linear_attn")
        return PreNormLayer(hidden, eps, attention, feed)

    layers = tuple(layer(index, kind) for index, kind in enumerate(_kinds(config)))
    plan = Decoder.from_config(config, layers).plan(_is_prediction, partial(_derived, layers))
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


def _derived(layers: tuple[DecoderLayer, ...], found: StoredTensors) -> Iterable[DerivedWeights]:
    if _as_released(found):
        for name in found:
            if name.endswith(NORMS) and not _is_prediction(name):
                yield mapped(found, name, plus_one)
    for index, layer in enumerate(layers):
        assert isinstance(layer, PreNormLayer)
        name = f"model.layers.{index}"
        if isinstance(layer.mixer, GatedDeltaNet):
            yield from layer.mixer.derived(found, f"{name}.{layer.mixer_name}")
        if isinstance(layer.feed, SoftmaxMoE):
            yield from layer.feed.derived(found, f"{name}.mlp")


def _as_released(found: StoredTensors) -> bool:
    """Conversions to MLX move the convolutions' axes, which distinguishes them."""
    convolutions = [spec.shape for name, spec in found.items() if name.endswith("conv1d.weight")]
    return any(shape[-1] != 1 for shape in convolutions)
