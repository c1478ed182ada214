"""The residual stream between layers, whose last addition may still be pending.

On a GPU the product before an addition, or the norm behind it, can do it in one kernel. So a layer
passes on what is to be added, and the next one decides. No MLX at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mlxpool.worker.layers.interface import (
    ForwardBatch,
    LinearInput,
    Norm,
    PendingProduct,
)

if TYPE_CHECKING:
    import mlx.core as mx


class ResidualSum(NamedTuple):
    """x + y [T, d], not added yet; y may be a product that is not computed yet either."""

    x: mx.array
    y: mx.array | PendingProduct


Residual: TypeAlias = "mx.array | ResidualSum"  # [T, d]


def materialised(x: Residual) -> mx.array:
    """The array [T, d] that x stands for."""
    return x.x + _computed(x.y) if isinstance(x, ResidualSum) else x


def add_and_norm(norm: Norm, x: Residual) -> tuple[mx.array, mx.array]:
    """The array that x stands for, and its norm."""
    return norm.add_and_norm(x.x, _computed(x.y)) if isinstance(x, ResidualSum) else (x, norm(x))


def _computed(y: mx.array | PendingProduct) -> mx.array:
    return y() if isinstance(y, PendingProduct) else y


def add_and_defer_norm(norm: Norm, x: Residual) -> tuple[mx.array, LinearInput]:
    """The array that x stands for, and its norm for a linear layer, which may compute it itself."""
    if isinstance(x, ResidualSum):
        total = x.y.layer.add_to(x.y.x, x.x) if isinstance(x.y, PendingProduct) else None
        if total is None:
            return add_and_norm(norm, x)
        x = total
    return x, norm.deferred(x)


class FusableSublayer:
    """A mixer or feed-forward that begins and ends with linear layers.

    The first can include the norm in front of it, the last the residual addition behind it.
    """

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> PendingProduct:
        """The output of the sublayer, but for its last product; `batch` is given to mixers only."""
        raise NotImplementedError

    def __call__(self, x: mx.array, *batch: ForwardBatch) -> mx.array:
        return self.pending(x, *batch)()
