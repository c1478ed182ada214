"""Gemma 3: sliding windows in most layers, norms before and after each sublayer.

Checkpoints store norm weights minus 1; loading adds 1. A multimodal checkpoint has other names for
the tensors of the text part; its image encoder is in vision/gemma3.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.caches.specs import CacheSpec
from mlxpool.worker.layers.activations import gelu_tanh
from mlxpool.worker.layers.attention import GroupedQueryAttention
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
    text_config,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    DecoderLayerFunction,
    Residual,
    WeightShapes,
    add_and_norm,
)
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    TensorSpec,
    plus_one,
    without_prefix,
)
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.rope import parse_rope
from mlxpool.worker.models.vision import gemma3 as images

if TYPE_CHECKING:
    import mlx.core as mx

# Released files omit these keys: their text_config has only values that differ from the defaults.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
}
FULL_INTERVAL = 6  # by default every 6th layer has full attention
PREFIXES = {  # names of a multimodal checkpoint -> names of a text model
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
FLOAT16_MAX = 65504.0


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of a text model, or of the text part of a multimodal model.

    Raises ModelLoadFailed with the unusable key.
    """
    text = _text(config)
    require(text, "hidden_activation", ["gelu_pytorch_tanh"])
    require(text, "use_bidirectional_attention", [False])
    model = Decoder.from_config(
        text,
        tuple(_layers(text)),
        tied=flag(text, "tie_word_embeddings", True),
        embed_scale=_bfloat16(math.sqrt(integer(text, "hidden_size"))),
        softcap=_softcap(text, "final_logit_softcapping"),
    )
    text_plan = model.plan(images.is_part, _derived)
    if config.get("vision_config") is None:
        return text_plan
    vision = images.vision_plan(config, text_plan, integer(text, "hidden_size"))
    return replace(text_plan, vision=vision)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = text_config(config)
    outer = {key: config[key] for key in ("vocab_size", "tie_word_embeddings") if key in config}
    values = {key: value for key, value in {**outer, **text}.items() if value is not None}
    return {**DEFAULTS, **values}


def _layers(text: Mapping[str, Any]) -> Iterator[DecoderLayer]:
    hidden, heads = integer(text, "hidden_size"), Heads.from_config(text)
    eps = number(text, "rms_norm_eps")
    feed = GatedMLP(hidden, integer(text, "intermediate_size"), activation=geglu)
    types = _types(text)
    for kind, window in zip(types, layer_windows(text, len(types), types), strict=True):
        attention = GroupedQueryAttention(
            hidden,
            heads,
            _rope(text, kind, heads.dim),
            window,
            scale=number(text, "query_pre_attn_scalar") ** -0.5,
            softcap=_softcap(text, "attn_logit_softcapping"),
            norm_eps=eps,
        )
        yield SandwichNormLayer(hidden, eps, attention, feed)


def _types(text: Mapping[str, Any]) -> tuple[str, ...]:
    layers = layer_count(text)
    default = integer(text, "_sliding_window_pattern", FULL_INTERVAL)
    interval = integer(text, "sliding_window_pattern", default)
    types = layer_types(text, layers)
    return types or tuple(SLIDING if (at + 1) % interval else FULL for at in range(layers))


def _rope(text: Mapping[str, Any], kind: str, dims: int) -> Rope:
    """Returns the RoPE of the layers of type `kind`.

    Older config files have a separate RoPE base only for windowed layers.
    """
    named = text.get("rope_parameters") or {}
    if kind in named:
        return parse_rope({**text, "rope_parameters": named[kind]}, dims)
    if kind == SLIDING:
        return Rope(dims, number(text, "rope_local_base_freq"))
    return parse_rope(text, dims)


def _softcap(text: Mapping[str, Any], key: str) -> float:
    return number(text, key) if text.get(key) is not None else 0.0


def _bfloat16(value: float) -> float:
    """Returns the value rounded to bfloat16, ties to even, as in the training of the models."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def _derived(found: StoredTensors) -> Iterator[DerivedWeights]:
    for stored, spec in found.items():
        name = without_prefix(stored, PREFIXES)
        if name.endswith("norm.weight") and not images.is_part(stored):
            yield DerivedWeights(
                (stored,),
                {name: TensorSpec("F32", spec.shape)},
                lambda arrays: [plus_one(arrays[0])],
            )
        elif name != stored:
            yield DerivedWeights((stored,), {name: spec}, tuple)


class SandwichNormLayer(Struct, frozen=True):
    """A DecoderLayer: x + norm(mixer(norm(x))), then likewise with the feed-forward."""

    hidden: int
    eps: float
    mixer: GroupedQueryAttention
    feed: GatedMLP

    @property
    def cache(self) -> CacheSpec:
        """The mixer's cache."""
        return self.mixer.cache

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield f"{name}.pre_feedforward_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")
        yield f"{name}.post_feedforward_layernorm.weight", (self.hidden,)

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """Builds the layer over the builder's weights, whose names begin with `name`."""
        return _Sandwich(self, builder, name, layer)


class _Sandwich:
    def __init__(
        self, spec: SandwichNormLayer, builder: LayerBuilder, name: str, layer: int
    ) -> None:
        self.layer = layer
        self.before_mixer = builder.rms_norm(f"{name}.input_layernorm", spec.eps)
        self.mixer = spec.mixer.build(builder, f"{name}.self_attn", layer)
        self.after_mixer = builder.rms_norm(f"{name}.post_attention_layernorm", spec.eps)
        self.before_feed = builder.rms_norm(f"{name}.pre_feedforward_layernorm", spec.eps)
        self.feed = spec.feed.build(builder, f"{name}.mlp")
        self.after_feed = builder.rms_norm(f"{name}.post_feedforward_layernorm", spec.eps)

    def __call__(self, x: Residual, batch: ForwardBatch) -> Residual:
        x, normed = add_and_norm(self.before_mixer, x)
        mixed = self.after_mixer(self.mixer(normed, batch))
        x = _clipped_sum(batch.lines_after(self.layer, x), mixed)
        return _clipped_sum(x, self.after_feed(self.feed(self.before_feed(x))))


def _clipped_sum(x: mx.array, y: mx.array) -> mx.array:
    """Returns x + y, clipped to the range of float16 if that is its dtype."""
    import mlx.core as mx

    if x.dtype != mx.float16:
        return x + y
    total = x.astype(mx.float32) + y.astype(mx.float32)
    return mx.clip(total, -FLOAT16_MAX, FLOAT16_MAX).astype(mx.float16)


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """Returns gelu(gate) * up, with the tanh approximation of gelu."""
    return gelu_tanh(gate) * up
