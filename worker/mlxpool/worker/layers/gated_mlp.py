"""MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxpool.worker.layers.decoder_layer import (
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.interface import (
    Activation,
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    LinearInput,
    PendingProduct,
)
from mlxpool.worker.layers.residual import (
    FusableSublayer,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(gate(x), up(x))); without an activation swiglu."""

    hidden: int
    width: int
    bias: bool = False
    activation: Activation | None = None

    def shapes(self, name: str) -> WeightShapes:
        """See Feed."""
        yield from linear_shapes(f"{name}.gate_proj", self.width, self.hidden, self.bias)
        yield from linear_shapes(f"{name}.up_proj", self.width, self.hidden, self.bias)
        yield from linear_shapes(f"{name}.down_proj", self.hidden, self.width, self.bias)

    def build(self, parts: LayerBuilder, name: str) -> LayerFunction:
        """See Feed."""
        return _Gated(self, parts, name)


class _Gated(FusableSublayer):
    def __init__(self, spec: GatedMLP, parts: LayerBuilder, name: str) -> None:
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gated = parts.gated(names, spec.width, spec.activation)
        self.down = parts.linear(f"{name}.down_proj")

    def late(self, x: LinearInput, *step: ForwardBatch) -> PendingProduct:
        """See Late."""
        return PendingProduct(self.down, self.gated(x))
