"""Llama 3.2 Vision: a Llama in which some layers attend to images instead of earlier tokens.

An image is one token of the text. The keys and values of an image for these layers are outside the
KV cache and are the same in every conversation. A token attends to the last images before it. If no
image precedes a token, these layers do not change the token, as in Meta's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.attention import GroupedQueryAttention
from mlxpool.worker.layers.config_fields import (
    Heads,
    flag,
    integer,
    layer_count,
    number,
    require,
    text_config,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import DecoderLayer, PreNormLayer
from mlxpool.worker.layers.encoder_plan import renamed_tensors
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder
from mlxpool.worker.layers.model_plan import Model, ModelPlan, VisionPlan
from mlxpool.worker.layers.rope import parse_rope
from mlxpool.worker.media.settings import ImagePlaces
from mlxpool.worker.models.vision import mllama as images
from mlxpool.worker.models.vision.cross_attention import CrossAttentionLayer, ImageKeysValues
from mlxpool.worker.models.vision.mllama import TiledEncoder
from mlxpool.worker.models.vision.preprocessing import tiled
from mlxpool.worker.models.vision.text_part import WithTextPart

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {  # stored prefix -> our prefix
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
INPUT_ONLY = 8  # tokens after the vocabulary with an embedding; one is the image token
IMAGE_TOKEN = 128_256
CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the text part, with an image encoder if config.json has one.

    Raises ModelLoadFailed with the unusable key.
    """
    text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text_config(config)}
    text.setdefault("rms_norm_eps", 1e-5)
    require(text, "hidden_act", ["silu"])
    layers = tuple(_layers(text))
    decoder = Decoder.from_config(
        text, layers, tied=flag(text, "tie_word_embeddings"), input_only=INPUT_ONLY
    )
    text_plan = decoder.plan(images.is_part, renamed_tensors(PREFIXES))
    if config.get("vision_config") is None:
        return text_plan
    return replace(
        text_plan, vision=_vision(config, text_plan, layers, integer(text, "hidden_size"))
    )


def _layers(text: Mapping[str, Any]) -> Iterator[DecoderLayer]:
    hidden, heads = integer(text, "hidden_size"), Heads.from_config(text)
    feed, eps = GatedMLP(hidden, integer(text, "intermediate_size")), number(text, "rms_norm_eps")
    attention = GroupedQueryAttention(hidden, heads, parse_rope(text, heads.dim))
    own = PreNormLayer(hidden, eps, attention, feed)
    crossed = CrossAttentionLayer(hidden, heads, eps, feed)
    count = layer_count(text)
    crossing = _crossing(text, count)
    return (crossed if layer in crossing else own for layer in range(count))


def _crossing(text: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Returns the layers of cross-attention to images.

    Raises ModelLoadFailed if config.json names a layer twice, the last layer or no valid layer.
    """
    value = text.get("cross_attention_layers")
    layers = list(CROSS_LAYERS) if value is None else value
    sound = isinstance(layers, list) and all(
        type(layer) is int and 0 <= layer < count - 1 for layer in layers
    )
    if not sound or not layers or len(set(layers)) != len(layers):
        raise ModelLoadFailed(
            f"config.json has cross_attention_layers {value!r:.80}, must be different layers below"
            f" {count - 1}: the last of {count} reads tokens",
            details={"key": "cross_attention_layers"},
        )
    return tuple(layers)


def _vision(
    config: Mapping[str, Any], text: ModelPlan, layers: tuple[DecoderLayer, ...], hidden: int
) -> VisionPlan:
    encoder = TiledEncoder.from_config(config["vision_config"], hidden)
    token = integer(config, "image_token_index", IMAGE_TOKEN)
    rows = text.vocab_size + INPUT_ONLY
    if token >= rows:
        raise ModelLoadFailed(f"config.json has image_token_index {token}, must be below {rows}")
    whole = replace(
        text,
        shapes={**text.shapes, **dict(encoder.shapes())},
        ignored=lambda name: text.ignored(name) and not images.is_part(name),
        build=lambda builder: SeeingLlama(text.build(builder), encoder, layers, builder),
        derived=lambda found: chain(text.derived(found), images.derived(found)),
    )

    def places(texts: Mapping[int, str]) -> ImagePlaces:
        slot = texts[token]
        return ImagePlaces(slot, slot, slot, slot, token, group=False, crossed=True)

    return VisionPlan(
        whole,
        encoder.layers,
        images.is_part,
        lambda found: tiled(found, encoder.side, encoder.patch, encoder.tiles),
        (token,),
        places,
        crossed=True,
        encoder_tokens=encoder.tokens,
    )


class SeeingLlama(WithTextPart):
    """Llama 3.2 Vision with its weights; implements model_plan.SeeingModel."""

    def __init__(
        self,
        text: Model,
        encoder: TiledEncoder,
        layers: tuple[DecoderLayer, ...],
        builder: LayerBuilder,
    ) -> None:
        super().__init__(text)
        self.encoder = encoder.build(builder)
        self.readers = [
            ImageKeysValues(layer, builder, f"model.layers.{index}")
            for index, layer in enumerate(layers)
            if isinstance(layer, CrossAttentionLayer)
        ]

    def encode_image(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch
    ) -> mx.array:
        """Returns the image's keys and values in all layers of cross-attention.

        See model_plan.SeeingModel.
        """
        import mlx.core as mx

        states = self.encoder(pixels, grid, batch)
        return mx.stack(list(chain.from_iterable(reader(states) for reader in self.readers)))
