"""Llama 2 and 3.x, and Mistral, which differs only in its sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.worker.layers.attention import GroupedQueryAttention
from mlxpool.worker.layers.config_fields import (
    SLIDING,
    Heads,
    flag,
    integer,
    layer_count,
    layer_types,
    layer_windows,
    number,
    require,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import DecoderLayer, PreNormLayer
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a llama; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    return Decoder.from_config(config, _layers(config)).plan()


def _layers(config: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    hidden, heads = integer(config, "hidden_size"), Heads.from_config(config)
    rope = parse_rope(config, heads.dim, traditional=flag(config, "rope_traditional"))
    biases = "qkvo" if flag(config, "attention_bias") else ""
    feed = GatedMLP(hidden, integer(config, "intermediate_size"), flag(config, "mlp_bias"))
    eps = number(config, "rms_norm_eps")
    return tuple(
        PreNormLayer(
            hidden, eps, GroupedQueryAttention(hidden, heads, rope, window, biases=biases), feed
        )
        for window in _windows(config)
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Without layer_types, `sliding_window` holds for all layers of a Mistral, and no Llama."""
    layers = layer_count(config)
    types = layer_types(config, layers)
    mistral = config.get("model_type") == "mistral"
    if types is None and mistral and config.get("sliding_window") is not None:
        types = (SLIDING,) * layers
    return layer_windows(config, layers, types)
