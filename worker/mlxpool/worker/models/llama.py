"""Llama 2 and 3.x, and Mistral, which differs only in its sliding window.

With `mtp_intermediate_size` in config.json the model has a head for multi-token prediction (MTP): a
feed-forward of this width. The demo model has this head; its tensors have the names of Qwen3-Next.
With `mtp_draft_vocab_size` the head drafts only this number of tokens, listed in
`mtp.draft_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
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
from mlxpool.worker.layers.decoder import (
    MTP,
    MTP_NAMES,
    Decoder,
    PredictionHead,
    is_further_layer,
)
from mlxpool.worker.layers.decoder_layer import DecoderLayer, FeedLayer, PreNormLayer
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan, PredictionPlan
from mlxpool.worker.layers.rope import parse_rope

HEAD_WIDTH, DRAFTED = "mtp_intermediate_size", "mtp_draft_vocab_size"


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a llama; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    decoder = Decoder.from_config(config, _layers(config))
    if not config.get(HEAD_WIDTH):
        return decoder.plan()
    feed = GatedMLP(decoder.hidden, integer(config, HEAD_WIDTH))
    layer = FeedLayer(decoder.hidden, decoder.eps, feed)
    drafted = integer(config, DRAFTED) if config.get(DRAFTED) else 0
    if drafted and not decoder.tied:
        raise ModelLoadFailed(
            f"config.json has {DRAFTED} {drafted} and untied embeddings; the output head for some"
            f" tokens is made of tied embeddings: take {DRAFTED} out"
        )
    head = PredictionHead(
        decoder.vocab_size, decoder.hidden, decoder.eps, layer, MTP_NAMES, drafted
    )
    whole = replace(
        replace(decoder, prediction=head).plan(is_further_layer),
        float32=lambda name: name == MTP_NAMES.drafted,
    )
    prediction = PredictionPlan(
        is_part=lambda name: name.startswith(f"{MTP_NAMES.joint}."),
        whole=lambda names: whole,
        tensors=f"{MTP}*",
    )
    return replace(decoder.plan(lambda name: name.startswith(MTP)), prediction=prediction)


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
    """Returns each layer's window. Without layer_types, only Mistral uses `sliding_window`."""
    layers = layer_count(config)
    types = layer_types(config, layers)
    mistral = config.get("model_type") == "mistral"
    if types is None and mistral and config.get("sliding_window") is not None:
        types = (SLIDING,) * layers
    return layer_windows(config, layers, types)
