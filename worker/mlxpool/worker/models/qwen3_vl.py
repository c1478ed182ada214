"""Qwen3-VL: Qwen3 with three positions for each input, and images of any proportions.

Image tokens have rows and columns as positions. The outputs of some layers of the image encoder are
added to the outputs of the text part's first layers, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import (
    MAX_MODULES,
    Heads,
    flag,
    integer,
    number,
    require,
    text_config,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.decoder_layer import PreNormLayer
from mlxpool.worker.layers.encoder_plan import renamed_tensors
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, Rope
from mlxpool.worker.layers.model_plan import Model, ModelPlan, VisionPlan
from mlxpool.worker.media.settings import ImagePlaces
from mlxpool.worker.models import qwen3
from mlxpool.worker.models.vision import qwen3_vl as images
from mlxpool.worker.models.vision.preprocessing import free_size
from mlxpool.worker.models.vision.qwen3_vl import QwenTower
from mlxpool.worker.models.vision.text_part import WithTextPart

if TYPE_CHECKING:
    import mlx.core as mx

PREFIXES = {  # stored prefix -> our prefix
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
SECTIONS = (24, 20, 20)  # default pairs of dimensions in time, height and width
TOKENS = {
    "vision_start_token_id": 151_652,
    "image_token_id": 151_655,
    "vision_end_token_id": 151_653,
}


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the text part, with an image encoder if config.json has one.

    Raises ModelLoadFailed with the unusable key.
    """
    text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text_config(config)}
    text.setdefault("rms_norm_eps", 1e-6)
    require(text, "hidden_act", ["silu"])
    hidden, eps = integer(text, "hidden_size"), number(text, "rms_norm_eps")
    heads = Heads.from_config(text, dim=qwen3.HEAD_DIM)
    attention = qwen3.attention(text, heads, 0)
    attention = replace(attention, rope=_rope(text, attention.rope))
    feed = GatedMLP(hidden, integer(text, "intermediate_size"))
    count = integer(text, "num_hidden_layers", maximum=MAX_MODULES)
    decoder = Decoder.from_config(
        text,
        (PreNormLayer(hidden, eps, attention, feed),) * count,
        tied=flag(text, "tie_word_embeddings"),
    )
    text_plan = decoder.plan(images.is_part, renamed_tensors(PREFIXES))
    if config.get("vision_config") is None:
        return text_plan
    return replace(text_plan, vision=_vision(config, text_plan, hidden, count))


def _rope(text: Mapping[str, Any], rope: Rope) -> Rope:
    """Returns the RoPE with an axis (time, height or width) for each pair of dimensions.

    The axes alternate (time, height, width, time, ...) up to the counts in `mrope_section`.
    """
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = scaling.get("mrope_section") or list(SECTIONS)
    pairs = rope.dims // 2
    sound = isinstance(sections, list) and len(sections) == 3
    if not sound or any(type(count) is not int or count < 0 for count in sections):
        raise ModelLoadFailed(f"config.json has mrope_section {sections!r:.60}, must be 3 numbers")
    if sum(sections) != pairs or 3 * max(sections[1:]) > pairs + 2:
        raise ModelLoadFailed(
            f"config.json has mrope_section {sections}, must have the sum {pairs}, and its last two"
            f" numbers at most {(pairs + 2) // 3}"
        )
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return replace(rope, axes=tuple(axes))


def _vision(config: Mapping[str, Any], text: ModelPlan, hidden: int, layers: int) -> VisionPlan:
    tower = QwenTower.from_config(config["vision_config"], hidden)
    if len(tower.deep) >= layers:
        raise ModelLoadFailed(
            f"config.json has deepstack_visual_indexes {list(tower.deep)}, which must be fewer than"
            f" the {layers} layers of the text part"
        )
    tokens = tuple(integer(config, key, default) for key, default in TOKENS.items())
    whole = replace(
        text,
        shapes={**text.shapes, **dict(tower.shapes())},
        ignored=lambda name: text.ignored(name) and not images.is_part(name),
        build=lambda builder: SeeingQwen(text.build(builder), tower, builder),
        derived=lambda found: chain(text.derived(found), images.derived(found)),
    )

    def places(texts: Mapping[int, str]) -> ImagePlaces:
        begin, slot, end = (texts[token] for token in tokens)
        return ImagePlaces(slot, slot, begin + slot + end, slot, tokens[1], group=False)

    return VisionPlan(
        whole,
        tower.layers,
        images.is_part,
        lambda found: free_size(found, tower.patch, tower.merge),
        tokens,
        places,
        grid_positions=True,
    )


class SeeingQwen(WithTextPart):
    """Qwen3-VL with its weights; implements model_plan.SeeingModel."""

    def __init__(self, text: Model, tower: QwenTower, builder: LayerBuilder) -> None:
        super().__init__(text)
        self.tower = tower.build(builder)

    def encode_image(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch
    ) -> mx.array:
        """Returns the image's features for the inputs and for some layers' outputs.

        See model_plan.SeeingModel.
        """
        return self.tower(pixels, grid, batch)
