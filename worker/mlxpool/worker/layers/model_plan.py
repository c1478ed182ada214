"""The plan of a model: everything that follows from its config.json, without weights or MLX."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from mlxpool.worker.caches.specs import CacheSpec
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    no_derived_weights,
)
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, Shape
from mlxpool.worker.media.settings import ImagePlaces, ImageSettings

if TYPE_CHECKING:
    import mlx.core as mx


class Model(Protocol):
    """A built model.

    Called with tokens [T] and their batch it returns logits [E, vocabulary] of the tokens that the
    batch selects, or an array to evaluate where it wants no logits.
    """

    def __call__(self, tokens: mx.array, batch: ForwardBatch, /) -> mx.array: ...

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch, /) -> mx.array:
        """Returns states [E, d] of the tokens that the batch selects, after the last norm."""

    def logits_of(self, hidden: mx.array, /) -> mx.array:
        """Returns logits [E, vocabulary] of hidden states [E, d]."""


class Prediction(Protocol):
    """The built head of a model that predicts further tokens (MTP), see layers/decoder.py."""

    def __call__(
        self, tokens: mx.array, states: mx.array, batch: ForwardBatch | None, /
    ) -> mx.array:
        """Tokens [T] and the states [T, d] of those before them -> states [E, d].

        These are of the tokens that the batch selects; its only layer is the head's. None: of all
        tokens, by a head that has no cache.
        """

    def logits_of(self, states: mx.array, /) -> mx.array:
        """Returns logits [E, vocabulary] of states [E, d] that the head gave.

        They are fewer where the head drafts a part of the vocabulary.
        """

    def likeliest(self, states: mx.array, /) -> mx.array:
        """Returns the likeliest tokens [E] of such states."""


class PredictingModel(Model, Protocol):
    """A built model whose plan `predicts`."""

    @property
    def prediction(self) -> Prediction: ...


class SeeingModel(Model, Protocol):
    """A built model that reads images."""

    def encode_image(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch, /
    ) -> mx.array:
        """Returns the features of an image, see ForwardBatch.

        They are [1 + L, count, d]: the first ones are for `with_images`, those behind it for
        `add_images` in L layers. Where images are crossed they are [2 * C, KV, n, D]: keys and
        values of C layers, by turns, for `attend_images`.

        `pixels` [height, width, 3] are normalised. `batch` has the image's patches as tokens of one
        text that attends both ways.
        """


class ModelPlan(Struct, frozen=True):
    """A checked config: which tensors the weights must have, and how to build the model of them.

    `shapes` are those of the unquantised weights, also where a checkpoint is quantised. Where a
    checkpoint has other names or layouts, `derived` says how to make the weights, see
    derived_weights.py.
    """

    context: int  # tokens
    vocab_size: int
    caches: tuple[CacheSpec, ...]  # what each layer keeps of a sequence
    shapes: Mapping[str, Shape]  # every tensor the weights must have, in the order of use
    ignored: Callable[[str], bool]  # whether a tensor of this name may exist without being used
    build: Callable[[LayerBuilder], Model]
    derived: Callable[[StoredTensors], Iterable[DerivedWeights]] = no_derived_weights
    float32: Callable[[str], bool] = lambda name: False  # tensors that stay float32 in any model
    layers: int = 0  # all of them; 0: as many as `caches`
    input_only: int = 0  # tokens behind the vocabulary that are inputs and never drawn
    vision: VisionPlan | None = None  # of the whole model, where this is its text part
    prediction: PredictionPlan | None = None  # where this is the model without its head
    predicts: bool = False  # whether this is the model with its head
    prediction_cache: CacheSpec | None = None  # what the head keeps of a sequence; None: nothing
    built: int = 0  # numbers that `build` makes of the weights and keeps beside them

    @property
    def embedding_rows(self) -> int:
        """The token ids that have an embedding are below."""
        return self.vocab_size + self.input_only


class PredictionPlan(Struct, frozen=True):
    """The head of a model that predicts further tokens (MTP), see layers/decoder.py.

    A checkpoint may have it or lack it. `tensors` says how its tensors are named, for operators.
    `whole` is the plan of the model with it, for a checkpoint that stores these names.
    """

    is_part: Callable[[str], bool]  # whether a stored tensor is of the head
    whole: Callable[[Collection[str]], ModelPlan]
    tensors: str


class VisionPlan(Struct, frozen=True):
    """The image encoder of a model, which a checkpoint may have or lack.

    `whole` is the plan of the model with it. `settings` reads preprocessor_config.json and raises
    ModelLoadFailed. `tokens`: ids of the tokens that name images, whose texts `places` is given.
    `grid_positions`: inputs have three positions, see media/spans.py. `crossed`: inputs attend
    to images in layers of their own, see MediaSpan; else features replace the inputs of an image.
    `encoder_tokens` gives the tokens of an image with some grid in the encoder, and how many behind
    them are padding, see PackedBatch.
    """

    whole: ModelPlan
    layers: int  # of the encoder
    is_part: Callable[[str], bool]  # whether a stored tensor is of the encoder
    settings: Callable[[Mapping[str, Any]], ImageSettings]
    tokens: tuple[int, ...]
    places: Callable[[Mapping[int, str]], ImagePlaces]
    grid_positions: bool = False
    crossed: bool = False
    encoder_tokens: Callable[[tuple[int, int, int]], tuple[int, int]] = lambda grid: (
        math.prod(grid),
        0,
    )
