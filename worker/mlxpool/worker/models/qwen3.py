"""Qwen3: Qwen2 with norms of each head's queries and keys before RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.worker.layers.attention import GroupedQueryAttention
from mlxpool.worker.layers.config_fields import (
    Heads,
    enabled_windows,
    flag,
    integer,
    number,
    require,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import DecoderLayer, PreNormLayer
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope

HEAD_DIM = 128  # the default of config.json


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a Qwen3; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    return Decoder.from_config(config, _layers(config)).plan()


def _layers(config: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    feed = GatedMLP(hidden, integer(config, "intermediate_size"))
    heads = Heads.from_config(config, dim=HEAD_DIM)
    return tuple(
        PreNormLayer(hidden, eps, attention(config, heads, window), feed)
        for window in enabled_windows(config)
    )


def attention(config: Mapping[str, Any], heads: Heads, window: int) -> GroupedQueryAttention:
    """Returns the attention of a layer of Qwen3, with or without experts."""
    return GroupedQueryAttention(
        integer(config, "hidden_size"),
        heads,
        parse_rope(config, heads.dim, base=None),
        window,
        biases="qkvo" if flag(config, "attention_bias") else "",
        norm_eps=number(config, "rms_norm_eps"),
    )
