"""Qwen3-Next: gated delta nets, attention with gated outputs every few layers, and experts.

Released checkpoints store norm weights minus 1 and each expert separately. Conversions to MLX store
norm weights as applied, and experts stacked. Both forms are read. The tensors under `mtp` are a
head for multi-token prediction, which uses the model's embedding and output head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from mlxpool.worker.layers.attention import GatedAttention
from mlxpool.worker.layers.config_fields import (
    FULL,
    integer,
    layer_count,
    layer_types,
    number,
    require,
)
from mlxpool.worker.layers.decoder import (
    MTP,
    MTP_NAMES,
    Decoder,
    PredictionHead,
    is_further_layer,
)
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    PreNormLayer,
)
from mlxpool.worker.layers.delta_net import FLOAT32, GatedDeltaNet
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, mapped, plus_one
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan, PredictionPlan
from mlxpool.worker.layers.moe import SoftmaxMoE

LINEAR = "linear_attention"
FULL_INTERVAL = 4  # by default every 4th layer has attention
NORMS = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
HEAD_NORMS = tuple(
    f"{norm}.weight" for norm in (MTP_NAMES.token_norm, MTP_NAMES.state_norm, MTP_NAMES.norm)
)


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the model; raises ModelLoadFailed with the unusable key."""
    sparse = partial(_sparse, config)
    return plan_of(config, GatedDeltaNet.from_config(config, fused=True), sparse, normed=False)


def plan_of(
    config: Mapping[str, Any],
    delta_net: GatedDeltaNet,
    sparse: Callable[[int], bool],
    *,
    normed: bool,
) -> ModelPlan:
    """Returns the plan of a model with `delta_net` as its gated delta nets.

    A layer has experts if `sparse(layer)` returns True. `normed` is the default of norm_topk_prob.
    """
    require(config, "hidden_act", ["silu"])

    def whole(stored: Collection[str]) -> ModelPlan:
        routed = f"{MTP_NAMES.layer}.mlp.gate.weight" in stored
        return _plan(config, delta_net, sparse, normed=normed, routed=routed)

    prediction = PredictionPlan(
        is_part=lambda name: name.startswith(f"{MTP_NAMES.joint}."),
        whole=whole,
        tensors=f"{MTP}*",
    )
    plan = _plan(config, delta_net, sparse, normed=normed)
    return replace(plan, prediction=prediction)


def _plan(
    config: Mapping[str, Any],
    delta_net: GatedDeltaNet,
    sparse: Callable[[int], bool],
    *,
    normed: bool,
    routed: bool | None = None,
) -> ModelPlan:
    """Returns the plan as `plan_of` does, with or without the head for multi-token prediction.

    `routed`: whether the layer of this head (MTP) has experts; None: the plan has no such head.
    """
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    attention = GatedAttention.from_config(config)

    def layer(index: int, kind: str) -> DecoderLayer:
        feed = _experts(config, normed) if sparse(index) else _dense(config)
        if kind == LINEAR:
            return PreNormLayer(hidden, eps, delta_net, feed, mixer_name="linear_attn")
        return PreNormLayer(hidden, eps, attention, feed)

    layers = tuple(layer(index, kind) for index, kind in enumerate(_kinds(config)))
    named = {f"model.layers.{index}": each for index, each in enumerate(layers)}
    head = None
    if routed is not None:
        feed = _experts(config, normed) if routed else _dense(config)
        named[MTP_NAMES.layer] = PreNormLayer(hidden, eps, attention, feed)
        head = PredictionHead(
            integer(config, "vocab_size"), hidden, eps, named[MTP_NAMES.layer], MTP_NAMES
        )
    plan = Decoder.from_config(config, layers, prediction=head).plan(
        _is_unused if head is None else is_further_layer, partial(_derived, named, head is not None)
    )
    return replace(plan, float32=lambda name: name.endswith(FLOAT32))


def _is_unused(name: str) -> bool:
    return name.startswith(MTP)


def _dense(config: Mapping[str, Any]) -> GatedMLP:
    return GatedMLP(integer(config, "hidden_size"), integer(config, "intermediate_size"))


def _experts(config: Mapping[str, Any], normed: bool) -> SoftmaxMoE:
    return SoftmaxMoE.from_config(
        config, normed, integer(config, "shared_expert_intermediate_size")
    )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    layers = layer_count(config)
    interval = integer(config, "full_attention_interval", FULL_INTERVAL)
    kinds = layer_types(config, layers, (FULL, LINEAR))
    return kinds or tuple(FULL if (at + 1) % interval == 0 else LINEAR for at in range(layers))


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or ())
    step = integer(config, "decoder_sparse_step", 1)
    return bool(config.get("num_experts")) and not dense and (layer + 1) % step == 0


def _derived(
    layers: Mapping[str, DecoderLayer], head: bool, found: StoredTensors
) -> Iterable[DerivedWeights]:
    if _as_released(found):
        for name in found:
            if name.endswith((*NORMS, *HEAD_NORMS)) and (head or not _is_unused(name)):
                yield mapped(found, name, plus_one)
    for name, layer in layers.items():
        assert isinstance(layer, PreNormLayer)
        if isinstance(layer.mixer, GatedDeltaNet):
            yield from layer.mixer.derived(found, f"{name}.{layer.mixer_name}")
        if isinstance(layer.feed, SoftmaxMoE):
            yield from layer.feed.derived(found, f"{name}.mlp")


def _as_released(found: StoredTensors) -> bool:
    """Returns True if the axes of convolutions are in the order of released checkpoints.

    Returns False if the axes are in MLX's order.
    """
    convolutions = [spec.shape for name, spec in found.items() if name.endswith("conv1d.weight")]
    return any(shape[-1] != 1 for shape in convolutions)
