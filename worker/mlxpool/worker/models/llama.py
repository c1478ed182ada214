"""Llama 2 and 3.x, and Mistral, which is the same but for its window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.worker.layers.attention import Block, Gated, GroupedQuery, PreNorm
from mlxpool.worker.layers.config_fields import (
    SLIDING,
    Heads,
    flag,
    layer_count,
    layer_types,
    require,
    windows,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.interface import Plan, integer, number
from mlxpool.worker.layers.rope import rope


def plan(config: Mapping[str, Any]) -> Plan:
    """The plan of a llama; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    return Decoder.of(config, _blocks(config)).plan()


def _blocks(config: Mapping[str, Any]) -> tuple[Block, ...]:
    hidden, heads = integer(config, "hidden_size"), Heads.of(config)
    turn = rope(config, heads.size, traditional=flag(config, "rope_traditional"))
    biases = "qkvo" if flag(config, "attention_bias") else ""
    feed = Gated(hidden, integer(config, "intermediate_size"), flag(config, "mlp_bias"))
    eps = number(config, "rms_norm_eps")
    return tuple(
        PreNorm(hidden, eps, GroupedQuery(hidden, heads, turn, window, biases=biases), feed)
        for window in _windows(config)
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """A `sliding_window` alone means every layer of a Mistral, and nothing to a Llama."""
    layers = layer_count(config)
    types = layer_types(config, layers)
    mistral = config.get("model_type") == "mistral"
    if types is None and mistral and config.get("sliding_window") is not None:
        types = (SLIDING,) * layers
    return windows(config, layers, types)
