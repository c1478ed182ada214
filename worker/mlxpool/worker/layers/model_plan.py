"""A model's plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mlxpool.worker.layers.cache_specs import (
    CacheSpec,
)
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, no_derived_weights
from mlxpool.worker.layers.interface import (
    ForwardBatch,
    LayerBuilder,
    Shape,
)

if TYPE_CHECKING:
    import mlx.core as mx


class Model(Protocol):
    """A built model.

    Called with tokens [T] and their step it returns logits [R, vocabulary], one line for each row,
    or x [T, d] when the step wants none.
    """

    def __call__(self, tokens: mx.array, step: ForwardBatch) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A checked config: everything about a model that needs no weights.

    `shapes` are those of the weights as numbers, also where a checkpoint has them quantised. Where
    its names or layout differ, `derived` says how to make them, see derived.py.
    """

    context: int  # tokens
    vocab_size: int
    caches: tuple[CacheSpec, ...]  # what each layer keeps of a sequence
    shapes: Mapping[str, Shape]  # every tensor the weights must have, in the order of use
    ignored: Callable[[str], bool]  # tensors that may be there and are not used
    build: Callable[[LayerBuilder], Model]
    derived: Callable[[StoredTensors], Iterable[DerivedWeights]] = no_derived_weights
    float32: Callable[[str], bool] = lambda name: False  # tensors kept so, whatever the others are
