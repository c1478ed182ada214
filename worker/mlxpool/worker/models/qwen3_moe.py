"""Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import Heads, integer, layer_count, number, require
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import DecoderLayer, FeedForward, PreNormLayer
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.moe import SoftmaxMoE
from mlxpool.worker.models.qwen3 import attention


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the model; raises ModelLoadFailed with the unusable key."""
    require(config, "hidden_act", ["silu"])
    require(config, "use_sliding_window", [False])
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    mixer = attention(config, Heads.from_config(config), window=0)
    feeds = tuple(_feeds(config))
    layers: tuple[DecoderLayer, ...] = tuple(
        PreNormLayer(hidden, eps, mixer, feed) for feed in feeds
    )
    return Decoder.from_config(config, layers).plan(derived=partial(_derived, feeds))


def _feeds(config: Mapping[str, Any]) -> Iterator[FeedForward]:
    """Yields the feed-forwards of the layers.

    Every `decoder_sparse_step`th layer has experts, except the layers in `mlp_only_layers`.
    """
    step, dense = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelLoadFailed(f"config.json has mlp_only_layers {dense!r}, must list layers")
    for layer in range(layer_count(config)):
        if layer in dense or (layer + 1) % step:
            yield GatedMLP(integer(config, "hidden_size"), integer(config, "intermediate_size"))
        else:
            yield SoftmaxMoE.from_config(config, normed=False)


def _derived(feeds: tuple[FeedForward, ...], found: StoredTensors) -> Iterator[DerivedWeights]:
    for layer, feed in enumerate(feeds):
        if isinstance(feed, SoftmaxMoE):
            yield from feed.derived(found, f"model.layers.{layer}.mlp")
