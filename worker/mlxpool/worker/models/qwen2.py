"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

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


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a Qwen2; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    return Decoder.from_config(config, _layers(config)).plan()


def _layers(config: Mapping[str, Any]) -> tuple[DecoderLayer, ...]:
    hidden, heads = integer(config, "hidden_size"), Heads.from_config(config)
    eps = number(config, "rms_norm_eps")
    rope = parse_rope(config, heads.dim, base=None, traditional=flag(config, "rope_traditional"))
    feed = GatedMLP(hidden, integer(config, "intermediate_size"))
    return tuple(
        PreNormLayer(
            hidden, eps, GroupedQueryAttention(hidden, heads, rope, window, biases="qkv"), feed
        )
        for window in enabled_windows(config)
    )
