"""What a model is to the rest of the worker, and what a model file may use. No MLX at run time.

A model file is read in two ways: `plan` tells, without MLX, which tensors the weights must have;
`Plan.build` makes the model of loaded weights, through `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from mlxpool.worker.kernels.score_params import ScoreParams

if TYPE_CHECKING:
    import mlx.core as mx

Shape: TypeAlias = tuple[int, ...]
LayerFunction: TypeAlias = "Callable[[mx.array], mx.array]"
Activation: TypeAlias = "Callable[[mx.array, mx.array], mx.array]"  # gate, up
RecurrentState: TypeAlias = "tuple[mx.array, ...]"
# Inputs [B, n, ...] and state [B, ...] of B rows -> outputs [B, n, ...] and the state after them.
Scan: TypeAlias = (
    "Callable[[tuple[mx.array, ...], RecurrentState], tuple[mx.array, RecurrentState]]"
)


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


class LatentProjections(Protocol):
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


class ForwardBatch(Protocol):
    """The one token axis of a step, see attention.py. `layer` counts from 0 as Plan.caches does."""

    @property
    def logits(self) -> bool: ...

    def wanted(self, x: mx.array) -> mx.array: ...

    def rope(self, x: mx.array, rope: Rope) -> mx.array: ...

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """q [T, H, D], k [T, KV, D], v [T, KV, V] -> [T, H, V], for a KeyValueSpec layer."""

    def attend_turned(
        self, layer: int, asked: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """`attend` with queries and keys that are not rotated yet: `asked` are both of them, or
        one array [T, H + KV, D] with keys behind queries."""

    def attend_latent(
        self, layer: int, q: mx.array, line: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """q [T, H, D], line [T, dim] -> [T, H, V], for a Latent layer; `heads` know its weights."""

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """`scan` over each row's tokens from its state on: inputs [T, ...] -> [T, ...]."""


class Norm(Protocol):
    """A norm over the last axis: x [T, d] -> [T, d]."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def after(self, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """x + y, and its norm."""

    def late(self, x: mx.array) -> LinearInput:
        """The norm of x, left to a linear layer where that computes it at no cost."""


class PendingNorm(NamedTuple):
    """The norm of x [T, d], not computed yet: of few lines a product does it besides."""

    x: mx.array
    norm: Norm

    def __call__(self) -> mx.array:
        return self.norm(self.x)


LinearInput: TypeAlias = "mx.array | PendingNorm"  # [T, d]


class Linear(Protocol):
    """x [T, in] -> [T, out]."""

    def __call__(self, x: LinearInput) -> mx.array: ...

    def onto(self, x: mx.array, beside: mx.array) -> mx.array | None:
        """`beside` [T, out] and the product of x, added up, where a kernel does both in one."""


class PendingProduct(NamedTuple):
    """A linear layer's product with x [T, in], not computed yet: a kernel may add it up, too."""

    layer: Linear
    x: mx.array

    def __call__(self) -> mx.array:
        return self.layer(self.x)


class Embedding(Protocol):
    """A token table that is also a head for tied models."""

    def __call__(self, tokens: mx.array) -> mx.array: ...

    def as_linear(self, x: LinearInput) -> mx.array: ...


class MultiLinear(Protocol):
    """A linear layer for each head: x [H, T, in] -> [H, T, out], and `back` the other way."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def back(self, x: mx.array) -> mx.array: ...


class SwitchLayer(Protocol):
    """x [T, in] with the experts [T, k] that each token chose -> [T, k, out].

    Those of `Parts.experts` take x [T, k, in] as well.
    """

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array: ...


class LayerBuilder(Protocol):
    """Layers over named weights; what layout a weight has is known here and nowhere else."""

    def linear(self, name: str) -> Linear: ...

    def joined(self, names: Sequence[str]) -> Linear: ...

    def gated(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> Callable[[LinearInput], mx.array]: ...

    def norm(self, name: str, eps: float) -> Norm: ...

    def embedding(self, name: str) -> Embedding: ...

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array: ...

    def array(self, name: str) -> mx.array: ...

    def heads(self, name: str) -> MultiLinear: ...

    def experts(self, name: str) -> SwitchLayer: ...

    def expert_mlp(self, name: str, activation: Activation | None = None) -> SwitchLayer: ...
