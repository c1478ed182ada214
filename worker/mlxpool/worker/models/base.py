"""What a model is to the rest of the worker, and what a model file may use. No MLX at run time.

A model file is read in two ways: `plan` tells, without MLX, which tensors the weights must have;
`Plan.build` makes the model of loaded weights, through `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.models.derived import Derived, Found, nothing

if TYPE_CHECKING:
    import mlx.core as mx

Shape: TypeAlias = tuple[int, ...]
Layer: TypeAlias = "Callable[[mx.array], mx.array]"
Activation: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"  # gate, up


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates queries and keys; `freqs`, where given, stand for `base`."""

    dims: int
    base: float
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None  # radians per turn of the angle: 1 / frequency
    traditional: bool = False


class Step(Protocol):
    """The one token axis of a step, see attention.py."""

    @property
    def logits(self) -> bool: ...

    def wanted(self, x: mx.array) -> mx.array: ...

    def rope(self, x: mx.array, rope: Rope) -> mx.array: ...

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array: ...


class Embedding(Protocol):
    """A token table that is also a head for tied models."""

    def __call__(self, tokens: mx.array) -> mx.array: ...

    def as_linear(self, x: mx.array) -> mx.array: ...


class Heads(Protocol):
    """A linear layer for each head: x [H, T, in] -> [H, T, out], and `back` the other way."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def back(self, x: mx.array) -> mx.array: ...


class Experts(Protocol):
    """x [T, in] with the experts [T, k] that each token chose -> [T, k, out].

    Those of `Parts.experts` take x [T, k, in] as well.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array: ...


class Parts(Protocol):
    """Layers over named weights; what layout a weight has is known here and nowhere else."""

    def linear(self, name: str) -> Layer: ...

    def joined(self, names: Sequence[str]) -> Layer: ...

    def norm(self, name: str, eps: float) -> Layer: ...

    def embedding(self, name: str) -> Embedding: ...

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array: ...

    def array(self, name: str) -> mx.array: ...

    def heads(self, name: str) -> Heads: ...

    def experts(self, name: str) -> Experts: ...

    def expert_mlp(self, name: str, activation: Activation | None = None) -> Experts: ...


class Model(Protocol):
    """A built model.

    Called with tokens [T] and their step it returns logits [R, vocabulary], one line for each row,
    or x [T, d] when the step wants none.
    """

    def __call__(self, tokens: mx.array, step: Step) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked config: everything about a model that needs no weights.

    `shapes` are those of the weights as numbers, also where a checkpoint has them quantised. Where
    its names or layout differ, `derived` says how to make them, see derived.py.
    """

    context: int  # tokens
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    shapes: Mapping[str, Shape]  # every tensor the weights must have, in the order of use
    ignored: Callable[[str], bool]  # tensors that may be there and are not used
    build: Callable[[Parts], Model]
    derived: Callable[[Found], Iterable[Derived]] = nothing
    float32: Callable[[str], bool] = lambda name: False  # tensors kept so, whatever the others are


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0 of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelLoadFailed(f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadFailed(f"config.json has {key!r}: {value!r}, must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelLoadFailed(f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelLoadFailed(f"config.json has {key!r}: {value!r}, must be a number above 0")
    return float(value)
