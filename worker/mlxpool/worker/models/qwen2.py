"""Qwen2 and 2.5: as Llama, with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.worker.layers.config_fields import (
    FULL,
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
from mlxpool.worker.layers.grouped_query_attention import GroupedQueryAttention
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a Qwen2; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    return Decoder.from_config(config, _blocks(config)).plan()


def _blocks(config: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    hidden, heads, eps = (
        integer(config, "hidden_size"),
        Heads.from_config(config),
        number(config, "rms_norm_eps"),
    )
    rope = parse_rope(config, heads.dim, base=None, traditional=flag(config, "rope_traditional"))
    feed = GatedMLP(hidden, integer(config, "intermediate_size"))
    return tuple(
        PreNormLayer(
            hidden, eps, GroupedQueryAttention(hidden, heads, rope, window, biases="qkv"), feed
        )
        for window in sliding(config)
    )


def sliding(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The window of each layer; without layer_types those from `max_window_layers` on have one."""
    layers = layer_count(config)
    if not flag(config, "use_sliding_window"):
        return (0,) * layers
    types = layer_types(config, layers)
    if types is None:
        full = min(integer(config, "max_window_layers"), layers)
        types = (FULL,) * full + (SLIDING,) * (layers - full)
    return layer_windows(config, layers, types)
