"""Qwen3: each head's queries and keys go through a norm before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.worker.layers.attention import Block, Gated, GroupedQuery, PreNorm
from mlxpool.worker.layers.config_fields import Heads, flag, require
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.interface import Plan, integer, number
from mlxpool.worker.layers.rope import rope
from mlxpool.worker.models.qwen2 import sliding

HEAD = 128  # numbers, where config.json does not say


def plan(config: Mapping[str, Any]) -> Plan:
    """The plan of a Qwen3; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    return Decoder.of(config, _blocks(config)).plan()


def _blocks(config: Mapping[str, Any]) -> tuple[Block, ...]:
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    feed = Gated(hidden, integer(config, "intermediate_size"))
    heads = Heads.of(config, size=HEAD)
    return tuple(
        PreNorm(hidden, eps, attention(config, heads, window), feed) for window in sliding(config)
    )


def attention(config: Mapping[str, Any], heads: Heads, window: int) -> GroupedQuery:
    """What Qwen3 has in every layer, with experts or without."""
    return GroupedQuery(
        integer(config, "hidden_size"),
        heads,
        rope(config, heads.size, base=None),
        window,
        biases="qkvo" if flag(config, "attention_bias") else "",
        norm_eps=number(config, "rms_norm_eps"),
    )
