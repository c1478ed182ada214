"""The image encoder of Gemma 3: SigLIP; squares of patches are averaged and projected.

All inputs of an image attend to each other. Checkpoints store the norm's weight minus 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import integer
from mlxpool.worker.layers.decoder_layer import WeightShapes
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    mapped,
    plus_one,
    without_prefix,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder
from mlxpool.worker.layers.model_plan import Model, ModelPlan, VisionPlan
from mlxpool.worker.media.settings import ImagePlaces
from mlxpool.worker.models.vision import siglip
from mlxpool.worker.models.vision.preprocessing import fixed_size
from mlxpool.worker.models.vision.text_part import WithTextPart

if TYPE_CHECKING:
    import mlx.core as mx

PARTS = ("vision_tower.", "multi_modal_projector.")
PREFIXES = {  # names of older and newer checkpoints -> our names
    "model.vision_tower.vision_model.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
PATCHES = "vision_tower.embeddings.patch_embedding.weight"
NORM = "multi_modal_projector.mm_soft_emb_norm"
PROJECTION = "multi_modal_projector.mm_input_projection_weight"
TOKENS = {"boi_token_index": 255_999, "image_token_index": 262_144, "eoi_token_index": 256_000}


def vision_plan(config: Mapping[str, Any], text: ModelPlan, hidden: int) -> VisionPlan:
    """Returns the plan of the image encoder for a text part with the hidden size `hidden`.

    Raises ModelLoadFailed with the unusable key.
    """
    encoder = ImageEncoder.from_config(config, hidden)
    tokens = tuple(integer(config, key, default) for key, default in TOKENS.items())
    whole = replace(
        text,
        shapes={**text.shapes, **dict(encoder.shapes())},
        ignored=lambda name: text.ignored(name) and _is_unused(name),
        build=lambda builder: SeeingGemma(text.build(builder), encoder, builder),
        derived=lambda found: chain(text.derived(found), _derived(found)),
    )

    def places(texts: Mapping[int, str]) -> ImagePlaces:
        begin, slot, end = (texts[token] for token in tokens)
        written = f"\n\n{begin}{slot}{end}\n\n"
        return ImagePlaces(begin, written, written, slot, tokens[1], group=True)

    tower = encoder.tower
    return VisionPlan(
        whole,
        tower.layers,
        is_part,
        lambda found: fixed_size(found, tower.side, tower.patch, encoder.merge),
        tokens,
        places,
    )


def is_part(name: str) -> bool:
    """Returns whether a stored tensor belongs to the image encoder."""
    return name.removeprefix("model.").startswith(PARTS)


def _is_unused(name: str) -> bool:
    """Returns True for a stored tensor that the image encoder does not use."""
    return not is_part(name) or without_prefix(name, PREFIXES).startswith(siglip.UNUSED)


def _derived(found: StoredTensors) -> Iterator[DerivedWeights]:
    for stored, spec in found.items():
        name = without_prefix(stored, PREFIXES)
        if name == PATCHES and len(spec.shape) == 4:
            yield from siglip.patch_weights(stored, name, spec)
        elif name == f"{NORM}.weight":
            weights = mapped({name: spec}, name, plus_one)
            yield replace(weights, sources=(stored,))
        elif name != stored and is_part(stored):
            yield DerivedWeights((stored,), {name: spec}, tuple)


class ImageEncoder(Struct, frozen=True):
    """The hyperparameters of the encoder: the SigLIP tower, and the projection of its patches.

    `merge` * `merge` patches become one input with `hidden` numbers.
    """

    tower: siglip.Siglip
    merge: int
    hidden: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden: int) -> ImageEncoder:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        vision = config["vision_config"]
        if not isinstance(vision, Mapping):
            raise ModelLoadFailed(f"config.json has vision_config {vision!r:.60}, must be a map")
        tower = siglip.Siglip.from_config(vision)
        inputs = integer(config, "mm_tokens_per_image", 256)
        side = math.isqrt(inputs)
        if side * side != inputs or tower.rows % side:
            raise ModelLoadFailed(
                f"config.json has mm_tokens_per_image {inputs}, must be a square whose side divides"
                f" the {tower.rows} patches of a side"
            )
        return cls(tower, tower.rows // side, hidden)

    def shapes(self) -> WeightShapes:
        """Yields the name and shape of every tensor, in the order of use."""
        yield from self.tower.shapes()
        yield f"{NORM}.weight", (self.tower.hidden,)
        yield PROJECTION, (self.tower.hidden, self.hidden)


class SeeingGemma(WithTextPart):
    """Gemma 3 with an image encoder and its weights; implements model_plan.SeeingModel."""

    def __init__(self, text: Model, spec: ImageEncoder, builder: LayerBuilder) -> None:
        super().__init__(text)
        self.spec = spec
        self.tower = spec.tower.build(builder)
        self.norm = builder.rms_norm(NORM, spec.tower.eps)
        self.projection = builder.tensor(PROJECTION)

    def encode_image(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch
    ) -> mx.array:
        """Returns the features [1, count, d] of an image; see model_plan.SeeingModel."""
        merge, side = self.spec.merge, self.spec.tower.rows // self.spec.merge
        squares = self.tower(pixels, batch).reshape(side, merge, side, merge, -1)
        pooled = squares.mean(axis=(1, 3)).reshape(side * side, -1)
        return (self.norm(pooled) @ self.projection)[None]
