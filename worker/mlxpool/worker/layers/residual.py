"""Residual stream."""

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
    """x + y [T, d], added up by the product that y is, or by the next norm: one kernel on a GPU."""

    x: mx.array
    y: mx.array | PendingProduct


Residual: TypeAlias = "mx.array | ResidualSum"  # what goes from layer to layer


def materialised(x: Residual) -> mx.array:
    """x, added up."""
    return x.x + _computed(x.y) if isinstance(x, ResidualSum) else x


def add_and_norm(norm: Norm, x: Residual) -> tuple[mx.array, mx.array]:
    """x, added up, and its norm."""
    return norm.after(x.x, _computed(x.y)) if isinstance(x, ResidualSum) else (x, norm(x))


def _computed(y: mx.array | PendingProduct) -> mx.array:
    return y() if isinstance(y, PendingProduct) else y


def add_and_defer_norm(norm: Norm, x: Residual) -> tuple[mx.array, LinearInput]:
    """The same for linear layers, which may take both on themselves."""
    if isinstance(x, ResidualSum):
        whole = x.y.layer.onto(x.y.x, x.x) if isinstance(x.y, PendingProduct) else None
        if whole is None:
            return add_and_norm(norm, x)
        x = whole
    return x, norm.late(x)


class FusableSublayer:
    """What begins and ends with linear layers: they may do the norm before it, and the sum behind.

    A mixer, called with x and the step, or a feed, with x.
    """

    def late(self, x: LinearInput, *step: ForwardBatch) -> PendingProduct:
        """What comes out, but for the last layer."""
        raise NotImplementedError

    def __call__(self, x: mx.array, *step: ForwardBatch) -> mx.array:
        return self.late(x, *step)()
