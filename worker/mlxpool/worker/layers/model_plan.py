"""The plan of a model: everything that follows from its config.json. No weights, no MLX."""

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

    A call with tokens [T] and their batch returns logits [E, vocabulary] of the tokens that the
    batch selects. If the batch wants no logits, the call returns any array to evaluate.
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
        """Returns states [E, d] of the tokens that the batch selects.

        `tokens` [T]; `states` [T, d]: the states of the preceding tokens. `batch`: its only layer
        is the head's layer; None: all tokens are selected, and the head must have no cache.
        """

    def logits_of(self, states: mx.array, /) -> mx.array:
        """Returns logits [E, vocabulary] of states [E, d] of the head.

        If the head drafts only a part of the vocabulary, the logits are of this part.
        """

    def likeliest(self, states: mx.array, /) -> mx.array:
        """Returns the likeliest tokens [E] of states [E, d] of the head."""


class PredictingModel(Model, Protocol):
    """A built model with the head that predicts further tokens."""

    @property
    def prediction(self) -> Prediction: ...


class SeeingModel(Model, Protocol):
    """A built model that reads images."""

    def encode_image(
        self, pixels: mx.array, grid: tuple[int, int, int], batch: ForwardBatch, /
    ) -> mx.array:
        """Returns the features of an image, see ForwardBatch.

        Features are [1 + L, count, d]: the first for `with_images`, the others for `add_images` in
        L layers. For cross-attention, features are [2 * C, KV, n, D], for `attend_images`: keys and
        values of C layers, alternating.

        `pixels` [height, width, 3] are normalised. `batch` has the image's patches as tokens of one
        text, in which all tokens attend to each other.
        """


class ModelPlan(Struct, frozen=True):
    """A checked config: the tensors that the weights must have, and the model's construction.

    `shapes` are the shapes of unquantised weights, even if a checkpoint is quantised. If a
    checkpoint has other names or layouts, `derived` makes the weights, see derived_weights.py.
    """

    context: int  # tokens
    vocab_size: int
    caches: tuple[CacheSpec, ...]  # the cache of a sequence in each layer
    shapes: Mapping[str, Shape]  # every tensor that the weights must have, in the order of use
    ignored: Callable[[str], bool]  # True if a tensor of this name may exist but is not used
    build: Callable[[LayerBuilder], Model]
    derived: Callable[[StoredTensors], Iterable[DerivedWeights]] = no_derived_weights
    float32: Callable[[str], bool] = lambda name: False  # tensors that stay float32 in any model
    layers: int = 0  # the number of all layers; 0: the number of `caches`
    input_only: int = 0  # the number of input-only tokens after the vocabulary
    vision: VisionPlan | None = None  # the image encoder, if this plan is of the text part
    prediction: PredictionPlan | None = None  # the draft head, if this plan is without the head
    predicts: bool = False  # this plan includes the head
    prediction_cache: CacheSpec | None = None  # the head's cache of a sequence; None: no cache
    built: int = 0  # how many numbers `build` computes from the weights and stores

    @property
    def embedding_rows(self) -> int:
        """The number of token ids with an embedding."""
        return self.vocab_size + self.input_only


class PredictionPlan(Struct, frozen=True):
    """The head of a model that predicts further tokens (MTP), see layers/decoder.py.

    A checkpoint may have the head or lack it. `tensors` describes the head's tensor names, for
    operators. `whole` gets the tensor names of a checkpoint, and returns the plan of the model with
    the head.
    """

    is_part: Callable[[str], bool]  # True if a stored tensor belongs to the head
    whole: Callable[[Collection[str]], ModelPlan]
    tensors: str


class VisionPlan(Struct, frozen=True):
    """The image encoder of a model, which a checkpoint may have or lack.

    `whole` is the plan of the model with the encoder. `settings` reads preprocessor_config.json and
    raises ModelLoadFailed for values that the encoder does not support. `tokens`: the ids of the
    placeholder tokens of images. `places` gets a map from these ids to the texts of the tokens, and
    returns the texts that a prompt has for an image. `grid_positions`: inputs have three positions,
    see media/spans.py. `crossed`: inputs attend to images in layers of cross-attention, see
    MediaSpan; otherwise features replace the inputs of an image. `encoder_tokens` returns the
    numbers of encoder tokens and of padding tokens for an image with a grid, see PackedBatch.
    """

    whole: ModelPlan
    layers: int  # the number of the encoder's layers
    is_part: Callable[[str], bool]  # True if a stored tensor belongs to the encoder
    settings: Callable[[Mapping[str, Any]], ImageSettings]
    tokens: tuple[int, ...]
    places: Callable[[Mapping[int, str]], ImagePlaces]
    grid_positions: bool = False
    crossed: bool = False
    encoder_tokens: Callable[[tuple[int, int, int]], tuple[int, int]] = lambda grid: (
        math.prod(grid),
        0,
    )
