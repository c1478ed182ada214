"""Gemma 3's text: windows in most layers, norms on both sides of each part.

Norms are kept less one, and are made whole while loading. A checkpoint that sees pictures, too, has
its text under another name; what sees is left alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.cache_specs import CacheSpec
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
from mlxpool.worker.layers.decoder_layer import DecoderLayer, DecoderLayerFunction, WeightShapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, TensorSpec
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.grouped_query_attention import GroupedQueryAttention
from mlxpool.worker.layers.interface import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.residual import Residual, add_and_norm
from mlxpool.worker.layers.rope import parse_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

# What released files leave out, as their text_config holds only what differs from this.
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
EVERY = 6  # of so many layers the last sees all tokens, unless config.json says otherwise
NAMES = {  # where the text of a model that sees pictures is -> where a text alone has it
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
PICTURES = ("vision_tower.", "multi_modal_projector.")
GREATEST = 65504.0  # that a float16 can be


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """The plan of a text alone, or of the text of a model that sees pictures, too.

    Raises ModelLoadFailed naming the key that cannot be used.
    """
    text = _text(config)
    require(text, "hidden_activation", ["gelu_pytorch_tanh"])
    require(text, "use_bidirectional_attention", [False])
    model = Decoder.of(
        text,
        tuple(_blocks(text)),
        tied=flag(text, "tie_word_embeddings", True),
        embed_scale=_bfloat16(math.sqrt(integer(text, "hidden_size"))),
        cap=_cap(text, "final_logit_softcapping"),
    )
    return model.plan(_ignored, _derived)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelLoadFailed(f"config.json has text_config {text!r}, must be a map")
    outer = {key: config[key] for key in ("vocab_size", "tie_word_embeddings") if key in config}
    said = {key: value for key, value in {**outer, **text}.items() if value is not None}
    return {**DEFAULTS, **said}


def _blocks(text: Mapping[str, Any]) -> Iterator[DecoderLayer]:
    hidden, heads, eps = integer(text, "hidden_size"), Heads.of(text), number(text, "rms_norm_eps")
    feed = GatedMLP(hidden, integer(text, "intermediate_size"), activation=geglu)
    types = _types(text)
    for kind, window in zip(types, layer_windows(text, len(types), types), strict=True):
        attention = GroupedQueryAttention(
            hidden,
            heads,
            _rope(text, kind, heads.size),
            window,
            scale=number(text, "query_pre_attn_scalar") ** -0.5,
            cap=_cap(text, "attn_logit_softcapping"),
            norm_eps=eps,
        )
        yield SandwichNormLayer(hidden, eps, attention, feed)


def _types(text: Mapping[str, Any]) -> tuple[str, ...]:
    layers = layer_count(text)
    every = integer(text, "sliding_window_pattern", integer(text, "_sliding_window_pattern", EVERY))
    types = layer_types(text, layers)
    return types or tuple(SLIDING if (at + 1) % every else FULL for at in range(layers))


def _rope(text: Mapping[str, Any], kind: str, dims: int) -> Rope:
    """Each kind of layer has its own; newer files name them, in older ones windows have a base."""
    named = text.get("rope_parameters") or {}
    if kind in named:
        return parse_rope({**text, "rope_parameters": named[kind]}, dims)
    if kind == SLIDING:
        return Rope(dims, number(text, "rope_local_base_freq"))
    return parse_rope(text, dims)


def _cap(text: Mapping[str, Any], key: str) -> float:
    return number(text, key) if text.get(key) is not None else 0.0


def _bfloat16(value: float) -> float:
    """The nearest number of 8 bits, ties to even: models of this kind were trained with it."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def _ignored(name: str) -> bool:
    return name.removeprefix("model.").startswith(PICTURES)


def _derived(found: StoredTensors) -> Iterator[DerivedWeights]:
    for stored, spec in found.items():
        name = _named(stored)
        if name.endswith("norm.weight") and not _ignored(stored):
            yield DerivedWeights((stored,), {name: TensorSpec("F32", spec.shape)}, _whole)
        elif name != stored:
            yield DerivedWeights((stored,), {name: spec}, tuple)


def _named(stored: str) -> str:
    for prefix, ours in NAMES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored


def _whole(arrays: Sequence[mx.array]) -> list[mx.array]:
    import mlx.core as mx

    return [arrays[0].astype(mx.float32) + 1]


@dataclass(frozen=True, slots=True)
class SandwichNormLayer:
    """A Block (blocks.py): x + norm(mixer(norm(x))), then the same with the feed."""

    hidden: int
    eps: float
    mixer: GroupedQueryAttention
    feed: GatedMLP

    @property
    def cache(self) -> CacheSpec:
        """The mixer's."""
        return self.mixer.cache

    def shapes(self, name: str) -> WeightShapes:
        """See Block."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield f"{name}.pre_feedforward_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")
        yield f"{name}.post_feedforward_layernorm.weight", (self.hidden,)

    def build(self, parts: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """See Block."""
        return _Sandwich(self, parts, name, layer)


class _Sandwich:
    def __init__(self, spec: SandwichNormLayer, parts: LayerBuilder, name: str, layer: int) -> None:
        self.before_mixer = parts.norm(f"{name}.input_layernorm", spec.eps)
        self.mixer = spec.mixer.build(parts, f"{name}.self_attn", layer)
        self.after_mixer = parts.norm(f"{name}.post_attention_layernorm", spec.eps)
        self.before_feed = parts.norm(f"{name}.pre_feedforward_layernorm", spec.eps)
        self.feed = spec.feed.build(parts, f"{name}.mlp")
        self.after_feed = parts.norm(f"{name}.post_feedforward_layernorm", spec.eps)

    def __call__(self, x: Residual, step: ForwardBatch) -> Residual:
        x, asked = add_and_norm(self.before_mixer, x)
        x = _sum(x, self.after_mixer(self.mixer(asked, step)))
        return _sum(x, self.after_feed(self.feed(self.before_feed(x))))


def _sum(x: mx.array, y: mx.array) -> mx.array:
    """x + y, which float16 may be too small for: then the greatest number that is not."""
    import mlx.core as mx

    if x.dtype != mx.float16:
        return x + y
    whole = x.astype(mx.float32) + y.astype(mx.float32)
    return mx.clip(whole, -GREATEST, GREATEST).astype(mx.float16)


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up, with the usual approximation of gelu."""
    import mlx.core as mx

    bend = mx.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))
    return 0.5 * gate * (1 + bend) * up
