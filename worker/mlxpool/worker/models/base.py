"""What a model is to the rest of the worker, and what a model file may use. No MLX at run time.

A model file is read in two ways: `plan` tells, without MLX, which tensors the weights must have;
`Plan.build` makes the model of loaded weights, through `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mlxpool.common.errors import ModelLoadFailed

if TYPE_CHECKING:
    import mlx.core as mx

Shape: TypeAlias = tuple[int, ...]
Layer: TypeAlias = "Callable[[mx.array], mx.array]"


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


class Parts(Protocol):
    """Layers over named weights; what layout a weight has is known here and nowhere else."""

    def linear(self, name: str) -> Layer: ...

    def joined(self, names: Sequence[str]) -> Layer: ...

    def norm(self, name: str, eps: float) -> Layer: ...

    def embedding(self, name: str) -> Embedding: ...

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array: ...


class Model(Protocol):
    """A built model.

    Called with tokens [T] and their step it returns logits [R, vocabulary], one line for each row,
    or x [T, d] when the step wants none.
    """

    def __call__(self, tokens: mx.array, step: Step) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked config: everything about a model that needs no weights."""

    context: int  # tokens
    vocab_size: int
    layers: int
    kv_heads: int
    head_dim: int
    shapes: Mapping[str, Shape]  # every tensor the weights must have, in the order of use
    ignored: Callable[[str], bool]  # tensors that may be there and are not used
    build: Callable[[Parts], Model]


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number above 0 of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a number above 0")
    return float(value)


def _unusable(key: str, why: str) -> ModelLoadFailed:
    """With the key in its details: whoever looks for all faults goes on behind it."""
    return ModelLoadFailed(why, details={"key": key})
