"""GLM-4.7-Flash: latent attention, and a mixture of experts in all layers except the first.

The layer after the last is a head for multi-token prediction (MTP). A checkpoint may store copies
of the model's embedding and output head with the MTP head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.worker.layers.config_fields import flag, integer, layer_count, number, require
from mlxpool.worker.layers.decoder import Decoder, HeadNames, PredictionHead
from mlxpool.worker.layers.decoder_layer import PreNormLayer
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.mla import LatentAttention, LatentDims
from mlxpool.worker.layers.model_plan import ModelPlan, PredictionPlan
from mlxpool.worker.layers.moe import CORRECTION, SigmoidMoE
from mlxpool.worker.layers.rope import parse_rope, yarn_mscale

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the model; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    plan = _plan(config, None)
    count, heads = layer_count(config), _count(config, "num_nextn_predict_layers")
    if not heads:
        return plan
    ahead = f"model.layers.{count}."
    prediction = PredictionPlan(
        is_part=lambda name: name.startswith(f"{ahead}eh_proj."),
        whole=lambda names: _plan(config, _head_names(ahead, names)),
        tensors=f"{ahead}*",
    )
    return replace(plan, prediction=prediction)


def _head_names(ahead: str, stored: Collection[str]) -> HeadNames:
    embed, output = f"{ahead}embed_tokens", f"{ahead}shared_head.head"
    return HeadNames(
        token_norm=f"{ahead}enorm",
        state_norm=f"{ahead}hnorm",
        joint=f"{ahead}eh_proj",
        layer=ahead.removesuffix("."),
        norm=f"{ahead}shared_head.norm",
        embed=embed if f"{embed}.weight" in stored else "",
        output=output if f"{output}.weight" in stored else "",
    )


def _plan(config: Mapping[str, Any], names: HeadNames | None) -> ModelPlan:
    """Returns the plan of the model, with its MTP head if there are `names` for it."""
    mixer = _attention(config)
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    count, heads = layer_count(config), _count(config, "num_nextn_predict_layers")
    feeds = _feeds(config, count + (names is not None))
    layers = tuple(PreNormLayer(hidden, eps, mixer, feed) for feed in feeds)
    unused = range(len(feeds), count + heads)
    head = None
    if names is not None:
        head = PredictionHead(integer(config, "vocab_size"), hidden, eps, layers[count], names)

    def is_unused(name: str) -> bool:
        """Returns whether a tensor belongs to an unused MTP layer after the last layer."""
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) in unused

    def derived(found: StoredTensors) -> Iterable[DerivedWeights]:
        for layer, feed in enumerate(feeds):
            yield from mixer.derived(found, f"model.layers.{layer}.self_attn")
            if isinstance(feed, SigmoidMoE):
                yield from feed.derived(found, f"model.layers.{layer}.mlp")

    return replace(
        Decoder.from_config(config, layers[:count], prediction=head).plan(is_unused),
        derived=derived,
        float32=lambda name: name.endswith(CORRECTION),
    )


def _attention(config: Mapping[str, Any]) -> LatentAttention:
    sizes = LatentDims(
        heads=integer(config, "num_attention_heads"),
        rank=integer(config, "kv_lora_rank"),
        rotated=integer(config, "qk_rope_head_dim"),
        plain=integer(config, "qk_nope_head_dim"),
        value=integer(config, "v_head_dim"),
    )
    return LatentAttention(
        hidden=integer(config, "hidden_size"),
        sizes=sizes,
        rope=parse_rope(config, sizes.rotated, base=1e6, traditional=True),
        scale=sizes.query**-0.5 * _gain(config) ** 2,
        eps=number(config, "rms_norm_eps"),
        query_rank=_count(config, "q_lora_rank"),
        bias=flag(config, "attention_bias"),
    )


def _gain(config: Mapping[str, Any]) -> float:
    """Returns YaRN's additional scale of queries and keys (`mscale_all_dim`); 1.0 without it."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = scaling.get("mscale_all_dim")
    return yarn_mscale(number(scaling, "factor"), weight) if weight else 1.0


def _feeds(config: Mapping[str, Any], layers: int) -> tuple[GatedMLP | SigmoidMoE, ...]:
    """Returns the layers' feed-forwards: the first dense, then some with experts.

    After the first dense layers, the layers whose index is a multiple of `moe_layer_freq` have
    experts.
    """
    dense = GatedMLP(integer(config, "hidden_size"), integer(config, "intermediate_size"))
    if not config.get("n_routed_experts"):
        return (dense,) * layers
    mixture = SigmoidMoE.from_config(config)
    first, step = _count(config, "first_k_dense_replace"), integer(config, "moe_layer_freq", 1)
    return tuple(
        mixture if layer >= first and layer % step == 0 else dense for layer in range(layers)
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    """Returns the integer of a key; 0 for null or a missing key."""
    return integer(config, key) if config.get(key) else 0
