"""What a model is to the rest of the worker, and what a model file may use. No MLX at run time.

A model file is read in two ways: `plan` tells, without MLX, which tensors the weights must have;
`Plan.build` makes the model of loaded weights, through `Parts`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.derived_weights import Derived, Found, nothing

if TYPE_CHECKING:
    import mlx.core as mx

Shape: TypeAlias = tuple[int, ...]
Layer: TypeAlias = "Callable[[mx.array], mx.array]"
Activation: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"  # gate, up
State: TypeAlias = "tuple[mx.array, ...]"
# Inputs [B, n, ...] and state [B, ...] of B rows -> outputs [B, n, ...] and the state after them.
Scan: TypeAlias = "Callable[[tuple[mx.array, ...], State], tuple[mx.array, State]]"


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates queries and keys; `freqs`, where given, stand for `base`.

    What is rotated is multiplied by `gain`.
    """

    dims: int
    base: float
    scale: float = 1.0
    freqs: tuple[float, ...] | None = None  # radians per turn of the angle: 1 / frequency
    traditional: bool = False
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A layer that keeps keys [heads, key_dim] and values [heads, value_dim] of each token.

    A token sees `window` tokens, itself included, and no others need be kept; 0: it sees all.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    def token_bytes(self, item: int) -> int:
        """What one token more takes, in numbers of `item` bytes."""
        return 0 if self.window else self._line * item

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """What a sequence takes besides, whatever its length, in chunks of up to `chunk` tokens."""
        return window_room(self.window, chunk) * self._line * item if self.window else 0

    @property
    def _line(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """A layer that keeps one line [dim] of each token, which all heads read (MLA).

    Its first `rank` numbers are what scores weigh.
    """

    dim: int
    rank: int

    def token_bytes(self, item: int) -> int:
        """See KeyValue."""
        return self.dim * item

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """See KeyValue."""
        return 0


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer that keeps a state of float32 arrays of these shapes, whatever the length.

    It begins with zeros.
    """

    shapes: tuple[Shape, ...]

    def token_bytes(self, item: int) -> int:
        """See KeyValue."""
        return 0

    def fixed_bytes(self, item: int, chunk: int) -> int:
        """See KeyValue. One state, and those before it, for tokens that are taken back."""
        return (1 + STEPS_BACK) * 4 * sum(math.prod(shape) for shape in self.shapes)


LayerCache: TypeAlias = KeyValue | Latent | Recurrent

MOST = 2**31 - 1  # of any whole number in config.json; MLX counts so far
MOST_PARTS = 10_000  # layers of a model, experts of a layer; each has names of its own

STEPS_BACK = 2  # a step ahead that was for nothing, and the one whose token is drawn again
WINDOW_GROWTH = 256  # tokens between two moves of a window's tokens to the front of their array


def window_room(window: int, chunk: int) -> int:
    """Tokens that the array of a window holds: what the first of a chunk sees, and the chunk."""
    return window + max(chunk, WINDOW_GROWTH)


class LatentHeads(Protocol):
    """How the heads of a Latent layer read its lines, in two ways that give the same.

    Queries that are `absorbed` have the lines as keys and their first `rank` numbers as values;
    what they read has to be `opened`. Or keys and values are made of the lines: `expanded`.
    """

    @property
    def rank(self) -> int: ...

    def expands(self, count: int, length: int) -> bool:
        """Whether the second way is cheaper for `count` queries, the last of `length` tokens."""

    def absorbed(self, q: mx.array) -> mx.array:
        """q [T, H, D] -> [T, H, dim]."""

    def opened(self, read: mx.array) -> mx.array:
        """read [T, H, rank] -> [T, H, V]."""

    def expanded(self, lines: mx.array) -> tuple[mx.array, mx.array]:
        """lines [L, dim] -> keys [H, L, D], values [H, L, V]."""


class Step(Protocol):
    """The one token axis of a step, see attention.py. `layer` counts from 0 as Plan.caches does."""

    @property
    def logits(self) -> bool: ...

    def wanted(self, x: mx.array) -> mx.array: ...

    def rope(self, x: mx.array, rope: Rope) -> mx.array: ...

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """q [T, H, D], k [T, KV, D], v [T, KV, V] -> [T, H, V], for a KeyValue layer."""

    def attend_turned(
        self, layer: int, asked: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """`attend` with queries and keys that are not rotated yet: `asked` are both of them, or
        one array [T, H + KV, D] with keys behind queries."""

    def attend_latent(
        self, layer: int, q: mx.array, line: mx.array, scale: float, heads: LatentHeads
    ) -> mx.array:
        """q [T, H, D], line [T, dim] -> [T, H, V], for a Latent layer; `heads` know its weights."""

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """`scan` over each row's tokens from its state on: inputs [T, ...] -> [T, ...]."""


class Norm(Protocol):
    """A norm over the last axis: x [T, d] -> [T, d]."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def after(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """x + y, and its norm."""

    def late(self, x: mx.array) -> Asked:
        """The norm of x, left to a linear layer where that computes it at no cost."""


class Normed(NamedTuple):
    """The norm of x [T, d], not computed yet: of few lines a product does it besides."""

    x: mx.array
    norm: Norm

    def __call__(self) -> mx.array:
        return self.norm(self.x)


Asked: TypeAlias = "mx.array | Normed"  # [T, d]


class Linear(Protocol):
    """x [T, in] -> [T, out]."""

    def __call__(self, x: Asked) -> mx.array: ...

    def onto(self, x: mx.array, beside: mx.array) -> mx.array | None:
        """`beside` [T, out] and the product of x, added up, where a kernel does both in one."""


class Product(NamedTuple):
    """A linear layer's product with x [T, in], not computed yet: a kernel may add it up, too."""

    layer: Linear
    x: mx.array

    def __call__(self) -> mx.array:
        return self.layer(self.x)


class Embedding(Protocol):
    """A token table that is also a head for tied models."""

    def __call__(self, tokens: mx.array) -> mx.array: ...

    def as_linear(self, x: Asked) -> mx.array: ...


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

    def linear(self, name: str) -> Linear: ...

    def joined(self, names: Sequence[str]) -> Linear: ...

    def gated(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> Callable[[Asked], mx.array]: ...

    def norm(self, name: str, eps: float) -> Norm: ...

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
    caches: tuple[LayerCache, ...]  # what each layer keeps of a sequence
    shapes: Mapping[str, Shape]  # every tensor the weights must have, in the order of use
    ignored: Callable[[str], bool]  # tensors that may be there and are not used
    build: Callable[[Parts], Model]
    derived: Callable[[Found], Iterable[Derived]] = nothing
    float32: Callable[[str], bool] = lambda name: False  # tensors kept so, whatever the others are


def integer(
    config: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST
) -> int:
    """A whole number from 1 to `most` of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a whole number above 0")
    if value > most:
        raise _unusable(key, f"config.json has {key!r}: {_brief(value)}, must be at most {most}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of config.json; raises ModelLoadFailed naming the key."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise _unusable(key, f"config.json has no {key!r}, which its model_type needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _unusable(key, f"config.json has {key!r}: {value!r}, must be a number above 0")
    if value > sys.float_info.max:
        raise _unusable(key, f"config.json has {key!r}: {_brief(value)}, must be finite")
    return float(value)


def _brief(value: float) -> str:
    """Without all the digits that a whole number may have."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > 64 else repr(value)


def _unusable(key: str, why: str) -> ModelLoadFailed:
    """With the key in its details: whoever looks for all faults goes on behind it."""
    return ModelLoadFailed(why, details={"key": key})
