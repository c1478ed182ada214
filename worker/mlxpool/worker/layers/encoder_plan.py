"""EncoderPlan: the tensors, head and pooling of an encoder model, read from its config.json.

Also the functions that the files of encoder models share: for layer norms, labels and names of
tensors. MLX is imported only when a layer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import integer
from mlxpool.worker.layers.decoder_layer import WeightShapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, without_prefix
from mlxpool.worker.layers.layer_types import ForwardBatch, LayerBuilder, LayerFunction
from mlxpool.worker.layers.model_plan import ModelPlan

if TYPE_CHECKING:
    import mlx.core as mx

# The pooling method, which makes the vector of a text from the states of the text's tokens.
Pooling: TypeAlias = Literal[
    "cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"
]


@runtime_checkable
class TextBatch(ForwardBatch, Protocol):
    """The batch of an encoder model: whole texts, with the positions and segments [T] of tokens."""

    @property
    def positions(self) -> mx.array: ...

    @property
    def types(self) -> mx.array: ...


def text_batch(batch: ForwardBatch) -> TextBatch:
    """Returns the batch as a TextBatch; encoder models get no other batch."""
    assert isinstance(batch, TextBatch)
    return batch


class EncoderPlan(Struct, frozen=True):
    """A checked config of an encoder model.

    The built model's `hidden_states` returns the states of all tokens. With a head, `logits_of`
    returns the logits [n, labels] of texts, from their pooled states.
    """

    model: ModelPlan
    hidden: int  # the size of a token's state
    causal: bool = False
    labels: int = 0  # the number of the head's logits; 0: no head
    pooling: Pooling = "cls"  # the pooling method of the head


def label_count(config: Mapping[str, Any]) -> int:
    """Returns the number of labels of a model for sequence classification; 0 for other models.

    The architecture's name must end with ForSequenceClassification. Raises ModelLoadFailed if
    num_labels and id2label disagree.
    """
    listed_names = config.get("architectures")
    names = listed_names if isinstance(listed_names, list) else []
    if not any(
        isinstance(architecture, str) and architecture.endswith("ForSequenceClassification")
        for architecture in names
    ):
        return 0
    listed = config.get("id2label")
    count = len(listed) if isinstance(listed, Mapping) else 2  # by default 2; transformers omits it
    if integer(config, "num_labels", count) != count:
        raise ModelLoadFailed(
            f"config.json has num_labels {config['num_labels']}, but {count} labels in id2label"
        )
    return count


def renamed_tensors(
    prefixes: Mapping[str, str],
) -> Callable[[StoredTensors], Iterator[DerivedWeights]]:
    """Returns a function for ModelPlan.derived that replaces prefixes of stored tensor names.

    `prefixes` maps stored prefixes to this project's prefixes.
    """

    def derived(found: StoredTensors) -> Iterator[DerivedWeights]:
        for stored, spec in found.items():
            name = without_prefix(stored, prefixes)
            if name != stored:
                yield DerivedWeights((stored,), {name: spec}, tuple)

    return derived


def layer_norm_shapes(name: str, size: int, bias: bool = True) -> WeightShapes:
    """Yields the names and shapes of a layer norm's tensors."""
    yield f"{name}.weight", (size,)
    if bias:
        yield f"{name}.bias", (size,)


def layer_norm(builder: LayerBuilder, name: str, eps: float, bias: bool = True) -> LayerFunction:
    """Returns a layer norm over the last axis."""
    import mlx.core as mx

    weight = builder.tensor(f"{name}.weight")
    shift = builder.tensor(f"{name}.bias") if bias else None
    return lambda x: mx.fast.layer_norm(x, weight, shift, eps)
