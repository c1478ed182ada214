"""GLM-4.7-Flash: latent attention, and a mixture of experts in all but the first layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mlxpool.worker.layers.config_fields import flag, integer, layer_count, number, require
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import PreNormLayer
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.mla import LatentAttention, LatentDims
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.moe import CORRECTION, SigmoidMoE
from mlxpool.worker.layers.rope import parse_rope, yarn_mscale

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of the model; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    mixer, feeds = _attention(config), _feeds(config)
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    layers = tuple(PreNormLayer(hidden, eps, mixer, feed) for feed in feeds)
    ahead = range(len(feeds), len(feeds) + _count(config, "num_nextn_predict_layers"))

    def is_prediction(name: str) -> bool:
        """Layers behind the last one predict further tokens (MTP); they are not used."""
        layer = _LAYER.match(name)
        return layer is not None and int(layer[1]) in ahead

    def derived(found: StoredTensors) -> Iterable[DerivedWeights]:
        for layer, feed in enumerate(feeds):
            yield from mixer.derived(found, f"model.layers.{layer}.self_attn")
            if isinstance(feed, SigmoidMoE):
                yield from feed.derived(found, f"model.layers.{layer}.mlp")

    return replace(
        Decoder.from_config(config, layers).plan(is_prediction),
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
    """The gain of queries, and of keys, in a stretched context, besides the rotation's own gain."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = scaling.get("mscale_all_dim")
    return yarn_mscale(number(scaling, "factor"), weight) if weight else 1.0


def _feeds(config: Mapping[str, Any]) -> tuple[GatedMLP | SigmoidMoE, ...]:
    """The feed-forward of each layer: dense ones first, then experts every `moe_layer_freq`."""
    dense = GatedMLP(integer(config, "hidden_size"), integer(config, "intermediate_size"))
    layers = layer_count(config)
    if not config.get("n_routed_experts"):
        return (dense,) * layers
    mixture = SigmoidMoE.from_config(config)
    first, every = _count(config, "first_k_dense_replace"), integer(config, "moe_layer_freq", 1)
    return tuple(
        mixture if layer >= first and layer % every == 0 else dense for layer in range(layers)
    )


def _count(config: Mapping[str, Any], key: str) -> int:
    """A whole number; 0, null and no key mean 0."""
    return integer(config, key) if config.get(key) else 0
